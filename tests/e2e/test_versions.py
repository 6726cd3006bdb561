"""What is done with the versions of a real run: shown, exported so that others load them, rolled back and gone on."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.timeout(300)

PROMPT = list(range(20, 40))


@pytest.fixture
def mine(project: Any, trained: Any) -> Any:
    """A project with a copy of the trained run."""
    shutil.copytree(trained.run, project.run)
    return project


def versions(project: Any, *arguments: str) -> Any:
    return project.call("art-backends", "versions", *arguments, "--folder", "run")


def greedy(model: Any, count: int = 12) -> list[int]:
    with torch.no_grad():
        ids = model.generate(
            input_ids=torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return ids[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits
    return found


def test_list_and_compare(mine: Any) -> None:
    listed = versions(mine, "list", "--json")
    assert listed.code == 0, listed.err
    rows = json.loads(listed.out)
    assert [row["version"] for row in rows] == ["policy@1", "policy@2", "policy@3"]
    assert [row["newest"] for row in rows] == [False, False, True]
    assert sum(row["best"] for row in rows) == 1
    assert rows[2]["held_out_reward"] is not None  # the final evaluation
    assert "newest" in versions(mine, "list").out
    compared = versions(mine, "compare", "1", "3", "--json")
    assert json.loads(compared.out)["step"] == [1, 3]
    missing = versions(mine, "compare", "1", "9")
    assert (missing.code, "no version policy@9" in missing.err) == (2, True)


@pytest.mark.slow
def test_exports_load_elsewhere_and_say_the_same(mine: Any) -> None:
    """PEFT on the base model, the merged model by itself and the GGUF file are the same model; the base is another."""
    for arguments in (("adapter",), ("merged", "--merged"), ("gguf", "--gguf")):
        done = versions(mine, "export", "3", *arguments)
        assert done.code == 0, done.err
    base = AutoModelForCausalLM.from_pretrained(mine.model, dtype=torch.float32)
    plain = logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that will go
        adapted = PeftModel.from_pretrained(base, mine.path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(mine.path / "merged", dtype=torch.float32)
    assert (logits(adapted) - plain).abs().max() > 1e-2
    assert (logits(adapted) - logits(merged)).abs().max() < 1e-4
    assert greedy(merged) == greedy(adapted)
    one_file = AutoModelForCausalLM.from_pretrained(mine.path / "gguf", gguf_file="policy-3.gguf", dtype=torch.float32)
    assert (logits(one_file) - logits(merged)).abs().max() < 1e-4
    assert len({file.stat().st_mode for file in (mine.path / "merged").iterdir()}) == 1  # all of it can be read
    tokenizer = AutoTokenizer.from_pretrained(mine.path / "merged")
    tool = {"type": "function", "function": {"name": "stock", "description": "Pieces.", "parameters": {}}}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools=[tool], tokenize=False)
    assert "stock" in text  # the template of the run, which shows tools
    for folder in ("adapter", "merged", "gguf"):
        for file in (mine.path / folder).glob("*.json"):
            assert str(mine.path) not in file.read_text()
        assert "art-inplace" in (mine.path / folder / "README.md").read_text()
    again = versions(mine, "export", "3", "merged", "--merged")
    assert (again.code, "not empty" in again.err) == (2, True)


@pytest.mark.slow
def test_a_run_goes_on_from_where_it_was_rolled_back_to(mine: Any) -> None:
    before = (mine.run / "versions/policy@1/adapter_model.safetensors").read_bytes()
    rolled = versions(mine, "rollback", "1")
    assert rolled.code == 0, rolled.err
    assert "policy@1 is the newest" in rolled.out
    done = mine.call("art-langgraph", *mine.training("--held-out", "0.2"))
    assert done.code == 0, done.err
    assert (mine.run / "versions/policy@1/adapter_model.safetensors").read_bytes() == before
    for number in (2, 3):
        assert mine.state(number)["step"] == number
    assert len(list((mine.run / "versions").glob("aside-*"))) == 2
    pruned = versions(mine, "prune", "--keep", "1")
    assert pruned.code == 0, pruned.err
    assert "removed" in pruned.out
    assert (mine.run / "versions/policy@3").exists()


@pytest.mark.slow
def test_a_finished_run_is_measured_anew_by_another_reward(mine: Any) -> None:
    was = mine.report()
    with (mine.path / "my_rewards.py").open("a") as file:
        file.write("\n\ndef doubled(run):\n    return {'reward': 10 + 2 * score(run)['reward'], 'success': True}\n")
    done = mine.call("art-langgraph", *mine.training("--held-out", "0.2", reward="my_rewards:doubled"))
    assert done.code == 0, done.err
    assert "of another reward: it was my_rewards:score and is my_rewards:doubled now" in done.out
    assert "nothing is left to train: all 3 steps are made (policy@3)" in done.out
    report = mine.report()
    assert report["base_reward"] == pytest.approx(10 + 2 * was["base_reward"])  # greedy: the same answers
    assert report["trained_reward"] == pytest.approx(10 + 2 * was["trained_reward"])
    listed = versions(mine, "list", "--json")
    assert [entry["reward"] for entry in json.loads(listed.out) if entry["version"] != "policy@3"] == [None, None]


def test_a_folder_in_use_is_left_alone(mine: Any, waiting: Callable[..., Any]) -> None:
    process = mine.start("art-backends", "serve", "--folder", "run", "--port", "0", "--threads", "1")
    file: Path = mine.run / "server.json"
    waiting(lambda: file.exists() or process.poll() is not None, 120)
    refused = versions(mine, "rollback", "1")
    assert refused.code == 2
    assert "in use by process" in refused.err
    assert (mine.run / "versions/policy@3").exists()
    process.terminate()
    process.communicate(timeout=60)


def test_no_run_folder(project: Any) -> None:
    refused = versions(project, "list")
    assert refused.code == 2
    assert "no run folder" in refused.err
    assert not project.run.exists()
