from __future__ import annotations

import pytest
import torch
from art_backends.config import TrainConfig
from art_backends.training import adapters, lora
from torch import nn
from transformers import LlamaForCausalLM

from tests.backends.training.conftest import tiny_config


def prepared(dtype=torch.float32, **changes):
    """A model with a LoRA, before its layers are fused."""
    torch.manual_seed(4)
    base = LlamaForCausalLM(tiny_config(**changes)).to(dtype).requires_grad_(False).eval()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = adapters.attach(base, TrainConfig(rank=4, alpha=12.0, target_modules=targets))
    adapters.initialise(model, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, item in adapters.parameters(model).items():
            if "lora_B" in name:
                item.copy_(torch.randn(item.shape, generator=generator) * 0.1)
    return model


def run(model, dtype=torch.float32):
    for item in model.parameters():
        item.grad = None
    ids = torch.arange(1, 25).view(2, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    torch.log_softmax(logits.float(), -1)[..., 3].sum().backward()
    return logits.detach().float(), {name: item.grad for name, item in adapters.parameters(model).items()}


@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_gradients_are_those_of_pefts_own_layers(bias):
    model = prepared(attention_bias=bias, mlp_bias=bias)
    expected, wanted = run(model)
    assert lora.fuse(model) == 14
    assert lora.fuse(model) == 14  # again: nothing is wrapped twice
    found, gradients = run(model)
    assert torch.allclose(found, expected, atol=1e-5)
    for name, item in wanted.items():
        assert torch.allclose(gradients[name], item, rtol=1e-4, atol=1e-5), name


def test_bfloat16_under_autocast_is_near_pefts():
    model = prepared(torch.bfloat16)
    expected, wanted = run(model, torch.bfloat16)
    lora.fuse(model)
    found, gradients = run(model, torch.bfloat16)
    assert float((found - expected).abs().mean()) < 0.05
    off = sum(float((gradients[name] - item).float().square().sum()) for name, item in wanted.items())
    assert off < 0.1 * sum(float(item.float().square().sum()) for item in wanted.values())


def test_a_switched_off_adapter_and_a_removed_one_leave_the_base_model():
    model = prepared()
    with adapters.disabled(model):
        expected = run_plain(model)
    lora.fuse(model)
    assert not torch.allclose(run_plain(model), expected, atol=1e-3)
    with adapters.disabled(model):
        assert torch.equal(run_plain(model), expected)
    base = adapters.detach(model)
    assert torch.equal(run_plain(base), expected)
    assert all("forward" not in vars(module) for module in base.modules() if isinstance(module, nn.Linear))


@torch.no_grad()
def run_plain(model):
    return model(input_ids=torch.arange(1, 9)[None], use_cache=False).logits
