"""What a step tells: metrics under TRL's names where TRL has one, and what became of every sampled answer.

Torch-free but for plain numbers handed in. It refuses values that are not finite: they would not survive JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from art_backends.training.advantages import Plan
from art_backends.training.requests import CallTokens
from art_backends.training.sequences import Floats, SequenceGroup


def call_tokens(groups: Sequence[SequenceGroup], plan: Plan) -> dict[str, list[CallTokens]]:
    """Per rollout, every answer: how many of its tokens train, with what advantage, or why none does."""
    kept = {group.first for group in plan.groups}
    result: dict[str, list[CallTokens]] = {}
    for group in groups:
        for rollout in (*group.rewards, *group.unusable):
            result[rollout] = []
        for answer in group.answers:
            reason = answer.reason if answer.reason is not None or group.first in kept else "no_spread"
            trained = answer.sample.trained if answer.sample is not None and reason is None else 0
            result[answer.rollout_id].append(
                CallTokens(
                    call=answer.call_id,
                    choice=answer.choice,
                    trained=trained,
                    advantage=plan.at(answer.rollout_id, answer.node),
                    excluded=reason,
                )
            )
    return result


def batch_metrics(groups: Sequence[SequenceGroup], plan: Plan, *, imitation: bool = False) -> dict[str, float]:
    """What is known before anything is computed: rewards, spread (none in ``imitation``), counts of what trains and
    what does not."""
    rewards = [np.asarray(list(group.rewards.values()), dtype=np.float64) for group in groups if group.rewards]
    deviations = [float(values.std(ddof=1)) if len(values) > 1 else 0.0 for values in rewards]
    everything = np.concatenate(rewards) if rewards else np.zeros(0)
    rollouts = sum(len(group.rewards) + len(group.unusable) for group in groups)
    excluded = [answer for group in groups for answer in group.answers if answer.reason is not None]
    metrics = {
        "tokens/trained": float(plan.tokens),
        "trajectories/trained": float(len(plan.trained)),
        "trajectories/excluded": float(rollouts - sum(len(group.rewards) for group in groups) + _untrained(plan)),
        "calls/excluded": float(len({(answer.rollout_id, answer.call_id) for answer in excluded})),
    }
    if not imitation:
        metrics["reward"] = float(everything.mean()) if len(everything) else 0.0
        metrics["reward_std"] = float(np.mean(deviations)) if deviations else 0.0
        metrics["frac_reward_zero_std"] = 1.0 - len(plan.groups) / len(groups) if groups else 1.0
    for reason in sorted({answer.reason for answer in excluded if answer.reason}):
        metrics[f"calls/excluded/{reason}"] = float(sum(answer.reason == reason for answer in excluded))
    return metrics


def _untrained(plan: Plan) -> int:
    """Rollouts of groups with a spread, none of whose tokens can be trained."""
    return sum(rollout not in plan.trained for group in plan.groups for rollout in group.rewards)


def importance_metrics(old: Floats, sampled: Floats, weights: Floats) -> dict[str, float]:
    """How far the trainer's distribution is from the sampler's, over all trained tokens, [M] each."""
    difference = np.abs(old - sampled)
    return {
        "sampling/kl": sampler_kl(old, sampled),
        "sampling/ratio/max": float(_ratio(old, sampled).max()),  # before the cap
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
        "sampling/importance_sampling_ratio/min": float(weights.min()),
        "sampling/importance_sampling_ratio/mean": float(weights.mean()),
        "sampling/importance_sampling_ratio/max": float(weights.max()),
        # Kish's effective sample size as a share of the tokens: 1 when sampler and trainer agree.
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())) if weights.any() else 0.0,
    }


def sampler_kl(old: Floats, sampled: Floats) -> float:
    """Schulman's k3 estimate of KL(sampler ‖ trainer), mean over tokens drawn from the sampler: never negative."""
    return float((_ratio(old, sampled) - 1 - (old - sampled)).mean())


def _ratio(old: Floats, sampled: Floats) -> Floats:
    """Trainer ÷ sampler; where it would leave the numbers there are, a number that is as good as infinite."""
    return np.exp(np.minimum(old - sampled, 700.0))


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    items = list(values)
    return math.fsum(items) / len(items) if items else math.nan
