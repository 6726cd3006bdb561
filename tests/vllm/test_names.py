"""A vLLM that outlives a run: other weights under a name and path that it knows are not answered from its cache."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from art_backends.proxy.engine_client import EngineClient
from art_backends.server.adapters import Adapters
from art_backends.server.policy import PolicyTable
from art_backends.training import versions
from safetensors.torch import save_file

from tests.vllm.serving import Vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]

# beyond several blocks of the prefix cache, which hold 128 tokens on a CPU
LONG = [{"role": "user", "content": "Tell me of the sea, its ships and harbours, and of who lives there. " * 24}]
NAME = "policy@1"
RANK = 8


def make(folder: Path, model: Path, seed: int) -> None:
    """Version 1, anew: a random adapter of all keys and values, so that what is cached depends on it."""
    shutil.rmtree(folder / NAME, ignore_errors=True)
    config = json.loads((model / "config.json").read_text())
    size, out = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in ("k_proj", "v_proj"):
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, size, generator=random) * 0.05
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, RANK, generator=random) * 0.05
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    with versions.new_version(folder, "policy", 1) as place:
        save_file(tensors, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["k_proj", "v_proj"]}))
        state = {"format": 1, "policy": "policy", "version": 1, "step": 1, "rollout_ids": [], "metrics": {}}
        versions.write_file(place / versions.STATE, versions.encode_json(state))


async def likeliest(client: EngineClient, **more: Any) -> list[float]:
    body = {"model": NAME, "messages": LONG, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    status, _, reply = await client.chat({**body, **more})
    assert status == 200, reply
    return [float(item["logprob"]) for item in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]


async def test_a_folder_that_is_begun_anew_behind_a_server_that_runs_on(vllm: Vllm, tmp_path: Path) -> None:
    said = []
    for seed in (1, 2):  # two runs in one folder, the first of which unloads what it has loaded
        make(tmp_path, vllm.model, seed)
        client = EngineClient(uds=str(vllm.socket))
        try:
            await Adapters(client, PolicyTable("policy", base_model=vllm.name), tmp_path).load(1)
            said.append(await likeliest(client))
            uncached = await likeliest(client, cache_salt=uuid.uuid4().hex)
            await client.unload_adapter(NAME)
        finally:
            await client.aclose()
        assert said[-1] == pytest.approx(uncached, abs=2e-3)
    assert said[0] != pytest.approx(said[1], abs=2e-2), "the runs' weights differ"
