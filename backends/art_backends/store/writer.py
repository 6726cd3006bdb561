"""The store for an event loop: the same methods, awaitable, and none of them blocks the loop.

Writes go through one thread in the order they were asked for, reads through a few others; a write that was begun is
finished even when the task that awaits it is cancelled (a client that hangs up must not lose its outcome). Calls that
are written while the thread is busy share a transaction. The queue of writes is bounded: beyond it, callers wait.

A call's intent is only noted (``begin_call`` does not wait): it is written within INTENT_SECONDS, before any other
write but a call's, and before any read; a call whose outcome is there by then is written once.

It refuses to retry: a StoreError reaches the caller, who decides whether to go on without the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from art_backends.redaction import Redactor
from art_backends.store.database import READERS
from art_backends.store.forgetting import Forgotten
from art_backends.store.store import CallWrite, Ending, Filters, Store, Token, TokenKind
from art_backends.trajectories import Call, Rollout

log = logging.getLogger(__name__)

QUEUE = 1024
BATCH = 64  # writes that the thread is given at once
INTENT_SECONDS = 0.05

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Write:
    """What the thread has to do: write a call, or call something."""

    what: CallWrite | Callable[[], Any]
    done: asyncio.Future[Any] | None = None  # None: nobody waits
    result: Any = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)


class AsyncStore:
    """Awaitable wrappers around one ``Store``; closes it with ``await aclose()``. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(READERS - 1, thread_name_prefix="store-reader")
        self._slots = asyncio.Semaphore(QUEUE)
        self._intents: dict[str, Call] = {}  # noted, by the call's id
        self._timer: asyncio.TimerHandle | None = None  # until they are written
        self._waiting: deque[_Write] = deque()
        self._busy = False  # the thread has a batch
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def open(cls, path: Path, redactor: Redactor | None = None) -> AsyncStore:
        return cls(await asyncio.to_thread(Store.open, path, redactor))

    @property
    def path(self) -> Path:
        return self._store.path

    @property
    def broken(self) -> str | None:
        """Why nothing more is written, or None."""
        return self._store.broken

    async def aclose(self) -> None:
        """Finish every write that was asked for, then close the store."""
        self._write_intents()
        await self._idle.wait()
        await asyncio.to_thread(self._writer.shutdown)
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._store.close)

    async def _write(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._write_intents()
        result: T = await self._queued(partial(method, *args, **kwargs))
        return result

    async def _queued(self, what: CallWrite | Callable[[], Any]) -> Any:
        await self._slots.acquire()
        if isinstance(what, CallWrite):
            self._intents.pop(what.call.id, None)
        write = _Write(what, asyncio.get_running_loop().create_future())
        self._add(write)
        assert write.done is not None
        return await write.done

    def _add(self, write: _Write) -> None:
        self._waiting.append(write)
        self._idle.clear()
        self._next()

    def _next(self) -> None:
        """Give the thread what waits, unless it is busy."""
        if self._busy or not self._waiting:
            return
        self._busy = True
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        self._writer.submit(self._work, batch, asyncio.get_running_loop())

    def _work(self, batch: Sequence[_Write], loop: asyncio.AbstractEventLoop) -> None:
        """In the thread: neighbouring calls in one transaction."""
        calls: dict[_Write, CallWrite] = {}
        for write in batch:
            if isinstance(write.what, CallWrite):
                calls[write] = write.what
                continue
            self._write_calls(calls)
            calls = {}
            try:
                write.result = write.what()
            except Exception as error:  # noqa: BLE001 - boundary: raised where it is awaited
                write.error = error
        self._write_calls(calls)
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(self._written, batch)

    def _write_calls(self, calls: Mapping[_Write, CallWrite]) -> None:
        for write, error in zip(calls, self._store.write_calls(list(calls.values())), strict=True):
            write.error = error

    def _written(self, batch: Sequence[_Write]) -> None:
        for write in batch:
            if write.done is None:
                if write.error is not None:
                    log.info("an intent was not written: %s", write.error)
                continue
            self._slots.release()
            if write.done.cancelled():
                continue
            if write.error is not None:
                write.done.set_exception(write.error)
            else:
                write.done.set_result(write.result)
        self._busy = False
        if not self._waiting:
            self._idle.set()
        self._next()

    async def _read(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._intents:
            await self._write(lambda: None)
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(method, *args, **kwargs))

    # tokens

    async def add_token(
        self, kind: TokenKind, digest: str, rollout_id: str | None = None, policy: str | None = None
    ) -> None:
        await self._write(self._store.add_token, kind, digest, rollout_id, policy)

    async def find_token(self, digest: str) -> Token | None:
        return await self._read(self._store.find_token, digest)

    async def drop_tokens(self, kind: TokenKind, keep: Iterable[str] = ()) -> None:
        await self._write(self._store.drop_tokens, kind, tuple(keep))

    # rollouts

    async def open_rollout(self, rollout: Rollout, token_digest: str | None = None) -> None:
        await self._write(self._store.open_rollout, rollout, token_digest)

    async def close_rollout(self, rollout_id: str, **ending: Unpack[Ending]) -> Rollout:
        return await self._write(self._store.close_rollout, rollout_id, **ending)

    async def close_open_rollouts(self, *, fault: str, opened_before: float) -> list[str]:
        return await self._write(self._store.close_open_rollouts, fault=fault, opened_before=opened_before)

    async def rollout(self, rollout_id: str) -> Rollout | None:
        return await self._read(self._store.rollout, rollout_id)

    async def rollouts_by_id(self, rollout_ids: Iterable[str]) -> list[Rollout]:
        return await self._read(self._store.rollouts_by_id, tuple(rollout_ids))

    async def rollouts(
        self, *, limit: int = 1000, with_calls: bool = False, newest: bool = False, **filters: Unpack[Filters]
    ) -> list[Rollout]:
        return await self._read(self._store.rollouts, limit=limit, with_calls=with_calls, newest=newest, **filters)

    # calls

    def begin_call(self, call: Call) -> None:
        """Note a call's intent; see the module."""
        self._intents[call.id] = call
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTENT_SECONDS, self._write_intents)

    def _write_intents(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        intents, self._intents = self._intents, {}
        for call in intents.values():
            self._add(_Write(CallWrite(call, begins=True)))

    async def finish_call(self, call: Call) -> None:
        await self._queued(CallWrite(call))

    async def calls(self, rollout_id: str) -> list[Call]:
        return await self._read(self._store.calls, rollout_id)

    # forgetting

    async def forget(self, *, subject: str | None = None, rollout_ids: Iterable[str] = ()) -> Forgotten:
        return await self._write(self._store.forget, subject=subject, rollout_ids=tuple(rollout_ids))

    async def forget_before(self, seconds: float) -> Forgotten:
        return await self._write(self._store.forget_before, seconds)

    # steps

    async def record_step(self, policy: str, step: int, outcome: Mapping[str, Any]) -> None:
        await self._write(self._store.record_step, policy, step, outcome)

    async def step(self, policy: str, step: int) -> dict[str, Any] | None:
        return await self._read(self._store.step, policy, step)

    async def steps(self, policy: str) -> list[dict[str, Any]]:
        return await self._read(self._store.steps, policy)

    async def drop_steps(self, policy: str, *, from_step: int) -> int:
        return await self._write(self._store.drop_steps, policy, from_step=from_step)

    async def trained(self, rollout_id: str) -> list[dict[str, Any]]:
        return await self._read(self._store.trained, rollout_id)

    async def counts(self) -> dict[str, int]:
        return await self._read(self._store.counts)
