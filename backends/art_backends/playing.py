"""When the rollouts of training steps are played: those of a step when it is their turn, or, with ``overlap``, ahead.

With ``overlap`` the rollouts of the next ``max_staleness`` steps run while a step waits for its own and while it
trains, on the version that is the newest when they begin. A slow tool then holds up nobody: what is computed and what
is waited for happen at the same time. A version can move on meanwhile, so such rollouts are up to ``max_staleness``
versions old when they are trained; the loss weighs them (``importance``), and the server leaves out older ones.

It refuses to play beyond the last step, and to leave a rollout open: what was played ahead and is not needed is closed
as interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from art_backends import checks
from art_backends.batches import Batch
from art_backends.config import TrainConfig
from art_backends.display import Display
from art_backends.rollouts import Player
from art_backends.scenarios import Scenario
from art_backends.trajectories import Rollout


class Playing:
    """The steps whose rollouts are being played, or wait to be trained."""

    def __init__(self, config: TrainConfig, scenarios: Sequence[Scenario], player: Player, display: Display) -> None:
        self._config = config
        self._scenarios = scenarios
        self._player = player
        self._display = display
        self._steps: dict[int, tuple[_Progress, asyncio.Task[list[Rollout]]]] = {}

    async def rollouts(self, step: int, version: int) -> list[Rollout]:
        """All rollouts of a step; what is begun here is answered by ``version``, the newest.

        Raises what a Player does, and RewardError or ServerError if not one of them has a reward.
        """
        ahead = self._config.max_staleness if self._config.overlap else 0
        for number in range(step, max(step, min(step + ahead, self._config.steps)) + 1):
            if number not in self._steps:
                progress = _Progress(self._display)
                task = asyncio.get_running_loop().create_task(self._play(number, version, progress))
                self._steps[number] = progress, task
        progress, task = self._steps[step]
        progress.show()
        found = await task
        del self._steps[step]
        return found

    async def close(self) -> None:
        """End what was begun and is not needed."""
        tasks = [task for _, task in self._steps.values()]
        self._steps.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, step: int, version: int, progress: _Progress) -> list[Rollout]:
        batch = Batch(self._config, self._scenarios, step, version)
        rollouts: list[Rollout] = []
        slots, name = batch.first(), f"step {step}: rollouts"
        while slots:
            progress.phase(name, len(slots))
            rollouts += await self._player.collect(slots, progress.advance)
            checks.rewards(rollouts, f"step {step}", self._config.folder)
            slots, name = batch.more(rollouts), f"step {step}: more rollouts, for groups without a spread"
        return rollouts


class _Progress:
    """How far a step's rollouts are; on the display from the moment that it is the step which is waited for."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._shown = False
        self._name = ""
        self._total = 0
        self._done = 0

    def phase(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        if self._shown:
            self._display.phase(name, total)

    def advance(self, done: int) -> None:
        self._done = done
        if self._shown:
            self._display.advance(done)

    def show(self) -> None:
        self._shown = True
        if self._name:
            self._display.phase(self._name, self._total)
            self._display.advance(self._done)
