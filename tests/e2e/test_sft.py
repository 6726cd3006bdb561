"""Imitation first: worked examples make versions, which are served, gone on with, and begun from."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.store import Store

from tests.e2e.conftest import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOOL = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "Pieces in stock.",
        "parameters": {"type": "object", "properties": {"product": {"type": "string"}}, "required": ["product"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"product": "rug"}'}}
SAID = {"role": "user", "content": "Say so."}
ASKED = {"role": "user", "content": "Rugs?"}
EXAMPLES: list[dict[str, Any]] = [
    {"messages": [SAID, {"role": "assistant", "content": "It is so."}], "tools": [TOOL]},
    {
        "messages": [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "assistant", "content": "There are 7."},
        ],
        "tools": [TOOL],
    },
]
SETTINGS = ["--rank", "8", "--alpha", "32", "--threads", "1", "--learning-rate", "0.01", "--batch-size", "2"]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write(project: Any, examples: list[Any] = EXAMPLES) -> None:
    (project.path / "examples.jsonl").write_text("".join(json.dumps(item) + "\n" for item in examples))


def imitate(project: Any, epochs: int, *more: str) -> Any:
    base = ["--base-model", str(project.model), "--folder", str(project.run)]
    return project.call("art-backends", "sft", "examples.jsonl", "--epochs", str(epochs), *base, *SETTINGS, *more)


def recorded(run: Path) -> list[dict[str, Any]]:
    """The rows of the steps and evaluations; an imitation's first row only says which examples it learns."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "imitation" not in row]


def test_examples_are_learned_by_heart_and_served(
    project: Any, tmp_path_factory: pytest.TempPathFactory, waiting: Callable[..., Any]
) -> None:
    # random weights so large that a few low-rank changes can make it say anything
    project.model = make_model(tmp_path_factory.mktemp("lively"), spread=0.6)
    write(project)
    first = imitate(project, 10)
    assert first.code == 0, first.err
    assert "policy@10: 2 examples, 10 steps" in first.out
    again = imitate(project, 60)  # goes on: fifty steps more
    assert again.code == 0, again.err
    assert "going on after step 10" in again.out
    assert "policy@60" in again.out
    rows = recorded(project.run)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.05 < 2 < rows[0]["loss"]
    assert "reward" not in rows[0]
    third = imitate(project, 60)
    assert (third.code, len(recorded(project.run))) == (0, 60)  # nothing left to do

    process = project.start("art-backends", "serve", "--folder", "run", "--port", "0", "--threads", "1")
    file = project.run / "server.json"
    waiting(lambda: file.exists() or process.poll() is not None, 120)
    url = json.loads(file.read_text())["url"]
    token = (project.run / "agent.token").read_text().strip()

    def ask(messages: list[Any]) -> dict[str, Any]:
        body = {"model": "policy", "messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 60}
        reply = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60,
            trust_env=False,
        )  # fmt: skip
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]  # type: ignore[no-any-return]

    so = ask([SAID])
    assert (so["message"]["content"], so["finish_reason"]) == ("It is so.", "stop")
    called = ask([ASKED])
    assert called["finish_reason"] == "tool_calls"
    (call,) = called["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("stock", {"product": "rug"})
    answered = ask([ASKED, {**called["message"]}, {"role": "tool", "tool_call_id": call["id"], "content": "7"}])
    assert answered["message"]["content"] == "There are 7."
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_a_run_begins_from_an_adapter(project: Any) -> None:
    """Version 0 is a copy of the adapter: it answers the base evaluation, training goes on from it, and KL refers to
    it, so that it is 0 in the first step; in the second it is not."""
    write(project, [{"messages": [SAID, {"role": "assistant", "content": "It is so."}]}])
    done = imitate(project, 12, "--name", "taught", "--folder", str(project.path / "taught"))
    assert done.code == 0, done.err
    source = project.path / "taught" / "versions" / "taught@6"
    assert f"--init-adapter {project.path}/taught/versions/taught@6" in done.out

    same = ["--rank", "8", "--alpha", "32", "--kl-coefficient", "0.1", "--steps", "2"]
    trained = project.call(
        "art-langgraph", *project.training("--init-adapter", str(source), "--held-out", "0.3", *same)
    )
    assert trained.code == 0, trained.err
    begun = project.run / "versions" / "policy@0"
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (begun / name).read_bytes() == (source / name).read_bytes()
    first, second = (row for row in recorded(project.run) if "step" in row)
    assert abs(first["kl"]) < 1e-9
    assert second["kl"] > 1e-9
    assert first["sampling/sampling_logp_difference/mean"] < 1e-4  # what sampled is what is trained
    store = Store.open(project.run / "store.sqlite")
    try:
        evaluated = [r for r in store.rollouts(with_calls=True, limit=1000) if r.purpose == "eval" and r.step == 0]
    finally:
        store.close()
    assert evaluated
    assert {call.version for rollout in evaluated for call in rollout.calls} == {"policy@0"}

    other = project.call("art-langgraph", *project.training("--steps", "3", *same[:6]))
    assert other.code == 2
    assert "init_adapter" in other.err  # it was made with one, and is now asked for without


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--rank", "4", "--alpha", "32"], "rank: the adapter"),
        (["--rank", "8", "--alpha", "16"], "alpha: the adapter"),
        (["--rank", "8", "--alpha", "32", "--rslora"], "rslora: the adapter"),
        (["--rank", "8", "--alpha", "32", "--target-modules", "q_proj"], "target_modules: the adapter"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(project: Any, tmp_path: Path, settings: list[str], words: str) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": MODULES}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    refused = project.call("art-langgraph", *project.training("--init-adapter", str(adapter), *settings))
    assert refused.code == 2
    assert words in refused.err
    assert "Traceback" not in refused.err
    assert not (project.run / "policy.json").exists()  # the right settings are still free to be given


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"messages": [{"role": "user", "content": "x"}]}\n', r"example 1 .*no message of the assistant"),
        ('{"messages": "x"}\n', "no list of messages"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "begins with the assistant"),
        ('{"messages"\n', "examples.jsonl, line 1: not valid JSON"),
        ("", "no examples"),
    ],
)
def test_examples_that_cannot_be_used(project: Any, content: str, words: str) -> None:
    (project.path / "examples.jsonl").write_text(content)
    refused = imitate(project, 1)
    assert refused.code == 2
    assert re.search(words, refused.err), refused.err
    assert not project.run.exists()  # before anything was started
