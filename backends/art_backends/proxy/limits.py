"""Bounds of the proxy, the gate that keeps concurrency within them, and what is counted.

Every queue has a bound and every wait a deadline; what goes beyond is refused at once, with ``Retry-After``, and
counted. It refuses to know about HTTP: the exchange turns ``Overloaded`` into a reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from art_backends.config import Limits


@dataclass
class Counters:
    """What happened since the server started."""

    calls: int = 0  # requests that passed the checks
    captured: int = 0  # outcomes that reached the store
    passed: int = 0  # calls for other models, which went to their provider
    unattributed: int = 0  # served for no rollout, content not kept
    apps: int = 0  # of those, answered for an app: with no rollout's token
    late: int = 0  # served for a rollout that had closed
    errors: int = 0  # the engine failed or refused
    cancelled: int = 0  # the client went away
    deadlines: int = 0  # the engine did not answer in time
    interrupted: int = 0  # streams that ended without [DONE]
    drifted: int = 0  # calls whose earlier tokens could not be kept
    exact: int = 0  # calls sent with an exact prompt
    constrained: int = 0  # calls under a grammar
    retries: int = 0  # calls that an SDK's retry replaced
    reruns: int = 0  # calls of a node that was run again for the same task
    broken_control_tokens: int = 0  # strings in messages that spelled control tokens
    capture_lost: int = 0  # calls that could not be recorded
    refused_queue: int = 0  # refused: queue full
    refused_wait: int = 0  # refused: waited too long
    refused_draining: int = 0  # refused: the server is stopping
    refused_bad: int = 0  # refused: not a valid request, or beyond a limit

    def snapshot(self) -> dict[str, Any]:
        """The counts as a plain dictionary."""
        return asdict(self)


class Overloaded(Exception):  # noqa: N818 - it is an answer, not a failure of ours
    """No place for this call; ``status`` is 429 (queue full) or 503 (waited too long, or draining)."""

    def __init__(self, status: int, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Gate:
    """First come, first served places for calls; used as ``async with gate:`` around each call."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits
        self._counters = counters
        self._places = asyncio.Semaphore(limits.concurrency)
        self._waiting = 0
        self._inside = 0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def inside(self) -> int:
        """Calls that have a place now."""
        return self._inside

    @property
    def waiting(self) -> int:
        """Calls in the queue now."""
        return self._waiting

    async def __aenter__(self) -> None:
        await self._open.wait()
        if self._draining:
            self._counters.refused_draining += 1
            raise Overloaded(503, "the server is stopping", 5)
        if self._places.locked():
            await self._queue()
        else:
            await self._places.acquire()
        self._inside += 1
        self._empty.clear()

    async def _queue(self) -> None:
        if self._waiting >= self._limits.queue:
            self._counters.refused_queue += 1
            raise Overloaded(429, f"too many requests: {self._waiting} are waiting already")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await self._places.acquire()
        except TimeoutError:
            self._counters.refused_wait += 1
            raise Overloaded(503, f"no place within {self._limits.queue_seconds:g} seconds", 5) from None
        finally:
            self._waiting -= 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        self._places.release()
        if self._inside == 0:
            self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """New calls wait outside for as long as this lasts, which begins when nobody is inside any more."""
        self._open.clear()
        try:
            await self._emptied()
            yield
        finally:
            self._open.set()

    async def _emptied(self) -> None:
        while self._inside or self._waiting:
            await self._empty.wait()
            await asyncio.sleep(0)  # those who waited step in

    async def drain(self, seconds: float) -> bool:
        """Refuse new calls; wait until those inside have ended. False if some had not after ``seconds``."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._emptied()
        except TimeoutError:
            return False
        return True
