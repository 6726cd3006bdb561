"""Reads LoRA adapters in PEFT's format and checks them against the base model before anything is served from them.

It refuses, with the reason, whatever it cannot apply exactly: other methods than LoRA, DoRA, biases, saved modules,
per-module ranks or alphas, unknown or missing modules, wrong shapes, values that are not finite, broken files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from art_backends.errors import AdapterError

_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight$")


@dataclass(frozen=True, slots=True)
class Delta:
    """W + scale * B @ A, with A [rank, in] and B [out, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def read(path: Path, linears: Mapping[str, tuple[int, int]]) -> dict[str, Delta]:
    """The adapter in folder ``path`` by module name; ``linears`` gives (out, in) of the base model's linear modules.

    Raises AdapterError with the reason.
    """
    rank, scale = _config(path)
    file = path / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file}: cannot be read: {error}") from None
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.match(key)
        if match is None:
            raise AdapterError(f"{file}: unexpected tensor {key!r}; only lora_A and lora_B weights can be served")
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    if not parts:
        raise AdapterError(f"{file}: holds no tensors")
    return {
        module: _delta(file, module, pair, linears=linears, rank=rank, scale=scale)
        for module, pair in sorted(parts.items())
    }


def _config(path: Path) -> tuple[int, float]:
    file = path / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file}: cannot be read: {error}") from None
    if not isinstance(config, dict) or str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise AdapterError(f"{file}: not a LoRA adapter (peft_type {_shown(config)})")
    for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias"):
        if config.get(name):
            raise AdapterError(f"{file}: {name} = {config[name]!r} cannot be served; train without it")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{file}: bias = {config['bias']!r} cannot be served; train with bias = 'none'")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{file}: r = {rank!r} is not a positive rank")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{file}: lora_alpha = {alpha!r} is not a number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _shown(config: Any) -> str:
    return repr(config.get("peft_type")) if isinstance(config, dict) else "missing"


def _delta(
    file: Path,
    module: str,
    pair: Mapping[str, torch.Tensor],
    *,
    linears: Mapping[str, tuple[int, int]],
    rank: int,
    scale: float,
) -> Delta:
    where = f"{file}: module {module!r}"
    if module not in linears:
        raise AdapterError(f"{where} is not a linear module of the base model; was it trained on another one?")
    if set(pair) != {"A", "B"}:
        raise AdapterError(f"{where}: lora_{'B' if 'A' in pair else 'A'} is missing")
    out, into = linears[module]
    for part, shape in (("A", (rank, into)), ("B", (out, rank))):
        tensor = pair[part]
        if tuple(tensor.shape) != shape:
            raise AdapterError(f"{where}: lora_{part} has shape {tuple(tensor.shape)}, the base model needs {shape}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{where}: lora_{part} holds values that are not finite numbers")
    return Delta(pair["A"], pair["B"], scale)
