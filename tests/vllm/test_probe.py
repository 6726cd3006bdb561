"""What the probe says of a real vLLM: with the flags that training needs, and with none of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from art_backends.engines.embedded.render import HERMES_PATH
from art_backends.errors import ConfigError, EngineError
from art_backends.proxy.engine_client import EngineClient
from art_backends.server import probe
from art_backends.server.adapters import NOT_TAKEN, Adapters
from art_backends.server.policy import PolicyTable
from art_backends.training import versions
from art_backends.trajectories import CaptureLevel

from tests.vllm.serving import Vllm, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]

OWN_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 40, "repetition_penalty": 1.1}


@pytest.fixture
async def client(vllm: Vllm) -> AsyncIterator[EngineClient]:
    made = EngineClient(uds=str(vllm.socket))
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
def bare(vllm_python: Path, smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Somebody's vLLM: the model alone, which has sampling settings of its own."""
    model = tmp_path_factory.mktemp("own")
    for file in smollm.iterdir():
        (model / file.name).symlink_to(file)
    settings = model / "generation_config.json"
    own = json.loads(settings.read_text()) if settings.exists() else {}
    settings.unlink(missing_ok=True)
    settings.write_text(json.dumps({**own, **OWN_SAMPLING}))
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--chat-template", str(HERMES_PATH))
    with serving(vllm_python, model, *flags) as server:
        yield server


@pytest.fixture
async def bare_client(bare: Vllm) -> AsyncIterator[EngineClient]:
    made = EngineClient(uds=str(bare.socket))
    yield made
    await made.aclose()


async def test_a_vllm_with_the_flags_of_exact_training_has_no_problems(vllm: Vllm, client: EngineClient) -> None:
    before = await client.models()
    does = await probe.abilities(client, vllm.name)
    assert does.problems == []
    assert (does.processed, does.neutral, does.tools, does.lora) == (True, True, True, None)
    assert (does.capture, does.exact_prompts, does.tokenizes) == (CaptureLevel.TOKENS, True, True)
    assert (does.max_model_len, does.root) == (2048, str(vllm.model))
    assert [model["id"] for model in await client.models()] == [model["id"] for model in before], "nothing is left"


async def test_a_vllm_without_flags_is_told_each_that_it_lacks(bare: Vllm, bare_client: EngineClient) -> None:
    does = await probe.abilities(bare_client, bare.name)
    assert (does.processed, does.neutral, does.tools) == (False, False, False)
    assert (does.capture, does.exact_prompts, does.tokenizes) == (CaptureLevel.TOKENS, True, True)
    (fatal,) = does.fatal
    assert "--enable-lora" in fatal
    said = " ".join(does.warnings)
    for flag in ("--logprobs-mode processed_logprobs", "--generation-config vllm", "--tool-call-parser"):
        assert flag in said


async def test_two_vllms_with_other_flags_are_not_one_engine(
    vllm: Vllm, bare: Vllm, client: EngineClient, bare_client: EngineClient
) -> None:
    found = [await probe.abilities(client, vllm.name), await probe.abilities(bare_client, bare.name)]
    with pytest.raises(ConfigError, match="one and two do not serve the same"):
        probe.agree(["one", "two"], found)


async def test_a_vllm_without_adapters_refuses_a_version_and_the_version_stays(
    bare: Vllm, bare_client: EngineClient, tmp_path: Path
) -> None:
    with versions.new_version(tmp_path, "policy", 1) as place:
        state = {"format": 1, "policy": "policy", "version": 1, "step": 1, "rollout_ids": [], "metrics": {}}
        versions.write_file(place / versions.STATE, versions.encode_json(state))
    adapters = Adapters(bare_client, PolicyTable("policy", base_model=bare.name), tmp_path)
    with pytest.raises(EngineError, match="--enable-lora") as refused:
        await adapters.load(1)
    assert refused.value.code == NOT_TAKEN
    assert versions.read_version(tmp_path, "policy", 1) is not None
    assert await bare_client.healthy()
