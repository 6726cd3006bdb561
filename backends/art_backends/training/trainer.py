"""The trainer: one request, one optimizer step, one new version on disk, or a reason why not.

A step is a function of the request and of ``NAME@from_version`` alone: packs are ordered by rollout id, nothing draws
random numbers, so a trainer that is killed and restarted writes the same bytes. What is in memory is only a copy of
a version; whenever something goes wrong it is dropped and read again.

It refuses to write anything but a complete version: a step without spread, with numbers that are not finite, that
moves the policy beyond ``max_kl``, or whose sampler is further from the trainer than ``max_sampler_kl`` leaves adapter,
optimizer and version as they were.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from art_backends.config import TrainConfig
from art_backends.errors import AdapterError, NonFiniteError, TrainingError
from art_backends.training import adapters, advantages, guard, optimizer, packing, report, sequences, versions
from art_backends.training.forward import Forward
from art_backends.training.packing import Pack
from art_backends.training.requests import CallTokens, StepOutcome, StepRequest
from art_backends.training.sequences import SequenceGroup
from art_backends.training.updates import Measured, Updates
from art_backends.trajectories import version_name

TIMING = "timing.json"  # beside state.json: seconds differ from run to run, the state's bytes must not

_IMITATION = {"objective": "reinforce", "importance": "off", "kl_coefficient": 0.0, "max_sampler_kl": None}

log = logging.getLogger(__name__)


class Trainer:
    """Holds a base model of its own (never written) with a LoRA, and makes steps one at a time."""

    def __init__(
        self,
        model_path: Path,
        *,
        policy: str,
        versions: Path,
        dtype: str | torch.dtype,
        device: str | torch.device,
        base_digest: str,
    ) -> None:
        """``versions``: folder of the versions; temporary folders in it are swept. ``device``: as torch names it, or
        "auto". The model is read when the first step needs it."""
        self._model_path = model_path
        self._policy = policy
        self._folder = versions
        self._dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self._device = _device(device)
        self._base_digest = base_digest
        self._plain: Any = None  # the base model while no adapter is attached
        self._loaded: _Loaded | None = None
        _sweep(versions)

    def step(
        self,
        request: StepRequest,
        progress: Callable[[int, int], None] = lambda _done, _packs: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> StepOutcome:
        """Make one step; blocks until it is committed or skipped.

        ``progress(packs_done, packs)`` is called after each pack, ``cancelled()`` asked before each. Repeating a
        committed request answers at once. Raises TrainingError (another batch already made this version, a wrong
        request, cancelled, the version cannot be written), NonFiniteError (third step in a row that was not
        finite) or AdapterError (``NAME@from_version`` is missing or unusable). Then no version was written.
        """
        started = time.monotonic()
        self._check(request)
        config = request.config
        nodes = [] if request.imitate else config.nodes
        groups = sequences.build(request.groups, vocabulary=self._vocabulary(), nodes=nodes)
        plan = advantages.imitation(groups) if request.imitate else advantages.plan(groups, config)
        tokens = report.call_tokens(groups, plan)
        committed = self._already(request, tokens)
        if committed is not None:
            return committed
        metrics = report.batch_metrics(groups, plan, imitation=request.imitate)
        if plan.tokens == 0:
            nothing = "no_tokens" if plan.groups else "no_spread"
            return self._skipped(request, nothing, metrics, tokens, started)
        try:
            measured = self._train(request, plan, metrics, progress, cancelled)
            metrics = {**metrics, **measured.metrics}
            reason = self._verdict(request, measured)
            if reason is not None:
                self._loaded_forget()
                return self._skipped(request, reason, metrics, tokens, started)
            return self._commit(request, metrics, tokens, started)
        except BaseException:
            self._loaded_forget()  # the weights may be in between
            raise

    def release(self) -> None:
        """Give back the device's memory; the next step reads model, adapter and optimizer again."""
        self._plain = self._loaded = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- before

    def _check(self, request: StepRequest) -> None:
        if request.policy != self._policy:
            raise TrainingError(f"this trainer trains {self._policy}, not {request.policy}")
        if request.versions.resolve() != self._folder.resolve():
            raise TrainingError(f"this trainer writes to {self._folder}, not to {request.versions}")

    def _already(self, request: StepRequest, tokens: dict[str, list[CallTokens]]) -> StepOutcome | None:
        """The outcome of this very request if it was committed before."""
        number = request.from_version + 1
        info = versions.read_version(self._folder, self._policy, number)
        if info is None:
            return None
        if info.state["rollout_ids"] != request.rollout_ids():
            raise TrainingError(
                f"{info.path} was already trained on other rollouts; train from version {number}, or remove it"
            )
        metrics = {**info.state.get("metrics", {}), **_timing(info.path)}
        return StepOutcome(kind="committed", version=number, metrics=metrics, tokens=tokens)

    def _vocabulary(self) -> int:
        return int(self._base().config.get_text_config().vocab_size)

    # ---- the step

    def _train(
        self,
        request: StepRequest,
        plan: advantages.Plan,
        metrics: dict[str, float],
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> Measured:
        loaded = self._load(request)
        config = request.config
        if request.imitate:
            config = config.model_copy(update=_IMITATION)
        packs = make_packs(loaded.forward, plan.groups, config.pack_tokens)
        computed = sum(pack.tokens for pack in packs)
        unique = sequences.distinct_tokens(sequences.forest(plan.groups))
        metrics["tokens/computed"] = float(computed)
        metrics["tokens/unique"] = float(unique)
        metrics["computed_to_unique_tokens"] = computed / unique
        metrics["packs"] = float(len(packs))
        loaded.use_checkpointing(config.gradient_checkpointing)
        optimizer.configure(loaded.optimizer, config, request.step)
        parameters = adapters.parameters(loaded.model)
        return Updates(
            forward=loaded.forward,
            parameters=parameters,
            optimizer=loaded.optimizer,
            config=config,
            plan=plan,
            packs=packs,
            reference=loaded.reference,
            progress=progress,
            cancelled=cancelled,
        ).run()

    def _verdict(self, request: StepRequest, measured: Measured) -> str | None:
        """Why the step must be undone, or None."""
        if not measured.finite:
            try:
                count = guard.add(self._folder, self._policy, request.step)
            except OSError as error:
                raise TrainingError(
                    f"step {request.step} was not finite, and that could not be recorded in {self._folder}: {error}"
                ) from error
            log.warning("step %d: loss or gradient not finite, skipped (%d in a row)", request.step, count)
            if count >= guard.LIMIT:
                raise NonFiniteError(
                    f"loss or gradient was not finite in {count} steps in a row (steps up to {request.step}): "
                    f"lower learning_rate (now {request.config.learning_rate:g}) or look at the logprobs recorded; "
                    f"version {request.from_version} stands"
                )
            return "non_finite"
        guard.clear(self._folder, self._policy)
        limit = request.config.max_kl
        if limit is not None and measured.step_kl is not None and not measured.step_kl <= limit:
            log.warning("step %d: KL %.3g exceeds max_kl %g, undone", request.step, measured.step_kl, limit)
            return "kl"
        limit = request.config.max_sampler_kl
        if limit is not None and measured.sampler_kl is not None and not measured.sampler_kl <= limit:
            log.warning(
                "step %d: KL(sampler || trainer) is %.3g, more than max_sampler_kl %g, undone: the engine answers from "
                "other weights, or in another precision, than the trainer's",
                request.step,
                measured.sampler_kl,
                limit,
            )
            return "sampler_kl"
        return None

    # ---- after

    def _skipped(
        self,
        request: StepRequest,
        reason: str,
        metrics: dict[str, float],
        tokens: dict[str, list[CallTokens]],
        started: float,
    ) -> StepOutcome:
        metrics = report.finite({**metrics, "step_seconds": time.monotonic() - started})
        return StepOutcome(kind="skipped", version=request.from_version, reason=reason, metrics=metrics, tokens=tokens)

    def _commit(
        self, request: StepRequest, metrics: dict[str, float], tokens: dict[str, list[CallTokens]], started: float
    ) -> StepOutcome:
        loaded = self._loaded
        assert loaded is not None  # _train loaded it
        number = request.from_version + 1
        final = self._folder / version_name(self._policy, number)
        metrics = report.finite(metrics)
        state = {
            "format": versions.FORMAT,
            "policy": self._policy,
            "version": number,
            "step": request.step,
            "rollout_ids": request.rollout_ids(),
            "metrics": metrics,
            "base_digest": self._base_digest,
            "config": request.config.model_dump(mode="json"),
            "rng": {"seed": request.config.seed},  # initialises version 0; a step itself draws nothing
            "skipped_in_row": 0,
        }
        timing = {"step_seconds": time.monotonic() - started}
        try:
            with versions.new_version(self._folder, self._policy, number) as place:
                adapters.write(place, loaded.model, request.config)
                optimizer.write(place, loaded.optimizer, adapters.parameters(loaded.model))
                versions.write_file(place / TIMING, versions.encode_json(timing))
                versions.write_file(place / versions.STATE, versions.encode_json(state))
        except OSError as error:
            raise TrainingError(
                f"{final} could not be written: {error.strerror or error}; free disk space and repeat the step, "
                f"version {request.from_version} is intact"
            ) from error
        loaded.version = number
        return StepOutcome(kind="committed", version=number, metrics={**metrics, **timing}, tokens=tokens)

    # ---- model, adapter and optimizer in memory

    def _base(self) -> Any:
        """The base model: plain, or inside the loaded PEFT model."""
        if self._loaded is not None:
            return self._loaded.model.get_base_model()
        if self._plain is None:
            self._plain = self._read_base()
        return self._plain

    def _read_base(self) -> Any:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                self._model_path,
                dtype=self._dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (OSError, ValueError, ImportError) as error:
            raise TrainingError(f"{self._model_path}: the base model cannot be loaded for training: {error}") from error
        model.to(self._device)
        model.requires_grad_(False)
        model.eval()
        for module in model.modules():  # gradient checkpointing needs train mode; a step must stay deterministic
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
        return model

    def _load(self, request: StepRequest) -> _Loaded:
        """Adapter and optimizer of ``from_version``, from memory if they are there."""
        config = request.config
        shape = (config.rank, config.alpha, config.rslora, tuple(sorted(config.target_modules)))
        loaded = self._loaded
        if loaded is not None and loaded.shape != shape:
            self._plain = adapters.detach(loaded.model)
            self._loaded = loaded = None
        if loaded is None:
            model = adapters.attach(self._base(), config)
            loaded = self._loaded = _Loaded(model, Forward(model, self._device, self._dtype), config, shape)
        same = loaded.version == request.from_version and loaded.kind == config.optimizer
        if request.from_version > 0 and same:
            return loaded
        loaded.version = None
        loaded.kind = config.optimizer
        loaded.optimizer = optimizer.make(adapters.parameters(loaded.model), config)
        begun = self._begun_from()
        loaded.reference = partial(adapters.disabled, loaded.model)
        if begun is not None:
            adapters.put(loaded.model, begun, config)  # checks that it fits, too
            loaded.reference = partial(adapters.holding, loaded.model, begun)
        if request.from_version == 0:
            if begun is None:
                adapters.initialise(loaded.model, config.seed)
            return loaded
        path = self._folder / version_name(self._policy, request.from_version)
        if versions.read_version(self._folder, self._policy, request.from_version) is None:
            raise AdapterError(f"{path}: the version to train from is not there or not readable")
        adapters.put(loaded.model, adapters.read(path, base_digest=self._base_digest), config)
        optimizer.restore(path, loaded.optimizer, adapters.parameters(loaded.model), config)
        loaded.version = request.from_version
        return loaded

    def _begun_from(self) -> adapters.AdapterFiles | None:
        """Version 0, where it is an adapter and not the base model."""
        info = versions.read_version(self._folder, self._policy, 0)
        return None if info is None else adapters.read(info.path, base_digest=self._base_digest)

    def _loaded_forget(self) -> None:
        """What is in memory is no version any more."""
        if self._loaded is not None:
            self._loaded.version = None
            self._loaded.optimizer.zero_grad(set_to_none=True)


class _Loaded:
    """A PEFT model, its optimizer, and which version they hold (None: neither)."""

    def __init__(self, model: Any, forward: Forward, config: TrainConfig, shape: tuple[object, ...]) -> None:
        self.model = model
        self.forward = forward
        self.shape = shape
        self.reference: Callable[[], AbstractContextManager[None]] = partial(adapters.disabled, model)
        self.kind = config.optimizer
        self.optimizer = optimizer.make(adapters.parameters(model), config)
        self.version: int | None = None
        self._can_recompute = False

    def use_checkpointing(self, wanted: bool) -> None:
        """Recompute activations in the backward pass, or not."""
        if wanted and not self._can_recompute:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the older name works in every 5.x
                self.model.get_base_model().gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
            self._can_recompute = True
        self.model.train(wanted)  # transformers recomputes in train mode only; dropout is off in either


def make_packs(forward: Forward, groups: Sequence[SequenceGroup], budget: int) -> list[Pack]:
    """Tree packs, or plain ones where the model asks for them."""
    longest = max((len(sample.tokens) for group in groups for sample in group.samples), default=0)
    if forward.trees_fit(longest):
        return packing.tree_packs(groups, budget)
    if forward.plain_reason is None:
        log.warning("sequences of %d tokens exceed the model's attention window: plain padded sequences", longest)
    return packing.plain_packs(groups, budget, rows=1 if forward.single_rows else None)


def _device(device: str | torch.device) -> torch.device:
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _sweep(folder: Path) -> None:
    if folder.is_dir():
        versions.sweep(folder)


def _timing(path: Path) -> dict[str, float]:
    return versions.read_numbers(path / TIMING)
