"""The optimizer over the adapter's parameters, its learning rate, and its state to and from safetensors, byte for byte.

Optimizers are torch's own. The learning rate of a step is a function of the step's number and the configuration, so
that a resumed run has the same. It refuses to pickle, and to load a state that does not belong to these parameters
or to this optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from art_backends.config import TrainConfig
from art_backends.errors import AdapterError
from art_backends.training import versions

FILE = "optimizer.safetensors"
MOMENTUM = 0.9  # of sgd

_KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], frozenset[str]]] = {
    # torch's class, its options, and the names of its state for a matrix
    "adamw": (torch.optim.AdamW, {}, frozenset({"step", "exp_avg", "exp_avg_sq"})),
    "adafactor": (torch.optim.Adafactor, {}, frozenset({"step", "row_var", "col_var"})),
    "sgd": (torch.optim.SGD, {"momentum": MOMENTUM}, frozenset({"momentum_buffer"})),
}
_AS_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer"})  # have the parameter's shape


def make(parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """A fresh optimizer; AdamW has β 0.9 and 0.999, ε 1e-8."""
    build, options, _ = _KINDS[config.optimizer]
    return build(
        list(parameters.values()),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        foreach=False,
        **options,
    )


def configure(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> float:
    """Use the weight decay and the learning rate of this step (from 1); returns the latter."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = config.weight_decay
    return rate


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step (from 1): up in ``warmup_steps`` equal parts, then as ``schedule`` says.

    The last of ``config.steps`` steps still has a rate above 0; a step beyond them has that of the last.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    falling = max(1, config.steps - config.warmup_steps)
    passed = min(step - 1 - config.warmup_steps, falling - 1) / falling
    if config.schedule == "linear":
        return config.learning_rate * (1 - passed)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * passed))
    return config.learning_rate


def write(folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Write the optimizer's state by parameter name. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    for name, item in parameters.items():
        for key, value in optimizer.state.get(item, {}).items():
            tensors[f"{name}.{key}"] = value.detach().to("cpu").contiguous()
    versions.write_file(folder / FILE, save_tensors(tensors, metadata={"format": "pt"}))


def restore(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], config: TrainConfig
) -> None:
    """Load what ``write`` wrote. Raises AdapterError if the file is unusable, or of other parameters or settings."""
    path = folder / FILE
    try:
        tensors = load_tensors(path.read_bytes())
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{path}: the optimizer's state cannot be read: {error}") from error
    keys = _KINDS[config.optimizer][2]
    expected = {f"{name}.{key}" for name in parameters for key in keys}
    if set(tensors) != expected:
        name = sorted(set(tensors) ^ expected)[0]
        raise AdapterError(
            f"{path}: the optimizer's state is of another adapter or another optimizer than {config.optimizer} ({name})"
        )
    for name, item in parameters.items():
        state: dict[str, Tensor] = {}
        for key in sorted(keys):
            value = tensors[f"{name}.{key}"]
            fits = key not in _AS_PARAMETER or value.shape == item.shape
            if not fits or not bool(torch.isfinite(value).all()):
                raise AdapterError(f"{path}: {name}.{key} has a wrong shape or values that are not finite")
            state[key] = value if key == "step" else value.to(item.device)
        optimizer.state[item] = state
