"""What a training step is asked, and what it answers, as plain data.

The same shapes travel over the worker's socket (``POST /train``) and between threads of the worker. Torch-free.
It refuses to hold behaviour, and values that are not finite: they would not survive JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from art_backends.config import TrainConfig
from art_backends.trajectories import TrajectoryGroup


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StepRequest(_Message):
    """One training step: make ``policy@(from_version + 1)`` out of ``policy@from_version`` and these groups."""

    policy: str
    from_version: int = Field(ge=0)  # 0: the base model, no adapter yet
    versions: Path  # folder that holds NAME@N
    step: int = Field(ge=0)  # the loop's number of this step; skipped steps count too, so it may exceed the version
    config: TrainConfig
    groups: list[TrajectoryGroup]
    imitate: bool = False  # cross-entropy on all answers; rewards and recorded logprobs do not matter

    def rollout_ids(self) -> list[str]:
        """Ids of all rollouts of the batch, sorted."""
        return sorted(item.rollout_id for group in self.groups for item in group.trajectories)


class CallTokens(_Message):
    """What became of one sampled answer."""

    call: str
    choice: int
    trained: int  # sampled tokens that entered the loss
    advantage: float
    excluded: str | None  # why none did, in a word; "no_spread" when the whole group was left out


class StepOutcome(_Message):
    """The result of a step: a new version, or the reason why there is none."""

    kind: Literal["committed", "skipped"]
    version: int  # the new version, or for "skipped" the one that stays
    reason: str | None = None  # "no_spread", "no_tokens", "non_finite", "kl"
    metrics: dict[str, float] = Field(default_factory=dict)
    tokens: dict[str, list[CallTokens]] = Field(default_factory=dict)  # by rollout id
