"""The arithmetic of one step: packs forward and backward, the optimizer's updates, what was measured on the way.

It refuses to touch disk and to decide what a measurement means; ``trainer`` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from art_backends.config import TrainConfig
from art_backends.errors import TrainingError
from art_backends.training import losses, report
from art_backends.training.advantages import Plan
from art_backends.training.forward import Forward
from art_backends.training.packing import Pack
from art_backends.training.sequences import Floats


@dataclass
class Measured:
    """Figures of a step. ``finite`` is false if a loss, a gradient or a weight was not; ``step_kl`` is the measured
    KL to the policy before the step, where a limit asked for it; ``sampler_kl`` that from the sampler to the trainer,
    where the sampler's logprobs are used."""

    finite: bool = True
    step_kl: float | None = None
    sampler_kl: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Updates:
    """All updates of one batch. ``progress`` is told after each pack, ``cancelled`` asked before each; within
    ``reference()`` the model is the one that KL refers to."""

    def __init__(
        self,
        *,
        forward: Forward,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        plan: Plan,
        packs: Sequence[Pack],
        reference: Callable[[], AbstractContextManager[None]],
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._forward = forward
        self._parameters = list(parameters.values())
        self._optimizer = optimizer
        self._config = config
        self._plan = plan
        self._packs = packs
        self._within_reference = reference
        self._progress = progress
        self._cancelled = cancelled
        self._done = 0
        passes = config.updates_per_batch + (config.updates_per_batch > 1) + (config.max_kl is not None)
        self._total = len(packs) * passes
        self._old: list[Tensor | None] = [None] * len(packs)  # log π_old per query
        self._reference: list[Tensor | None] = [None] * len(packs)

    def run(self) -> Measured:
        """Make the updates. Raises TrainingError when cancelled; the weights are then in between."""
        measured = Measured()
        self._progress(0, self._total)
        if self._config.updates_per_batch > 1:
            self._old = list(self._measure())
        seen: list[_Update] = []
        for _ in range(self._config.updates_per_batch):
            update = self._update()
            seen.append(update)
            if not update.finite:
                measured.finite = False
                break
        measured.metrics = self._metrics(seen)
        measured.sampler_kl = measured.metrics.get("sampling/kl")
        if measured.finite and self._config.max_kl is not None:
            measured.step_kl = self._step_kl(self._measure())
            measured.metrics["kl/step"] = measured.step_kl
        return measured

    def _update(self) -> _Update:
        self._optimizer.zero_grad(set_to_none=True)
        update = _Update()
        for index, pack in enumerate(self._packs):
            self._check_cancelled()
            terms = self._backward(index, pack)
            update.add(terms)
            self._tick()
            if not torch.isfinite(terms.loss):
                update.finite = False
                return update
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        update.grad_norm = float(norm)
        if not torch.isfinite(norm):
            update.finite = False
            return update
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        update.finite = all(bool(torch.isfinite(item).all()) for item in self._parameters)
        return update

    def _backward(self, index: int, pack: Pack) -> losses.Terms:
        reference = self._reference_of(index, pack)
        with torch.enable_grad():
            new = self._forward.logprobs(pack)
            old = self._old[index]
            if old is None:
                old = self._old[index] = new.detach()  # the first update: π_old is π_θ
            which = self._tensor(pack.occurrence_query)
            tokens = losses.Tokens(
                new=new[which],
                old=old[which],
                sampled=self._tensor(pack.occurrence_logprob),
                advantage=self._by_sample(pack, [self._plan.of(sample) for sample in pack.samples]),
                weight=self._by_sample(pack, [self._plan.weight[sample.rollout_id] for sample in pack.samples]),
                answer=self._tensor(pack.occurrence_sample),
                reference=None if reference is None else reference[which],
            )
            terms = losses.policy_loss(tokens, self._config)
            terms.loss.backward()  # type: ignore[no-untyped-call]
        return terms

    def _reference_of(self, index: int, pack: Pack) -> Tensor | None:
        if self._config.kl_coefficient == 0:
            return None
        if self._reference[index] is None:
            with torch.no_grad(), self._within_reference():
                self._reference[index] = self._forward.logprobs(pack)
        return self._reference[index]

    def _measure(self) -> list[Tensor]:
        """Logprobs of all packs under the present weights, without gradient."""
        result = []
        for pack in self._packs:
            self._check_cancelled()
            with torch.no_grad():
                result.append(self._forward.logprobs(pack))
            self._tick()
        return result

    def _step_kl(self, after: Sequence[Tensor]) -> float:
        """Mean over occurrences of the KL between the policy after and before the step."""
        values = []
        for pack, new, old in zip(self._packs, after, self._old, strict=True):
            which = self._tensor(pack.occurrence_query)
            values.append(losses.kl_of_step(new[which], cast(Tensor, old)[which]).double())
        return float(torch.cat(values).mean())

    def _by_sample(self, pack: Pack, values: Sequence[float]) -> Tensor:
        return self._tensor(np.asarray(values, dtype=np.float64)[pack.occurrence_sample])

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32)  # before the move: not every device knows float64
        return tensor.to(self._forward.device)

    def _tick(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)

    def _check_cancelled(self) -> None:
        if self._cancelled():
            raise TrainingError("the training step was cancelled; the version before it stands")

    def _metrics(self, seen: Sequence[_Update]) -> dict[str, float]:
        metrics = {
            "loss": report.mean(update.loss for update in seen),
            "grad_norm": report.mean(update.grad_norm for update in seen),
            "learning_rate": float(self._optimizer.param_groups[0]["lr"]),
            "clip_ratio/low_mean": report.mean(update.share("clipped_low") for update in seen),
            "clip_ratio/high_mean": report.mean(update.share("clipped_high") for update in seen),
        }
        if self._config.kl_coefficient > 0:
            metrics["kl"] = report.mean(update.share("kl") for update in seen)
        old: list[Floats] = []
        sampled: list[Floats] = []
        weights: list[Floats] = []
        for pack, logprobs in zip(self._packs, self._old, strict=True):
            if logprobs is not None:
                mine = logprobs.double().cpu()[torch.from_numpy(pack.occurrence_query)]
                theirs = torch.from_numpy(pack.occurrence_logprob)
                old.append(mine.numpy())
                sampled.append(pack.occurrence_logprob)
                weights.append(losses.importance(mine, theirs, self._config).numpy())
        if old and (self._config.importance != "off" or self._config.max_sampler_kl is not None):
            metrics.update(
                report.importance_metrics(np.concatenate(old), np.concatenate(sampled), np.concatenate(weights))
            )
        return metrics


@dataclass
class _Update:
    """Sums over the packs of one optimizer update."""

    finite: bool = True
    loss: float = 0.0
    grad_norm: float = float("nan")
    occurrences: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, terms: losses.Terms) -> None:
        self.loss += float(terms.loss.detach())
        self.occurrences += len(terms.ratio)
        for name in ("clipped_low", "clipped_high", "kl"):
            values: Tensor | None = getattr(terms, name)
            if values is not None:
                self.sums[name] = self.sums.get(name, 0.0) + float(values.double().sum())

    def share(self, name: str) -> float:
        return self.sums.get(name, 0.0) / self.occurrences if self.occurrences else 0.0
