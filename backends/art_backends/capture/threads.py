"""Threads and executors carry the context of the code that started them, while that code is inside a scope.

Python copies ContextVars into tasks and ``asyncio.to_thread``, but not into ``threading.Thread``, a bare
``ThreadPoolExecutor`` or ``loop.run_in_executor``: a rollout's calls from there would be lost.

A pool's worker thread must not inherit the scope of whoever happened to start it: it lives on and works for other
rollouts. So workers start without a scope, and each submitted function carries its submitter's context.

It refuses to touch anything outside a scope: there the original is called with the arguments as they came. A worker
thread of the app's own making, started inside one rollout and fed by others through a queue, keeps the rollout that
started it; that cannot be seen from here.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from art_backends.capture.patches import PatchSet
from art_backends.capture.scope import SCOPE, current_scope


def _without_scope(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with no scope set, so that threads started on the way carry none."""
    token = SCOPE.set(None)
    try:
        return call(*args, **kwargs)
    finally:
        SCOPE.reset(token)


def _thread_start(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        # A thread that was started before is left alone: the original explains what is wrong.
        if current_scope() is None or self.ident is not None:
            original(self)
            return
        context = contextvars.copy_context()
        run = self.run

        def carried() -> None:
            self.__dict__.pop("run", None)
            context.run(run)

        self.__dict__["run"] = carried
        try:
            original(self)
        except BaseException:  # boundary: whatever kept it from starting, the thread is as it was
            self.__dict__.pop("run", None)
            raise

    return start


def _submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @functools.wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if current_scope() is None:
            return original(self, fn, *args, **kwargs)
        carried = functools.partial(contextvars.copy_context().run, fn)
        future: Future[Any] = _without_scope(original, self, carried, *args, **kwargs)
        return future

    return submit


class _Carried:
    """A pool's function in the context of whoever gave it: a fresh copy per call, for calls run in parallel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._context = contextvars.copy_context()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._context.copy().run(self._function, *args, **kwargs)


def _pool_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Pool, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if current_scope() is None or not isinstance(self, ThreadPool):
            return original(self, func, *args, **kwargs)
        return original(self, _Carried(func), *args, **kwargs)

    return method


def _pool_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: ThreadPool, *args: Any, **kwargs: Any) -> None:
        _without_scope(original, self, *args, **kwargs)

    return init


def install(patches: PatchSet) -> None:
    """Make threads, executors and thread pools carry the context of code inside a scope."""
    patches.replace(threading.Thread, "start", _thread_start)
    patches.replace(ThreadPoolExecutor, "submit", _submit)
    patches.replace(ThreadPool, "__init__", _pool_init)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
        patches.replace(Pool, name, _pool_method)
