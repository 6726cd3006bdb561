"""The policy's table: which adapter versions are loaded, which one is newest, who still needs an older one.

The *alias*, the policy's own name, stands for the newest version, or for the one that somebody fixed it to.
A version may be unloaded when it is neither, no open rollout is pinned to it and no call is in flight on it.
Calls take a *lease* for as long as they run; rollouts take a *pin* until they close (or expire).

It refuses to talk to the engine (see ``adapters``): this is bookkeeping in one event loop, without a lock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from art_backends.trajectories import CaptureLevel, version_name, version_number


class PolicyTable:
    """One policy. Versions are numbers; 0, which stays loaded, is the base model or the adapter the run began from."""

    def __init__(self, name: str, *, base_model: str, models: list[str] | None = None) -> None:
        self.name = name
        self.models = list(models or [])
        self.base_id = base_model  # the name under which the engine serves the base model
        self.capture = CaptureLevel.TEXT
        self.exact_prompts = False
        self.loaded: set[int] = {0}
        self.bare: frozenset[int] = frozenset({0})  # versions without an adapter
        self.newest = 0
        self.fixed: int | None = None  # the version that the alias stays at
        self.set_aside: list[str] = []  # versions that could not be served: which, and why
        self.changed = asyncio.Event()  # set when a version may have become idle
        self._pins: Counter[int] = Counter()
        self._in_flight: Counter[int] = Counter()

    def answers(self, model: str) -> bool:
        """Whether calls for this model name are this policy's: any name if it has no list, its own names always, and
        those of its versions as long as they are loaded."""
        number = self.number(model)
        return number in self.loaded if number is not None else self.claims(model) or not self.models

    def claims(self, model: str) -> bool:
        """Whether a model name is this policy's in so many words, whatever providers there are: its names, and those
        of its versions, whether they are loaded or not."""
        return model in self.models or model == self.name or self.number(model) is not None

    def number(self, version: str) -> int | None:
        return version_number(self.name, version)

    @property
    def alias(self) -> int:
        """The version that answers calls of no rollout."""
        return self.newest if self.fixed is None else self.fixed

    def version_of(self, model: str) -> str:
        """The version, "NAME@N", that answers calls of no rollout for this model name."""
        return version_name(self.name, self.alias) if self.number(model) is None else model

    def engine_model(self, version: str) -> str:
        """What the engine calls ``NAME@N``: the base model has no adapter to name."""
        return self.base_id if self.number(version) in self.bare else version

    def begin_from_adapter(self) -> None:
        """Version 0 is an adapter, which is still to be loaded."""
        self.bare = frozenset()
        self.loaded.discard(0)

    def move(self, version: int) -> None:
        """Let new rollouts, and the alias unless it is fixed, go to ``version``, which must be loaded."""
        if version not in self.loaded:
            raise ValueError(f"{version_name(self.name, version)} is not loaded")
        self.newest = version
        self.changed.set()

    def pin(self, version: int) -> None:
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        self._drop(self._pins, version)

    @contextmanager
    def lease(self, version: str) -> Iterator[str]:
        """For the length of a call: the version stays loaded; gives the engine's name for it."""
        number = self.number(version)
        if number is None:
            raise ValueError(f"{version!r} is no version of {self.name}")
        self._in_flight[number] += 1
        try:
            yield self.engine_model(version)
        finally:
            self._drop(self._in_flight, number)

    def in_flight(self, version: int) -> int:
        return self._in_flight[version]

    def pinned(self, version: int) -> int:
        return self._pins[version]

    def idle(self) -> list[int]:
        """Loaded versions that nobody needs any more."""
        return [
            version
            for version in sorted(self.loaded)
            if version not in (0, self.newest, self.alias) and not self._pins[version] and not self._in_flight[version]
        ]

    def _drop(self, counter: Counter[int], version: int) -> None:
        counter[version] -= 1
        if counter[version] <= 0:
            del counter[version]
            self.changed.set()
