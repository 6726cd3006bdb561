from __future__ import annotations

import pytest
import torch
from art_backends.config import TrainConfig
from art_backends.training import adapters
from art_backends.training.forward import Forward
from art_backends.training.packing import plain_packs, tree_packs
from art_backends.training.sequences import build
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.backends.training.conftest import TARGETS, make_call, make_group, plain_logprobs, rich_batch, tiny_config

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def prepare(base, targets=TARGETS, dtype=torch.float32):
    base.requires_grad_(False)
    base.eval()
    model = adapters.attach(base, TrainConfig(rank=4, alpha=8.0, target_modules=list(targets)))
    adapters.initialise(model, 1)
    with torch.no_grad():
        for name, item in adapters.parameters(model).items():
            if "lora_B" in name:
                item.normal_(0, 0.1)
    return Forward(model, torch.device("cpu"), dtype)


def groups():
    return build(rich_batch())


def compare(forward: Forward, packs) -> float:
    """Largest difference between the pack's logprobs and the model's ordinary forward on one row."""
    calls = {call.id: call for group in rich_batch() for item in group.trajectories for call in item.calls}
    plain = {}
    with torch.no_grad():
        for call in calls.values():
            for choice in call.choices:
                ids = [*call.prompt_token_ids, *choice.token_ids]
                for place, value in enumerate(plain_logprobs(forward.model, call, choice).tolist()):
                    depth = len(call.prompt_token_ids) + place
                    plain[tuple(ids[:depth]), ids[depth], call.sampling.temperature] = value
        worst = 0.0
        for pack in packs:
            for index, value in enumerate(forward.logprobs(pack).tolist()):
                at, chain = int(pack.query_at[index]), []
                if pack.parents is None:
                    row, column = divmod(at, pack.input_ids.shape[1])
                    chain = pack.input_ids[row, : column + 1].tolist()
                else:
                    while at >= 0:
                        chain.append(int(pack.input_ids[0, at]))
                        at = int(pack.parents[at])
                    chain.reverse()
                key = tuple(chain), int(pack.query_token[index]), float(pack.query_temperature[index])
                worst = max(worst, abs(plain[key] - value))
    return worst


def models():
    torch.manual_seed(5)
    return {
        "llama": lambda: (LlamaForCausalLM(tiny_config()), TARGETS),
        "llama, tied": lambda: (LlamaForCausalLM(tiny_config(tie_word_embeddings=True)), TARGETS),
        "qwen3": lambda: (Qwen3ForCausalLM(Qwen3Config(**SMALL)), TARGETS),
        "gpt2": lambda: (
            GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
                )
            ),
            ["c_attn"],
        ),
        "gemma2: softcap and windows": lambda: (
            Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=64, final_logit_softcapping=3.0)),
            TARGETS,
        ),
    }


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("name", list(models()))
def test_tree_logprobs_equal_the_plain_forward(name):
    forward = prepare(*models()[name]())
    assert forward.plain_reason is None
    assert forward.tiled == ("gemma2" not in name)  # which has soft caps
    assert forward.trees_fit(20)
    assert compare(forward, tree_packs(groups(), 1000)) < 2e-5
    forward.tile = 4
    assert compare(forward, tree_packs(groups(), 1000)) < 2e-5
    assert compare(forward, tree_packs(groups(), 20)) < 2e-5
    assert compare(forward, plain_packs(groups(), 60)) < 2e-5


def test_a_softcapped_output_is_not_mistaken_for_a_plain_one():
    forward = prepare(*models()["gemma2: softcap and windows"]())
    assert not forward._plain_head
    assert prepare(*models()["llama"]())._plain_head


def test_a_window_shorter_than_the_sequences_asks_for_plain_rows():
    torch.manual_seed(5)
    forward = prepare(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=14)))
    assert not forward.trees_fit(20)
    assert forward.trees_fit(14)
    assert compare(forward, plain_packs(groups(), 60)) < 2e-5


def test_length_dependent_positions_ask_for_single_plain_rows():
    torch.manual_seed(5)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    forward = prepare(LlamaForCausalLM(tiny_config(rope_parameters=rope, max_position_embeddings=8)))
    assert "dynamic" in (forward.plain_reason or "")
    assert forward.single_rows


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_model_asks_for_plain_rows():
    torch.manual_seed(5)
    config = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4)
    forward = prepare(MambaForCausalLM(config), ["x_proj"])
    assert forward.plain_reason == "the model is recurrent"


def test_a_model_that_ignores_the_mask_is_found_out(monkeypatch):
    torch.manual_seed(5)
    base = LlamaForCausalLM(tiny_config())
    body = base.model.forward

    def ignoring(*args, attention_mask=None, **kwargs):
        return body(*args, attention_mask=None, **kwargs)

    monkeypatch.setattr(base.model, "forward", ignoring)
    assert "differ from plain ones" in (prepare(base).plain_reason or "")


def test_bfloat16_is_near_float32():
    torch.manual_seed(5)
    base = LlamaForCausalLM(tiny_config())
    packs = tree_packs(groups(), 1000)
    with torch.no_grad():
        exact = prepare(base).logprobs(packs[0])
        torch.manual_seed(5)
        rounded = prepare(LlamaForCausalLM(tiny_config()).to(torch.bfloat16), dtype=torch.bfloat16)
        near = rounded.logprobs(packs[0])
    assert near.dtype is torch.float32
    assert rounded.plain_reason is None
    assert float((exact - near).abs().mean()) < 1.0  # other LoRA values: only that it runs and is a logprob
    assert (near <= 0).all()


def test_only_the_adapter_gets_gradients():
    forward = prepare(LlamaForCausalLM(tiny_config()))
    forward.logprobs(tree_packs(groups(), 1000)[0]).sum().backward()
    named = dict(forward.model.named_parameters())
    assert all((item.grad is not None) == item.requires_grad for item in named.values())
    assert any(item.requires_grad for item in named.values())


def test_a_group_of_one_call_is_a_plain_row():
    group = build([make_group("g", ("r", 1.0, [make_call("a", [1, 2], [3])]), ("s", 0.0, []))])
    (pack,) = tree_packs(group, 100)
    assert pack.ancestors().tolist() == [[True, False, False], [True, True, False], [True, True, True]]
