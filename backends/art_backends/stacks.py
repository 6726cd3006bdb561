"""Stack dumps on request: ``kill -USR1 PID`` makes a process write where all its threads and tasks stand.

Threads are written by ``faulthandler``, from C: that works even when no Python code gets a turn. The tasks of asyncio's
event loop follow as soon as the main thread gets one. It refuses to take a signal that the process already handles.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
import threading
from types import FrameType

FRAMES = 12  # of each task
STANDARD_ERROR = 2


def on_request() -> bool:
    """Write stacks to standard error at each SIGUSR1; False where that cannot be (another handler, another thread)."""
    number = getattr(signal, "SIGUSR1", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    signal.signal(number, _write_tasks)
    faulthandler.register(number, file=STANDARD_ERROR, all_threads=True, chain=True)
    return True


def _write_tasks(number: int, frame: FrameType | None) -> None:
    try:
        tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    except RuntimeError:  # no event loop runs in this thread now
        return
    sys.stderr.write(f"{len(tasks)} asyncio tasks\n")
    for task in tasks:
        task.print_stack(limit=FRAMES, file=sys.stderr)
    sys.stderr.flush()
