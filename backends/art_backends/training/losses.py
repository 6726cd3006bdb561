"""The loss of one pack, on tensors that are already gathered per occurrence.

    r = exp(log π_θ − log π_old)     w = stop_gradient of the importance weight of π_old ÷ μ
    L = −Σ c · w · J  +  β · Σ c · KL

with c the constant weight of each occurrence over the whole batch, so that the losses of packs add up to the loss of
the batch, and J by ``config.objective``:

    clip         min(r·A, clip(r, 1−ε_lo, 1+ε_hi)·A)                        PPO, GRPO; DAPO with ε_hi > ε_lo
    cispo        stop_gradient(min(r, 1+ε_hi)) · A · log π_θ                MiniMax-M1, arXiv 2506.13585
    gspo         clip with s in r's place, s = exp(mean of log r over the tokens of one answer), arXiv 2507.18071
    gspo_token   the same, s = stop_gradient(s) · π_θ ÷ stop_gradient(π_θ): each token may have its own A
    reinforce    A · log π_θ                                                Williams 1992; with A = 1, imitation

Clipping is against π_old, never against μ. It refuses to average: nothing here knows the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from art_backends.config import TrainConfig


@dataclass(frozen=True)
class Tokens:
    """A pack's sampled tokens, [M] each, as often as they were sampled; only ``new`` carries a gradient.

    ``answer`` numbers the answers (from 0) that the tokens are of. ``reference`` is given where there is a
    ``kl_coefficient``.
    """

    new: Tensor  # log π_θ
    old: Tensor  # log π_old
    sampled: Tensor  # log μ
    advantage: Tensor
    weight: Tensor  # c
    answer: Tensor
    reference: Tensor | None = None  # log π_ref


@dataclass(frozen=True)
class Terms:
    """A pack's loss (a scalar with gradient) and, detached, what the metrics need per occurrence, [M]."""

    loss: Tensor
    ratio: Tensor  # r, or s
    importance: Tensor  # w
    clipped_low: Tensor  # bool: the lower clip is in force
    clipped_high: Tensor  # bool: the upper clip is in force
    kl: Tensor | None


def importance(old: Tensor, sampled: Tensor, config: TrainConfig) -> Tensor:
    """w of each token, without gradient, from π_old ÷ μ: capped (truncated importance sampling), or 0 where it lies
    outside of floor and cap (masked), or 1."""
    if config.importance == "off":
        return torch.ones_like(sampled)
    ratio = torch.exp(old.detach() - sampled)
    if config.importance == "truncate":
        return ratio.clamp(max=config.importance_cap)
    inside = (ratio >= config.importance_floor) & (ratio <= config.importance_cap)
    return torch.where(inside, ratio, torch.zeros_like(ratio))


def kl_to_reference(new: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(π_θ ‖ π_ref) per sampled token: never negative, zero where both agree."""
    difference = reference - new
    return torch.exp(difference) - difference - 1


def kl_of_step(new: Tensor, before: Tensor) -> Tensor:
    """KL(π_new ‖ π_before) per token sampled from (about) π_before: r·log r − r + 1, never negative."""
    difference = new - before
    return torch.exp(difference) * difference - torch.exp(difference) + 1


def policy_loss(tokens: Tokens, config: TrainConfig) -> Terms:
    """Loss of one pack."""
    new, old, advantage, reference = tokens.new, tokens.old.detach(), tokens.advantage, tokens.reference
    weights = importance(old, tokens.sampled, config)
    divergence = None
    if reference is not None and config.kl_estimator == "k1":
        # As a term of the loss log π_θ − log π_ref would have no gradient in expectation: E[∇ log π_θ] = 0. As part
        # of what a token earned it has the right one.
        divergence = old - reference
        advantage = advantage - config.kl_coefficient * divergence
    ratio, objective, low, high = _objective(new, old, advantage, tokens.answer, config)
    loss = -(tokens.weight * weights * objective).sum()
    if reference is not None and config.kl_estimator == "k3":
        divergence = kl_to_reference(new, reference)
        loss = loss + config.kl_coefficient * (tokens.weight * divergence).sum()
    return Terms(
        loss=loss,
        ratio=ratio.detach(),
        importance=weights,
        clipped_low=low,
        clipped_high=high,
        kl=None if divergence is None else divergence.detach(),
    )


def _objective(
    new: Tensor, old: Tensor, advantage: Tensor, answer: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratio, J, and where the lower and the upper clip are in force."""
    difference = new - old
    if config.objective in {"cispo", "reinforce"}:
        ratio = torch.exp(difference).detach()
        bounded = ratio.clamp(max=1 + config.epsilon_high)
        nowhere = torch.zeros_like(ratio, dtype=torch.bool)
        if config.objective == "reinforce":
            return ratio, advantage * new, nowhere, nowhere
        return ratio, bounded * advantage * new, nowhere, ratio > bounded
    if config.objective == "gspo":
        difference = _mean_of_answer(difference, answer)
        advantage = _mean_of_answer(advantage, answer)
    elif config.objective == "gspo_token":
        difference = _mean_of_answer(difference, answer).detach() + new - new.detach()
    ratio = torch.exp(difference)
    bounded = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    fixed = ratio.detach()
    low = (fixed < 1 - config.epsilon_low) & (advantage < 0)
    high = (fixed > 1 + config.epsilon_high) & (advantage > 0)
    return ratio, objective, low, high


def _mean_of_answer(values: Tensor, answer: Tensor) -> Tensor:
    """For each occurrence the mean of the values of its answer."""
    answers = int(answer.max()) + 1 if len(answer) else 0
    total = values.new_zeros(answers).index_add(0, answer, values)
    count = values.new_zeros(answers).index_add(0, answer, torch.ones_like(values.detach()))
    return (total / count.clamp(min=1))[answer]
