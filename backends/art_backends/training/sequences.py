"""From recorded calls to token sequences: what can be trained, and what each sampled token follows.

A *sample* is one choice of one call: prompt ids + sampled ids, of which the sampled ones train. Call B follows call
A when B's ids begin with A's; nothing else joins them, so a prompt that drifted starts a branch of its own. Sorted
by their ids, samples are in the depth-first order of their prefix tree: what two neighbours share is what they share
in the tree.

Numpy only. It refuses to re-tokenise, and to train a token whose id or logprob was not recorded: such answers are
left out with a reason (see ``exclusion``). An answer that is left out may still be context of later calls, whose
prompts hold its ids.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from art_backends.errors import TrainingError
from art_backends.exclusion import TOKEN_LIMIT, exclusion
from art_backends.trajectories import Call, Choice, Trajectory, TrajectoryGroup

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One sampled answer that can train.

    ``tokens``: prompt ids + sampled ids; ``tokens[start:]`` were sampled, with ``logprobs`` (same length) under the
    sampler's distribution at ``temperature``. ``key`` sorts samples by their ids.
    """

    rollout_id: str
    call_id: str
    choice: int
    order: int  # the call's place within its rollout
    tokens: Ints
    start: int
    logprobs: Floats
    temperature: float
    key: bytes
    node: str | None = None  # of the agent's program, which may have a reward of its own

    @property
    def trained(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Answer:
    """One choice of one call, trainable or not; ``reason`` says why not."""

    rollout_id: str
    call_id: str
    choice: int
    sample: Sample | None
    reason: str | None
    node: str | None = None


@dataclass(frozen=True)
class SequenceGroup:
    """The trajectories of one scenario: rewards by rollout id, every answer, and the samples in tree order."""

    name: str
    rewards: dict[str, float]  # of usable rollouts, sorted by id
    unusable: tuple[str, ...]  # rollouts whose reward is not finite
    node_rewards: dict[str, dict[str, float]]  # of nodes with rewards of their own: by node, then rollout id
    answers: tuple[Answer, ...]  # by rollout id, then in the order of the calls
    samples: tuple[Sample, ...]  # sorted by token ids, then rollout id, call, choice

    @property
    def first(self) -> str:
        """Smallest rollout id: what groups are ordered by."""
        return min((*self.rewards, *self.unusable), default="")


def build(
    groups: Iterable[TrajectoryGroup], *, vocabulary: int | None = None, nodes: Collection[str] = ()
) -> list[SequenceGroup]:
    """Sequences of a batch, ordered by rollout id: the order in which rollouts arrive does not matter.

    ``vocabulary``: number of ids the model knows; answers with others are left out. ``nodes``: those whose answers
    train (empty: all). Raises TrainingError if a rollout id occurs twice.
    """
    limit = TOKEN_LIMIT if vocabulary is None else vocabulary
    result = []
    seen: set[str] = set()
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.rollout_id in seen:
                raise TrainingError(f"rollout {trajectory.rollout_id} occurs twice in the batch; give each once")
            seen.add(trajectory.rollout_id)
        result.append(_build_group(group, limit, nodes))
    return sorted(result, key=lambda item: (item.first, item.name))


def _build_group(group: TrajectoryGroup, limit: int, chosen: Collection[str]) -> SequenceGroup:
    trajectories = sorted(group.trajectories, key=lambda item: item.rollout_id)
    usable = {item.rollout_id: item.reward for item in trajectories if math.isfinite(item.reward)}
    answers = tuple(
        answer for item in trajectories for answer in _answers(item, limit, item.rollout_id in usable, chosen)
    )
    samples = [answer.sample for answer in answers if answer.sample is not None]
    unusable = tuple(item.rollout_id for item in trajectories if item.rollout_id not in usable)
    nodes: dict[str, dict[str, float]] = {}
    for item in trajectories:
        for node, reward in sorted(item.node_rewards.items()):
            if item.rollout_id in usable and math.isfinite(reward):
                nodes.setdefault(node, {})[item.rollout_id] = reward
    return SequenceGroup(group.group, usable, unusable, nodes, answers, tuple(sorted(samples, key=_in_tree)))


def _in_tree(sample: Sample) -> tuple[bytes, str, int, int]:
    return sample.key, sample.rollout_id, sample.order, sample.choice


def forest(groups: Iterable[SequenceGroup]) -> list[Sample]:
    """The samples of all groups in tree order, whatever the order of the groups."""
    return sorted((sample for group in groups for sample in group.samples), key=_in_tree)


def _answers(trajectory: Trajectory, limit: int, usable: bool, chosen: Collection[str]) -> Iterable[Answer]:
    calls = sorted(trajectory.calls, key=lambda call: (call.sequence, call.id))
    for order, call in enumerate(calls):
        for choice in call.choices or [Choice()]:
            reason = exclusion(call, choice, limit, chosen) if usable else "reward_not_finite"
            sample = None if reason is not None else _sample(trajectory.rollout_id, order, call, choice)
            yield Answer(trajectory.rollout_id, call.id, choice.index, sample, reason, call.node.name)


def _sample(rollout_id: str, order: int, call: Call, choice: Choice) -> Sample:
    tokens = np.asarray([*call.prompt_token_ids, *choice.token_ids], dtype=np.int64)
    return Sample(
        rollout_id=rollout_id,
        call_id=call.id,
        choice=choice.index,
        order=order,
        tokens=tokens,
        start=len(call.prompt_token_ids),
        logprobs=np.asarray(choice.logprobs, dtype=np.float64),
        temperature=call.sampling.temperature,
        key=tokens.astype(">u4").tobytes(),  # big-endian: bytes sort as the ids do
        node=call.node.name,
    )


def shared(first: Sample, second: Sample) -> int:
    """Length of the common prefix of two samples, in tokens."""
    size = min(len(first.tokens), len(second.tokens))
    different = np.flatnonzero(first.tokens[:size] != second.tokens[:size])
    return int(different[0]) if len(different) else size


def follows(later: Sample, earlier: Sample) -> bool:
    """Whether ``later`` begins with all ids of ``earlier``."""
    return later.key.startswith(earlier.key)


def branches(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples (in tree order) joined into branches: in each, every sample follows the one before it.

    Each sample stands in exactly one branch; the last of a branch is followed by none. An answer with several
    continuations stands in the branch of the first.
    """
    result: list[list[Sample]] = []
    for sample in samples:
        if result and follows(sample, result[-1][-1]):
            result[-1].append(sample)
        else:
            result.append([sample])
    return result


def distinct_tokens(samples: Sequence[Sample]) -> int:
    """Nodes of the prefix tree of samples in tree order."""
    total = 0
    for index, sample in enumerate(samples):
        total += len(sample.tokens) - (shared(samples[index - 1], sample) if index else 0)
    return total
