"""The last rollouts of a group do not hold up the others: each may take only so much longer than the slowest of those.

It refuses to judge: a rollout that was ended here is no sample of the policy, neither good nor bad. It is left out and
counted (the agent's own deadline, ``rollout_timeout``, is another thing: that one is scored and trained).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import asynccontextmanager

SHARE = 4  # of a group of n, at most n // SHARE (and at least one) are its last


class LateError(TimeoutError):
    """A rollout was ended because it took much longer than the others of its group."""


class Stragglers:
    """Who is still running in which group, and since when."""

    def __init__(self, seconds: float | None, groups: Iterable[Hashable]) -> None:
        """``seconds``: how much longer than the slowest of the others a group's last rollouts may take (None: as long
        as they like). ``groups``: the group of each rollout that will run, once per rollout."""
        self._seconds = seconds
        self._left = Counter(groups)
        self._last = {group: max(1, number // SHARE) for group, number in self._left.items()}
        self._slowest: dict[Hashable, float] = {}  # seconds, of those that ended by themselves
        self._running: defaultdict[Hashable, dict[asyncio.Timeout, float]] = defaultdict(dict)  # limit → began

    @asynccontextmanager
    async def limited(self, group: Hashable) -> AsyncIterator[None]:
        """Around one rollout's run. Raises LateError if the run was ended by this; the run was cancelled then."""
        clock = asyncio.get_running_loop().time
        began = clock()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._running[group][limit] = began
                self._limit(group)  # what had to wait for room may begin as one of the last
                try:
                    yield
                finally:
                    del self._running[group][limit]
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise LateError(f"it took {self._seconds:g} s longer than the slowest of the others") from error
        finally:
            self._left[group] -= 1
            if not limit.expired():
                self._slowest[group] = max(self._slowest.get(group, 0.0), clock() - began)
                self._limit(group)

    def _limit(self, group: Hashable) -> None:
        """Give each that still runs its deadline, if few are left and it is known how long the others took."""
        if self._seconds is None or self._left[group] > self._last[group] or group not in self._slowest:
            return
        for limit, began in self._running[group].items():
            limit.reschedule(began + self._slowest[group] + self._seconds)
