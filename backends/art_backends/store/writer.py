"""The store for an event loop: the same methods, awaitable, and none of them blocks the loop.

Writes go through one thread in the order they were asked for, reads through a few others; a write that was begun is
finished even when the task that awaits it is cancelled (a client that hangs up must not lose its outcome). The queue
of writes is bounded: beyond it, callers wait.

It refuses to retry: a StoreError reaches the caller, who decides whether to go on without the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from art_backends.redaction import Redactor
from art_backends.store.database import READERS
from art_backends.store.forgetting import Forgotten
from art_backends.store.store import Ending, Filters, Store, Token, TokenKind
from art_backends.trajectories import Call, Rollout

QUEUE = 1024

P = ParamSpec("P")
T = TypeVar("T")


class AsyncStore:
    """Awaitable wrappers around one ``Store``; closes it with ``await aclose()``. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(READERS - 1, thread_name_prefix="store-reader")
        self._slots = asyncio.Semaphore(QUEUE)
        self._pending: set[asyncio.Future[Any]] = set()

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
        if self._pending:
            await asyncio.wait(set(self._pending))
        await asyncio.to_thread(self._writer.shutdown)
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._store.close)

    async def _write(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        await self._slots.acquire()
        future = asyncio.get_running_loop().run_in_executor(self._writer, partial(method, *args, **kwargs))
        self._pending.add(future)
        future.add_done_callback(self._written)
        return await asyncio.shield(future)

    def _written(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        self._slots.release()
        if not future.cancelled():
            future.exception()  # seen: nobody may be waiting any more

    async def _read(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
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

    async def begin_call(self, call: Call) -> None:
        await self._write(self._store.begin_call, call)

    async def finish_call(self, call: Call) -> None:
        await self._write(self._store.finish_call, call)

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
