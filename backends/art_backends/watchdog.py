"""Says what a run waits for when nothing has happened for a while: which rollout, which call, which child.

Whoever waits says so for as long as it does (``waiting``); a wait that begins or ends is a sign of life, and so is
whatever calls ``alive``. It refuses to end anything: every wait has a deadline of its own, elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from art_backends.errors import ArtError

QUIET_SECONDS = 90.0  # without a sign of life until it is said; then twice as long, and so on
SHOWN = 3  # waits and calls that are named


class Watchdog:
    """The waits of one run. ``clock`` is injected so that tests need not wait."""

    def __init__(self, *, quiet: float = QUIET_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._clock = clock
        self._waits: dict[object, tuple[str, float]] = {}
        self._last = clock()
        self._patience = quiet

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a wait. ``what`` goes on after "waits for": "the agent in rollout …"."""
        key = object()
        self.alive()
        self._waits[key] = what, self._clock()
        try:
            yield
        finally:
            del self._waits[key]
            self.alive()

    def alive(self) -> None:
        """Something has happened."""
        self._last = self._clock()
        self._patience = self._quiet

    def overdue(self) -> list[tuple[str, float]] | None:
        """The longest waits with their seconds, once each time that patience is over; else None."""
        now = self._clock()
        if now - self._last < self._patience:
            return None
        self._patience *= 2
        waits = sorted(self._waits.values(), key=lambda wait: wait[1])
        return [(what, now - since) for what, since in waits]

    async def watch(
        self, warn: Callable[[str], None], status: Callable[[], Awaitable[Mapping[str, Any]]], *, every: float = 5.0
    ) -> None:
        """Until cancelled: ``warn`` with words. ``status`` is asked for the server's side of it."""
        while True:
            await asyncio.sleep(every)
            waits = self.overdue()
            if waits is None:
                continue
            try:
                server = describe(await status())
            except ArtError as error:
                server = f"the server does not say: {error}"
            warn(f"nothing has happened for {self._clock() - self._last:.0f} s. {_listed(waits)}; {server}")


def describe(status: Mapping[str, Any]) -> str:
    """The server's side in words: its calls in flight, its children, the step that it makes."""
    proxy = status.get("proxy") or {}
    parts = [f"{proxy.get('in_flight', 0)} calls in flight"]
    oldest = [
        f"{call['seconds']:.0f} s" + (f" of rollout {call['rollout']}" if call.get("rollout") else "")
        for call in (proxy.get("oldest") or [])[:SHOWN]
    ]
    parts[0] += f" (the oldest: {', '.join(oldest)})" if oldest else ""
    parts += [
        f"{child['name']} is {child['state']} (pid {child['pid']}, {child['restarts']} restarts)"
        for child in status.get("children") or []
    ]
    if status.get("step_running") is not None:
        parts.append(f"step {status['step_running']} is being made")
    return "the server: " + ", ".join(parts)


def _listed(waits: list[tuple[str, float]]) -> str:
    if not waits:
        return "No wait is known"
    named = [f"{what} ({seconds:.0f} s)" for what, seconds in waits[:SHOWN]]
    more = f", and {len(waits) - SHOWN} more" if len(waits) > SHOWN else ""
    return f"It waits for {', '.join(named)}{more}"
