"""What a reward function is given and what may come back from it.

A reward gets a ``Run`` and returns a number, or named parts: a mapping with ``"reward"`` and other numbers, which
become metrics (``"success"``, 0 or 1, is understood by the reports; ``"node/NAME"`` is the reward of the calls that
the graph's node NAME makes, instead of ``"reward"``). It may be async.

It refuses to repair: None, NaN, infinity, text, lists and mappings without ``"reward"`` are a RewardError that says
what came back. No value is ever replaced by 0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

from art_backends.errors import RewardError
from art_backends.trajectories import Call, RolloutError

Parts: TypeAlias = "float | Mapping[str, float]"
Reward: TypeAlias = "Callable[[Run], Parts | Awaitable[Parts]]"

SHAPES = 'a reward must be a finite number, or a mapping with "reward" and other finite numbers'


@dataclass(frozen=True)
class Run:
    """One finished run of the agent, as a reward function sees it.

    ``output`` is the agent's final state (None if it failed), ``error`` what the agent did wrong (or None),
    ``calls`` its model calls in order of arrival; they are fetched from the server when they are first looked at.
    """

    scenario: dict[str, Any]
    output: Any = None
    calls: Sequence[Call] = field(default_factory=list)
    error: RolloutError | None = None
    rollout_id: str = ""


class LazyCalls(Sequence[Call]):
    """The calls of a rollout, fetched at the first look.

    A look from another thread than the event loop's waits for the fetch; on the event loop ``load`` must have been
    awaited before (the loop does so for every async reward).
    """

    def __init__(self, fetch: Callable[[], Awaitable[Sequence[Call]]], timeout: float) -> None:
        self._fetch = fetch
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._calls: Sequence[Call] | None = None

    async def load(self) -> Sequence[Call]:
        if self._calls is None:
            self._calls = await self._fetch()
        return self._calls

    def _get(self) -> Sequence[Call]:
        if self._calls is None:
            try:
                running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
            except RuntimeError:
                running = None
            if running is self._loop:
                raise RewardError("the calls of this run are not loaded: make the reward async, or call it in a thread")
            self._calls = asyncio.run_coroutine_threadsafe(self.load(), self._loop).result(self._timeout)
        return self._calls

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | Sequence[Call]:
        return self._get()[index]

    def __len__(self) -> int:
        return len(self._get())


def parts(value: Any) -> tuple[float, dict[str, float]]:
    """(reward, metrics) of what a reward function returned; RewardError says what is wrong with it."""
    if not isinstance(value, Mapping):
        return _number(value, ""), {}
    if "reward" not in value:
        keys = ", ".join(repr(key) for key in list(value)[:8]) or "nothing"
        raise RewardError(f'a mapping without "reward" (it has {keys}): {SHAPES}')
    numbers: dict[str, float] = {}
    for key, part in value.items():
        if not isinstance(key, str):
            raise RewardError(f"a mapping with the key {key!r}: names of parts must be text")
        numbers[key] = _number(part, f" in part {key!r}")
    return numbers.pop("reward"), numbers


def _number(value: Any, where: str) -> float:
    # Anything with __float__ and no shape is a number: numpy and torch scalars, Decimal, Fraction, bool.
    if value is None:
        raise RewardError(f"None{where}: {SHAPES} (is a return statement missing?)")
    if not hasattr(type(value), "__float__") or getattr(value, "shape", ()) not in ((), None):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else f" ({_short(value)})"
        raise RewardError(f"{_an(type(value).__name__)}{shape}{where}: {SHAPES}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RewardError(f"{_an(type(value).__name__)}{where} that is no number ({error}): {SHAPES}") from None
    if not math.isfinite(number):
        raise RewardError(f"{number}{where}: {SHAPES}")
    return number


def _an(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
