"""A process that is asked for its stacks writes those of its threads and of its tasks."""

import signal
import subprocess
import sys

HANGS = """
import asyncio, os, signal, sys, threading
from art_backends import stacks

assert stacks.on_request()
assert not stacks.on_request(), "it does not take a handler that is set"

def a_hanging_thread(end):
    end.wait()

async def a_hanging_task():
    await asyncio.Event().wait()

async def main():
    end = threading.Event()
    threading.Thread(target=a_hanging_thread, args=(end,), daemon=True).start()
    task = asyncio.create_task(a_hanging_task())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0)
    task.cancel()
    end.set()

if sys.argv[1] == "loop":
    asyncio.run(main())
else:
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def dumped(how: str) -> str:
    command = [sys.executable, "-c", HANGS, how]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_threads_and_tasks_are_written():
    text = dumped("loop")
    assert "in a_hanging_thread" in text
    assert "2 asyncio tasks" in text
    assert "in a_hanging_task" in text


def test_without_an_event_loop_there_are_threads_only():
    text = dumped("none")
    assert "most recent call first" in text
    assert "asyncio tasks" not in text


def test_no_handler_of_the_app_is_replaced():
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        from art_backends import stacks

        assert not stacks.on_request()
    finally:
        signal.signal(signal.SIGUSR1, before)
