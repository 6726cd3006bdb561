"""LoRA adapters: create, write, read, check, load. PEFT's file format, safetensors only.

Everything that reads an adapter's files goes through ``read``, which raises AdapterError with the reason when they
are truncated, pickled, of a wrong rank or shape, not finite, or of another base model. It refuses to unpickle, to
run code that lies beside a model, and to guess: a missing or extra tensor is an error.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from art_backends.config import TrainConfig
from art_backends.errors import AdapterError
from art_backends.training import versions

CONFIG, WEIGHTS = versions.ADAPTER_CONFIG, versions.ADAPTER_WEIGHTS
_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
_INFIX = ".default."  # PEFT names its adapters inside the module; files leave the name out
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


@dataclass(frozen=True)
class AdapterFiles:
    """A checked adapter: its configuration and its tensors by PEFT's file names (``…lora_A.weight``), on the CPU."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def rank(self) -> int:
        """LoRA rank."""
        return int(self.config["r"])

    @property
    def scale(self) -> float:
        """What B·A is multiplied by: alpha / rank (alpha / √rank with rslora)."""
        root = self.rank**0.5 if self.config.get("use_rslora") else self.rank
        return float(self.config["lora_alpha"]) / float(root)


# ---- in the model


def attach(base: Any, config: TrainConfig) -> Any:
    """Give a causal language model an (unset) LoRA; returns PEFT's model. Raises AdapterError for unknown targets."""
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT computes with floats as well
        use_rslora=config.rslora,
        target_modules=sorted(config.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that will go
            model = peft.get_peft_model(base, settings)
    except ValueError as error:
        raise AdapterError(
            f"target_modules {', '.join(config.target_modules)} do not fit {type(base).__name__}: {error}"
        ) from error
    present = {name.split(".lora_A.")[0].rpartition(".")[2] for name in parameters(model) if ".lora_A." in name}
    missing = sorted(set(config.target_modules) - present)
    if missing:
        detach(model)
        raise AdapterError(
            f"{type(base).__name__} has no linear module named {', '.join(missing)}: correct target_modules"
        )
    return model


def detach(model: Any) -> Any:
    """Take the LoRA away again; returns the base model, ready for another ``attach``."""
    base = model.unload()
    if hasattr(base, "peft_config"):
        del base.peft_config
    return base


def parameters(model: Any) -> dict[str, nn.Parameter]:
    """Trainable parameters of PEFT's model by the names their files use, sorted."""
    found = {name.replace(_INFIX, "."): item for name, item in model.named_parameters() if item.requires_grad}
    return dict(sorted(found.items()))


def initialise(model: Any, seed: int) -> None:
    """Set a fresh adapter (A random, B zero: the policy is the base model), a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, item in parameters(model).items():
            if ".lora_A." in name:
                # Kaiming's uniform with a = √5, as PEFT does; drawn on the CPU so that the device does not matter.
                bound = 1.0 / item.shape[1] ** 0.5
                item.copy_(torch.empty(item.shape).uniform_(-bound, bound, generator=generator))
            else:
                item.zero_()


def put(model: Any, files: AdapterFiles, config: TrainConfig) -> None:
    """Load a checked adapter into PEFT's model. Raises AdapterError if it is of another rank, alpha or shape."""
    theirs = (files.rank, float(files.config["lora_alpha"]), bool(files.config.get("use_rslora")))
    if theirs != (config.rank, config.alpha, config.rslora):
        raise AdapterError(
            "the adapter has rank {}, alpha {:g}, rslora {}, the configuration {}, {:g}, {}: keep the settings the run "
            "began with".format(*theirs, config.rank, config.alpha, config.rslora)
        )
    wanted = parameters(model)
    different = sorted(set(wanted) ^ set(files.tensors))
    if different:
        raise AdapterError(
            f"the adapter does not fit the model's target_modules: {len(different)} tensors differ, e.g. {different[0]}"
        )
    for name, item in wanted.items():
        if files.tensors[name].shape != item.shape:
            raise AdapterError(
                f"{name} has shape {list(files.tensors[name].shape)}, the base model needs {list(item.shape)}: "
                "the adapter is of another base model"
            )
    with torch.no_grad():
        for name, item in wanted.items():
            item.copy_(files.tensors[name])


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    """Within this context PEFT's model is the base model (version 0)."""
    with model.disable_adapter():
        yield


@contextmanager
def holding(model: Any, files: AdapterFiles) -> Iterator[None]:
    """Within this context PEFT's model has the weights of a checked adapter that ``put`` took before."""
    kept = {name: item.detach().clone() for name, item in parameters(model).items()}
    with torch.no_grad():
        for name, item in parameters(model).items():
            item.copy_(files.tensors[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, item in parameters(model).items():
                item.copy_(kept[name])


# ---- on disk


def write(folder: Path, model: Any, config: TrainConfig) -> None:
    """Write the adapter's two files; the bytes depend only on weights and settings. Raises OSError."""
    tensors = {name: item.detach().to("cpu").contiguous() for name, item in parameters(model).items()}
    versions.write_file(folder / WEIGHTS, save_tensors(tensors, metadata={"format": "pt"}))
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model,
        "r": config.rank,
        "lora_alpha": alpha,
        "target_modules": sorted(config.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": config.rslora,
        "use_dora": False,
    }
    versions.write_file(folder / CONFIG, versions.encode_json(settings))


def read(folder: Path, *, base_digest: str | None = None) -> AdapterFiles:
    """Read and check an adapter's folder.

    With ``base_digest`` a ``state.json`` beside the adapter must name that base model. Raises AdapterError that says
    what is wrong with which file.
    """
    settings = _read_config(folder)
    if base_digest is not None:
        _check_base(folder, base_digest)
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = [name for name in _PICKLES if (folder / name).exists()]
        hint = f"; {pickled[0]} is a pickle and is never loaded, convert it to safetensors" if pickled else ""
        raise AdapterError(f"{weights}: not there{hint}")
    try:
        tensors = load_tensors(weights.read_bytes())
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{weights}: truncated or not a safetensors file: {error}") from error
    _check_tensors(weights, tensors, int(settings["r"]))
    return AdapterFiles(settings, tensors)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: not a LoRA adapter in PEFT's format")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"{path}: r must be a positive integer, not {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise AdapterError(f"{path}: lora_alpha must be a positive number, not {alpha!r}")
    for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if settings.get(name):
            raise AdapterError(f"{path}: {name} is not supported")
    if settings.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias {settings['bias']!r} is not supported")
    return settings


def _check_base(folder: Path, base_digest: str) -> None:
    path = folder / versions.STATE
    try:
        digest = json.loads(path.read_bytes()).get("base_digest")
    except (OSError, ValueError, AttributeError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    if digest != base_digest:
        raise AdapterError(
            f"{folder}: trained on another base model (digest {digest}), this one has digest {base_digest}"
        )


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    if not tensors:
        raise AdapterError(f"{path}: holds no tensors")
    for name, tensor in tensors.items():
        match = _KEY.match(name)
        if match is None:
            raise AdapterError(f"{path}: unexpected tensor {name}")
        axis = 0 if match["side"] == "A" else 1
        if tensor.ndim != 2 or tensor.shape[axis] != rank:
            raise AdapterError(f"{path}: {name} has shape {list(tensor.shape)}, which is not of rank {rank}")
        other = name.replace(f".lora_{match['side']}.", ".lora_B." if match["side"] == "A" else ".lora_A.")
        if other not in tensors:
            raise AdapterError(f"{path}: {name} stands alone, {other} is missing")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{path}: {name} holds values that are not finite numbers")
