"""AdamW over the adapter's parameters, and its state to and from safetensors, byte for byte.

It refuses to pickle, and to load a state that does not belong to these parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from art_backends.config import TrainConfig
from art_backends.errors import AdapterError
from art_backends.training import versions

FILE = "optimizer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make(parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """A fresh AdamW (β 0.9 and 0.999, ε 1e-8)."""
    return torch.optim.AdamW(
        list(parameters.values()), lr=config.learning_rate, weight_decay=config.weight_decay, foreach=False
    )


def configure(optimizer: torch.optim.AdamW, config: TrainConfig) -> None:
    """Use this step's learning rate and weight decay: they may change during a run."""
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
        group["weight_decay"] = config.weight_decay


def write(folder: Path, optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> None:
    """Write the moments and step counts by parameter name. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    for name, item in parameters.items():
        for key, value in optimizer.state.get(item, {}).items():
            tensors[f"{name}.{key}"] = value.detach().to("cpu").contiguous()
    versions.write_file(folder / FILE, save_tensors(tensors, metadata={"format": "pt"}))


def restore(folder: Path, optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> None:
    """Load what ``write`` wrote. Raises AdapterError if the file is unusable or of other parameters."""
    path = folder / FILE
    try:
        tensors = load_tensors(path.read_bytes())
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{path}: the optimizer's state cannot be read: {error}") from error
    expected = {f"{name}.{key}" for name in parameters for key in (*_MOMENTS, "step")}
    if set(tensors) != expected:
        name = sorted(set(tensors) ^ expected)[0]
        raise AdapterError(f"{path}: the optimizer's state is of another adapter ({name})")
    for name, item in parameters.items():
        state: dict[str, Tensor] = {"step": tensors[f"{name}.step"]}
        for key in _MOMENTS:
            value = tensors[f"{name}.{key}"]
            if value.shape != item.shape or not bool(torch.isfinite(value).all()):
                raise AdapterError(f"{path}: {name}.{key} has a wrong shape or values that are not finite")
            state[key] = value.to(item.device)
        optimizer.state[item] = state
