"""Swaps on a real vLLM: nothing is dropped, nothing answered by other weights, and a version that is no good changes
nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from art_backends.errors import AdapterError, EngineError
from art_backends.trajectories import Purpose
from safetensors.torch import load_file, save_file

from benchmarks import swap_adapters
from tests.vllm.proxied import Proxied
from tests.vllm.serving import Vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]

SWAP = Path(__file__).parents[2] / "benchmarks" / "swap.py"
TURNS = ("Say your word.",)
LENGTH = 8
WEIGHTS = "adapter_model.safetensors"


def test_swaps_under_load_lose_nothing(vllm: Vllm, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SWAP), "--quick", "--attach", str(vllm.socket), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert (found["dropped"], found["misattributed"], found["capture_lost"]) == (0, 0, 0)
    assert (found["swaps"], found["versions_unloaded"]) == (4, 4)
    assert found["calls"] >= 16 * 5
    assert found["longest_pause_ms"] > 0


@pytest.fixture(scope="module")
def versions(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Three versions and the word that each says."""
    folder = tmp_path_factory.mktemp("versions")
    return folder, swap_adapters.make(smollm, folder, 3, TURNS, LENGTH)


@pytest.fixture
def words(w: Proxied, versions: tuple[Path, list[str]]) -> list[str]:
    """The words; the versions lie where this test's adapters are looked for."""
    shutil.copytree(versions[0], w.versions, dirs_exist_ok=True)
    return versions[1]


async def says(w: Proxied, version: int | None = None) -> str:
    """The one word of a new rollout's answer, by the version that its record names."""
    turns = await w.open(Purpose.EVAL, version)
    answer = await turns.ask([{"role": "user", "content": TURNS[0]}], max_tokens=LENGTH)
    assert answer.status == 200, answer.raw
    call = await turns.last()
    assert call.version == turns.context.version
    w.close(turns)
    (word,) = set(answer.message["content"].split())
    return str(word)


async def give_back(w: Proxied) -> None:
    """The server is shared: what a test loaded goes again."""
    for name in [model["id"] for model in await w.engine.models() if model["parent"]]:
        await w.engine.unload_adapter(name)


async def test_a_rollout_stays_on_the_version_it_began_with(w: Proxied, words: list[str]) -> None:
    try:
        await w.adapters.load(1)
        w.policies.move(1)
        old = await w.open()
        await w.adapters.load(2)
        w.policies.move(2)
        answer = await old.ask([{"role": "user", "content": TURNS[0]}], max_tokens=LENGTH)
        assert set(answer.message["content"].split()) == {words[0]}
        assert await says(w) == words[1]
        assert await w.adapters.unload_idle() == []  # the old rollout holds it
        w.close(old)
        assert await w.adapters.unload_idle() == [1]
        assert await says(w) == words[1]
    finally:
        await give_back(w)


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def changed(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS)

    return apply


def not_a_number(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


def of_another_base(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], dim=0 if tensor.shape[1] == 1 else 1)


def of_rank_64(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 64, "lora_alpha": 64}))
    changed(lambda name, tensor: torch.cat([tensor] * 64, dim=0 if ".lora_A." in name else 1))(folder)


BROKEN: dict[str, Callable[[Path], Any]] = {
    "truncated": truncated,
    "not a number": changed(not_a_number),
    "of another base": changed(of_another_base),
    "of a rank beyond the server's": of_rank_64,
    "without weights": lambda folder: (folder / WEIGHTS).unlink(),
}


@pytest.mark.parametrize("kind", list(BROKEN))
async def test_a_version_that_is_no_good_changes_nothing(w: Proxied, words: list[str], kind: str) -> None:
    BROKEN[kind](w.versions / "policy@3")
    try:
        await w.adapters.load(1)
        w.policies.move(1)
        with pytest.raises((AdapterError, EngineError), match="policy@3"):
            await w.adapters.load(3)
        assert w.policies.loaded == {0, 1}
        assert [model["id"] for model in await w.engine.models() if model["parent"]] == ["policy@1"]
        assert await says(w) == words[0]
        await w.adapters.load(2)  # and the next good one is taken
        w.policies.move(2)
        assert await says(w) == words[1]
    finally:
        await give_back(w)
