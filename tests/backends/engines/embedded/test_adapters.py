"""Adapters that cannot be served exactly are refused, each with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from art_backends.engines.embedded.adapters import read
from art_backends.errors import AdapterError
from safetensors.torch import load_file, save_file

LAYER = "model.layers.0.self_attn.q_proj"
PREFIX = f"base_model.model.{LAYER}"
LINEARS = {LAYER: (8, 6)}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    if tensors is None:
        tensors = {f"{PREFIX}.lora_A.weight": torch.ones(2, 6), f"{PREFIX}.lora_B.weight": torch.ones(8, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_a_good_one(tmp_path: Path) -> None:
    delta = read(write(tmp_path), LINEARS)[LAYER]
    assert (delta.scale, delta.a.shape, delta.b.shape) == (4.0, (2, 6), (8, 2))
    assert read(write(tmp_path, use_rslora=True), LINEARS)[LAYER].scale == pytest.approx(8 / 2**0.5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "not a LoRA"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"r": 0}, "r = 0"),
        ({"r": 3}, "lora_A has shape"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_settings(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=reason):
        read(write(tmp_path, **config), LINEARS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(f"{PREFIX}.lora_B.weight"), "lora_B is missing"),
        (lambda t: t.update({f"{PREFIX}.lora_B.weight": torch.ones(7, 2)}), "lora_B has shape"),
        (lambda t: t[f"{PREFIX}.lora_A.weight"].fill_(torch.nan), "not finite"),
        (lambda t: t.update({f"{PREFIX}.lora_A.weight": torch.ones(2, 6, dtype=torch.int32)}), "not finite"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2)}), "unexpected tensor"),
        (lambda t: t.update({"base_model.model.other.lora_A.weight": torch.ones(2, 6)}), "not a linear module"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_tensors(change: Callable[[dict[str, torch.Tensor]], object], reason: str, tmp_path: Path) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    with pytest.raises(AdapterError, match=reason):
        read(write(tmp_path, tensors), LINEARS)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json: cannot be read"):
        read(tmp_path, LINEARS)
    file = write(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors: cannot be read"):
        read(tmp_path, LINEARS)
    (tmp_path / "adapter_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(AdapterError, match="not a LoRA"):
        read(tmp_path, LINEARS)
