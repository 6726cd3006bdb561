"""Who a request comes from, and the facts of an open rollout that the proxy needs.

The server authenticates (token, path or key) and hands an ``Identity`` to the proxy. One ``RolloutContext`` object
per open rollout is shared by all its requests: the server sets ``closed`` on it, the proxy counts ``capture_lost``.

It refuses to authenticate, and to know where rollouts are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from art_backends.trajectories import Purpose


@dataclass(frozen=True)
class SamplingOverrides:
    """What the proxy sets in rollouts opened for training, whatever the app asked for.

    ``max_tokens`` is a cap per answer (None: the app's own). There is never a seed: a group sampled with one seed
    would hold one answer many times.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int | None = None


@dataclass(eq=False)
class RolloutContext:
    """An open rollout as the proxy sees it. Mutable on purpose; used in one event loop only."""

    id: str
    policy: str
    version: str  # "NAME@N", pinned for the whole rollout; N = 0 is the base model
    purpose: Purpose = Purpose.TRAIN
    overrides: SamplingOverrides | None = None  # None: the defaults, if the purpose is TRAIN
    history: Literal["exact", "template"] = "exact"
    closed: bool = False  # calls are still served, but no longer attributed
    capture_lost: int = 0  # calls that could not be recorded; such a rollout must not train

    def sampling(self) -> SamplingOverrides | None:
        """Overrides in force: those of a training rollout, None for every other purpose."""
        if self.purpose is not Purpose.TRAIN:
            return None
        return self.overrides or SamplingOverrides()


@dataclass(frozen=True)
class Identity:
    """An authenticated caller. ``rollout`` is set for kind "rollout" alone; ``policy`` None means the default one."""

    kind: Literal["rollout", "agent", "admin"]
    rollout: RolloutContext | None = None
    policy: str | None = None

    @property
    def owner(self) -> str:
        """Whose calls these are: a rollout's own, or those of all who have the key of an app."""
        return owner_of(self.rollout.id) if self.rollout is not None else f"{self.kind} {self.policy or ''}"


def owner_of(rollout_id: str) -> str:
    """``Identity.owner`` of a rollout's calls."""
    return f"rollout {rollout_id}"
