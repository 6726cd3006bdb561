"""What a process and the child it starts agree on: the child ends with its parent, and its log's end tells why it died.

It refuses to start, watch or restart anything: that is for those who own the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

LOG_TAIL = 2000  # characters


def when_input_ends(loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
    """Call ``then`` on ``loop`` when standard input ends, which it does with the parent, killed or not."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(then)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def log_tail(log_file: Path) -> str:
    """The end of a child's log, for the error about it."""
    try:
        text = log_file.read_text(errors="replace")[-LOG_TAIL:].strip()
    except OSError:
        text = ""
    return f"end of {log_file}:\n{text}" if text else f"{log_file} is empty"
