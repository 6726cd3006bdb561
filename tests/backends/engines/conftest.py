"""Tiny random models and adapters for the engine's tests, made on the spot; float32, two layers, grouped heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

VOCAB = 211
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(kind: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model whose distributions are neither flat nor certain."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "mistral":
        settings["sliding_window"] = None
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**(settings | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.eval().requires_grad_(False)


def make_adapter(folder: Path, *, seed: int = 1, rank: int = 4, scale: float = 0.3, **config: Any) -> Path:
    """A random LoRA over all linear modules of ``make_model``, in PEFT's format."""
    sizes = {
        "q": (32, 32),
        "k": (16, 32),
        "v": (16, 32),
        "o": (32, 32),
        "gate": (64, 32),
        "up": (64, 32),
        "down": (32, 64),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module in MODULES:
            out, into = sizes[module.removesuffix("_proj")]
            part = "mlp" if module in MODULES[4:] else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * scale
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * scale
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    settings |= {"target_modules": list(MODULES), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def new_model() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture(scope="session")
def new_adapter() -> Callable[..., Path]:
    return make_adapter
