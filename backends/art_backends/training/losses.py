"""The loss of one pack, on tensors that are already gathered per occurrence.

    r = exp(log π_θ − log π_old)     w = stop_gradient(min(exp(log π_old − log μ), cap))
    L = −Σ c · w · min(r·A, clip(r, 1−ε_lo, 1+ε_hi)·A)  +  β · Σ c · KL,   KL = exp(ref − new) − (ref − new) − 1

with c the constant weight of each occurrence over the whole batch, so that the losses of packs add up to the loss of
the batch. Clipping is against π_old, never against μ. It refuses to average: nothing here knows the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """A pack's loss (a scalar with gradient) and, detached, what the metrics need per occurrence, [M]."""

    loss: Tensor
    ratio: Tensor
    importance: Tensor  # w, after the cap
    clipped_low: Tensor  # bool: the lower clip is in force (r < 1 − ε_lo, A < 0)
    clipped_high: Tensor  # bool: the upper clip is in force (r > 1 + ε_hi, A > 0)
    kl: Tensor | None


def importance(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """w = min(exp(log π_old − log μ), cap), without gradient."""
    return torch.exp(old.detach() - sampled).clamp(max=cap)


def kl_to_reference(new: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(π_θ ‖ π_ref) per sampled token: never negative, zero where both agree."""
    difference = reference - new
    return torch.exp(difference) - difference - 1


def kl_of_step(new: Tensor, before: Tensor) -> Tensor:
    """KL(π_new ‖ π_before) per token sampled from (about) π_before: r·log r − r + 1, never negative."""
    difference = new - before
    return torch.exp(difference) * difference - torch.exp(difference) + 1


def policy_loss(
    new: Tensor,
    old: Tensor,
    sampled: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    cap: float,
    reference: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Terms:
    """Loss of one pack. All tensors are [M] (per occurrence); only ``new`` carries a gradient."""
    ratio = torch.exp(new - old.detach())
    bounded = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    weights = importance(old, sampled, cap)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    loss = -(weight * weights * objective).sum()
    divergence = None
    if reference is not None:
        divergence = kl_to_reference(new, reference)
        loss = loss + kl_coefficient * (weight * divergence).sum()
    detached = ratio.detach()
    return Terms(
        loss=loss,
        ratio=detached,
        importance=weights,
        clipped_low=(detached < 1 - epsilon_low) & (advantage < 0),
        clipped_high=(detached > 1 + epsilon_high) & (advantage > 0),
        kl=None if divergence is None else divergence.detach(),
    )
