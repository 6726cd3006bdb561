"""Which rollouts a training step plays: its groups, and those that replace groups from which nothing can be learned.

Everything here is a function of the step's number, the configuration and the rewards so far, so that a step that was
stopped is put together again exactly as it was. It refuses to drop a rollout: a group without a spread of rewards
stays part of the step's figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from art_backends.config import TrainConfig
from art_backends.rollouts import Slot
from art_backends.scenarios import Scenario, order
from art_backends.summary import scored
from art_backends.trajectories import Purpose, Rollout, has_spread, trajectory


class Batch:
    """The slots of one training step. ``version`` is the number of the adapter version that answers them."""

    def __init__(self, config: TrainConfig, scenarios: Sequence[Scenario], step: int, version: int) -> None:
        self._config = config
        self._scenarios = scenarios
        self._step = step
        self._version = version
        self._seen: Counter[str] = Counter()
        self._drawn = 0

    def first(self) -> list[Slot]:
        """The slots of the step's own groups."""
        config = self._config
        chosen = order(config.seed, self._step, config.groups_per_step, len(self._scenarios), shuffle=config.shuffle)
        return self._slots(chosen)

    def more(self, rollouts: Iterable[Rollout]) -> list[Slot]:
        """Slots of further groups in the place of those without a spread; none when there is nothing to replace, or
        ``dynamic_sampling`` groups were drawn already. To be asked again when these are played."""
        config = self._config
        learnable = sum(spread_groups(rollouts).values())
        wanted = min(config.groups_per_step - learnable, config.dynamic_sampling - self._drawn)
        if wanted <= 0:
            return []
        # An order of their own: the scenarios of the steps to come stay theirs.
        spare = order(f"{config.seed}:spare", self._step, config.dynamic_sampling, len(self._scenarios))
        chosen = spare[self._drawn : self._drawn + wanted]
        self._drawn += wanted
        return self._slots(chosen)

    def _slots(self, chosen: Sequence[int]) -> list[Slot]:
        slots = []
        oldest = max(0, self._version - self._config.max_staleness)
        for index in chosen:
            scenario = self._scenarios[index]
            self._seen[scenario.id] += 1
            times = self._seen[scenario.id]
            # A scenario that comes twice in a step is two groups, each with its own mean.
            group = scenario.id if times == 1 else f"{scenario.id}#{times}"
            for sample in range(self._config.group_size):
                place = Slot(Purpose.TRAIN, self._step, group, sample, scenario, self._version, oldest)
                slots.append(place)
        return slots


def spread_groups(rollouts: Iterable[Rollout]) -> dict[str, bool]:
    """By group: whether its rewards have a spread, those of single nodes included."""
    rewards: dict[str, dict[str, list[float]]] = {}
    for rollout in scored(rollouts):
        found = trajectory(rollout)
        if found is None:
            continue
        parts = rewards.setdefault(rollout.group, {})
        parts.setdefault("", []).append(found.reward)
        for node, reward in found.node_rewards.items():
            parts.setdefault(node, []).append(reward)
    return {group: any(has_spread(values) for values in parts.values()) for group, parts in rewards.items()}
