"""Advantages of a batch, and how much each sampled token weighs in the loss.

A rollout's advantage is its reward minus the mean of its group (GRPO without the division, as Dr. GRPO argues), or
minus the mean of the other rollouts (RLOO), optionally divided by the group's standard deviation + 1e-4. Where a node
has rewards of its own, the calls of that node have advantages among those. Rewards within 1e-6 say nothing: a group
that has no others is left out. Numpy only. It refuses to invent a reward: a rollout without a finite one never gets
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from art_backends.config import TrainConfig
from art_backends.training.sequences import Sample, SequenceGroup
from art_backends.trajectories import has_spread

STD_OFFSET = 1e-4  # keeps the division finite; TRL's value


def group_advantages(
    rewards: Mapping[str, float], *, scale: bool, baseline: Literal["mean", "leave_one_out"] = "mean"
) -> dict[str, float] | None:
    """Advantage by rollout id, or None if the rewards have no spread.

    ``baseline``: the mean of all, or of all others; ``scale`` divides by the standard deviation (of the sample, n − 1
    in the denominator) + 1e-4.
    """
    values = np.asarray(list(rewards.values()), dtype=np.float64)
    if not has_spread(values.tolist()):
        return None
    centred = values - values.mean()
    if baseline == "leave_one_out":
        centred = centred * len(values) / (len(values) - 1)  # R_i − mean of the others, rearranged
    if scale:
        centred = centred / (values.std(ddof=1) + STD_OFFSET)
    return dict(zip(rewards, centred.tolist(), strict=True))


@dataclass(frozen=True)
class Plan:
    """What a batch trains.

    ``groups``: those with a spread, ordered by rollout id. ``advantage`` and ``weight`` are by rollout id, the
    weight being the constant by which each of the rollout's sampled tokens enters the loss (see ``plan``);
    ``by_node`` has the advantages of nodes with rewards of their own, by (rollout id, node); ``trained`` is |T_i|.
    Rollouts without a trainable token have no weight.
    """

    groups: list[SequenceGroup]
    advantage: dict[str, float]
    by_node: dict[tuple[str, str], float]
    weight: dict[str, float]
    trained: dict[str, int]

    @property
    def tokens(self) -> int:
        """Trained tokens of the batch; each counts once per rollout that sampled it."""
        return sum(self.trained.values())

    def of(self, sample: Sample) -> float:
        """The advantage of an answer's tokens."""
        return self.at(sample.rollout_id, sample.node)

    def at(self, rollout: str, node: str | None) -> float:
        """The advantage of what a node of a rollout sampled; 0 in a group without a spread."""
        whole = self.advantage.get(rollout, 0.0)
        return whole if node is None else self.by_node.get((rollout, node), whole)


def plan(groups: Sequence[SequenceGroup], config: TrainConfig) -> Plan:
    """Advantages and weights of a batch; a plan with ``tokens == 0`` has nothing to learn from.

    The weight is 1/Z with Z all trained tokens of the batch (``batch_tokens``), 1/(N·|T_i|) (``rollout_tokens``), or
    1/(N·normalization_tokens) (``constant``), N being the rollouts with trained tokens.
    """
    kept: list[SequenceGroup] = []
    advantage: dict[str, float] = {}
    by_node: dict[tuple[str, str], float] = {}
    trained: dict[str, int] = {}
    for group in groups:
        values = group_advantages(group.rewards, scale=config.scale_rewards, baseline=config.baseline)
        nodes = {
            node: group_advantages(rewards, scale=config.scale_rewards, baseline=config.baseline)
            for node, rewards in group.node_rewards.items()
        }
        if values is None and not any(nodes.values()):
            continue
        kept.append(group)
        advantage.update(values or dict.fromkeys(group.rewards, 0.0))
        for node, found in nodes.items():
            for rollout, value in (found or dict.fromkeys(group.node_rewards[node], 0.0)).items():
                by_node[rollout, node] = value
        for sample in group.samples:
            trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + sample.trained
    total, rollouts = sum(trained.values()), len(trained)
    if config.loss_normalization == "batch_tokens":  # Z is a constant of the whole batch, never of a pack
        weight = dict.fromkeys(trained, 1.0 / total) if total else {}
    elif config.loss_normalization == "constant":
        weight = dict.fromkeys(trained, 1.0 / (rollouts * config.normalization_tokens)) if rollouts else {}
    else:
        weight = {rollout: 1.0 / (rollouts * count) for rollout, count in trained.items()}
    return Plan(kept, advantage, by_node, weight, trained)


def imitation(groups: Sequence[SequenceGroup]) -> Plan:
    """Every answer is worth the same: cross-entropy, the mean over all tokens of the batch."""
    trained: dict[str, int] = {}
    for group in groups:
        for sample in group.samples:
            trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + sample.trained
    total = sum(trained.values())
    advantage = {rollout: 1.0 for group in groups for rollout in group.rewards}
    return Plan(list(groups), advantage, {}, dict.fromkeys(trained, 1.0 / total) if total else {}, trained)
