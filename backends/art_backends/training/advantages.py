"""Advantages of a batch, and how much each sampled token weighs in the loss.

A rollout's advantage is its reward minus the mean of its group (GRPO without the division, as Dr. GRPO argues),
optionally divided by the group's standard deviation + 1e-4. A group whose rewards lie within 1e-6 says nothing and
is left out. Numpy only. It refuses to invent a reward: a rollout without a finite one never gets here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from art_backends.training.sequences import SequenceGroup

SPREAD = 1e-6  # groups whose rewards differ by less are left out
STD_OFFSET = 1e-4  # keeps the division finite; TRL's value


def group_advantages(rewards: Mapping[str, float], *, scale: bool) -> dict[str, float] | None:
    """Advantage by rollout id, or None if the rewards have no spread.

    ``scale`` divides by the standard deviation (of the sample, n − 1 in the denominator) + 1e-4.
    """
    values = np.asarray(list(rewards.values()), dtype=np.float64)
    if len(values) < 2 or values.max() - values.min() < SPREAD:
        return None
    centred = values - values.mean()
    if scale:
        centred = centred / (values.std(ddof=1) + STD_OFFSET)
    return dict(zip(rewards, centred.tolist(), strict=True))


@dataclass(frozen=True)
class Plan:
    """What a batch trains.

    ``groups``: those with a spread, ordered by rollout id. ``advantage`` and ``weight`` are by rollout id, the
    weight being the constant by which each of the rollout's sampled tokens enters the loss (1/Z, or
    1/(N·|T_i|)); ``trained`` is |T_i|. Rollouts without a trainable token have no weight.
    """

    groups: list[SequenceGroup]
    advantage: dict[str, float]
    weight: dict[str, float]
    trained: dict[str, int]

    @property
    def tokens(self) -> int:
        """Trained tokens of the batch; each counts once per rollout that sampled it."""
        return sum(self.trained.values())


def plan(
    groups: Sequence[SequenceGroup], *, scale: bool, normalization: Literal["batch_tokens", "rollout_tokens"]
) -> Plan:
    """Advantages and weights of a batch; a plan with ``tokens == 0`` has nothing to learn from."""
    kept: list[SequenceGroup] = []
    advantage: dict[str, float] = {}
    trained: dict[str, int] = {}
    for group in groups:
        values = group_advantages(group.rewards, scale=scale)
        if values is None:
            continue
        kept.append(group)
        advantage.update(values)
        for sample in group.samples:
            trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + sample.trained
    total = sum(trained.values())
    if normalization == "batch_tokens":  # Z is a constant of the whole batch, never of a pack
        weight = dict.fromkeys(trained, 1.0 / total) if total else {}
    else:
        weight = {rollout: 1.0 / (len(trained) * count) for rollout, count in trained.items()}
    return Plan(kept, advantage, weight, trained)
