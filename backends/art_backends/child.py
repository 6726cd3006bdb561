"""What a process and the child it starts agree on: a first line of JSON says that the child is ready, or why it is not;
the child ends with its parent, and its log's end tells why it died.

It refuses to start, watch or restart anything: that is for those who own the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_backends.errors import ServerError, revive

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


async def ready(output: asyncio.StreamReader, what: str, seconds: float, log_file: Path) -> dict[str, Any]:
    """What a child says in the first line of its output, within a deadline.

    Raises the error that the child says it has; ServerError if it says nothing that can be understood.
    """
    try:
        async with asyncio.timeout(seconds):
            line = await output.readline()
        said = json.loads(line)
    except TimeoutError:
        raise ServerError(f"the {what} did not start in {seconds:.0f} s; {log_tail(log_file)}") from None
    except ValueError:  # no JSON, or longer than a line may be
        said = None
    if not isinstance(said, dict) or "ready" not in said:
        raise ServerError(f"the {what} ended before it was ready; {log_tail(log_file)}")
    if said["ready"] is not True:
        raise revive(str(said.get("type")), str(said.get("message") or f"the {what} could not start"))
    return said


def log_tail(log_file: Path) -> str:
    """The end of a child's log, for the error about it."""
    try:
        text = log_file.read_text(errors="replace")[-LOG_TAIL:].strip()
    except OSError:
        text = ""
    return f"end of {log_file}:\n{text}" if text else f"{log_file} is empty"
