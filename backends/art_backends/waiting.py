"""Waits that end: a deadline on code that may never return, and an event loop that a hung thread cannot hold.

``bounded`` gives up on a coroutine even if it swallows its cancellation; ``in_thread`` runs blocking code on a daemon
thread, so that a hung one does not keep the process alive; ``run_to_end`` is ``asyncio.run`` with a Ctrl-C that
stops cleanly and an executor wide enough for many rollouts at once; ``watched`` tells when code blocks the event loop
itself, which no deadline can end.

It refuses to kill: a thread that hangs is left behind, for Python cannot end it.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

BLOCKED = 60.0  # seconds without a turn of the event loop until it is said
GRACE = 5.0  # seconds that cancelled code has to end
_left_behind: set[asyncio.Task[Any]] = set()  # tasks that ignored their cancellation; the handle keeps them alive


class OverdueError(TimeoutError):
    """The deadline of ``bounded`` passed. Told apart from a TimeoutError that the code itself raised."""


class SelfCancelledError(RuntimeError):
    """The code cancelled itself, which is not the same as the caller being cancelled."""


async def bounded(work: Coroutine[Any, Any, T], seconds: float, *, grace: float = GRACE) -> T:
    """Await ``work`` for at most ``seconds``; then cancel it, wait ``grace`` seconds and raise OverdueError."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _give_up(task, grace)
        raise
    if not task.done():
        await _give_up(task, grace)
        raise OverdueError(f"not done within {seconds:g} s")
    if task.cancelled():
        raise SelfCancelledError("cancelled itself")
    return task.result()


async def _give_up(task: asyncio.Task[Any], grace: float) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=grace)
    if not task.done():
        _left_behind.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as never retrieved


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking function on a daemon thread of its own, with the caller's context variables."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():  # given up meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = context.run(function, *arguments)
        except BaseException as error:  # noqa: BLE001 - boundary: whatever the code raises belongs to who awaits it
            # SystemExit would end the event loop, StopIteration cannot be set on a future
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if plain else RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="art-in-thread", daemon=True).start()
    return await future


def run_to_end(main: Coroutine[Any, Any, T], *, threads: int = 64, stopping: Callable[[], None] = lambda: None) -> T:
    """Run a coroutine to its end on a new event loop; the first Ctrl-C cancels it, the second stops at once.

    ``stopping`` is called on the event loop at the first Ctrl-C: to end what was begun may take a while.
    ``sys.exit`` in a task would end the loop and with it everything (a framework makes a task for each of the agent's
    parts): here it is a RuntimeError of that task.

    KeyboardInterrupt after a cancelled run. RuntimeError if this thread already runs an event loop.
    ``threads``: width of the default executor, where frameworks run the blocking parts of an agent.
    """
    loop = asyncio.new_event_loop()
    executor = ThreadPoolExecutor(threads, thread_name_prefix="art-agent")
    loop.set_default_executor(executor)
    loop.set_task_factory(_staying)
    interrupted = False
    task = loop.create_task(main)

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Runs between two bytecodes, so also while the agent's code blocks the event loop.
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        loop.call_soon_threadsafe(stopping)
        loop.call_soon_threadsafe(task.cancel)

    # Signal handlers exist on the main thread only; elsewhere, and where the app has its own, Ctrl-C is not ours.
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _close(loop, executor)


@contextmanager
def watched(warn: Callable[[str], None], seconds: float = BLOCKED) -> Iterator[None]:
    """While the block runs, ``warn`` when the event loop did not turn for ``seconds``, and say where it stands.

    ``warn`` is called from another thread.
    """
    loop, blocked = asyncio.get_running_loop(), threading.get_ident()
    turned, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(seconds / 10):
            turned.clear()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turned.set)
            if turned.wait(seconds) or ended.is_set():
                continue
            frame = sys._current_frames().get(blocked)
            where = "" if frame is None else "".join(traceback.format_stack(frame, limit=None)[-3:])
            warn(
                f"the event loop has not turned for {seconds:g} s, so no deadline can end what runs there: an async "
                f"part of the agent blocks (it should await, or be an ordinary function). It stands at:\n{where}"
            )
            turned.wait()

    threading.Thread(target=watch, name="art-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        turned.set()


class _Staying(Coroutine[Any, Any, T]):
    """A coroutine whose SystemExit is an ordinary error; all else is passed through."""

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except SystemExit as left:
            raise RuntimeError(f"SystemExit: {left}") from left

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # its name, code and frame, for whoever shows tasks


def _staying(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """A task as the loop itself makes it."""
    return asyncio.Task(_Staying(work) if asyncio.iscoroutine(work) else work, loop=loop, **options)


def _close(loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE))
    loop.run_until_complete(loop.shutdown_asyncgens())
    # Not loop.shutdown_default_executor(): it waits for ever for a thread that hangs.
    executor.shutdown(wait=False, cancel_futures=True)
    loop.close()


async def resolve(value: T | Awaitable[T]) -> T:
    """Await a value if it is awaitable."""
    return await value if isinstance(value, Awaitable) else value
