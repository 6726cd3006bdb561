"""An unmodified tool-calling graph is trained: by command, by function, with flags or with a file of settings."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from art_backends.config import add_arguments, from_arguments
from art_backends.store import Store
from art_backends.trajectories import CaptureLevel, Purpose, Rollout

import art_langgraph

pytestmark = pytest.mark.timeout(300)

REPORT = {
    "base_success",
    "trained_success",
    "confidence_interval",
    "train_seconds",
    "steps",
    "rollouts",
    "computed_to_unique_tokens",
    "drifted_calls",
    "mean_abs_logprob_difference",
    "engine_tokens_per_second",
    "model_digest",
}


def rollouts(run: Path) -> list[Rollout]:
    store = Store.open(run / "store.sqlite")
    try:
        return [r for r in store.rollouts(with_calls=True, limit=1000) if r.step is not None]  # those of the run
    finally:
        store.close()


def steps(run: Path) -> list[dict[str, Any]]:
    store = Store.open(run / "store.sqlite")
    try:
        return [{"step": item["step"], **store.step("policy", item["step"])} for item in store.steps("policy")]
    finally:
        store.close()


def check_calls(found: list[Rollout]) -> None:
    """Every call of the agent is there, with its exact tokens, and the second goes on from the first's."""
    for rollout in found:
        answers = [m for m in rollout.output["messages"] if m["role"] == "assistant"]
        assert len(rollout.calls) == len(answers) >= 2, rollout.id
        for call, answer in zip(rollout.calls, answers, strict=True):
            assert call.rollout_id == rollout.id
            assert call.version == rollout.version
            assert (call.status, call.capture, call.drifted, call.excluded) == ("ok", CaptureLevel.TOKENS, False, None)
            assert (call.node.name, call.model) == ("agent", "gpt-4o-mini")
            (choice,) = call.choices
            assert 0 < len(choice.token_ids) == len(choice.logprobs) <= 8
            assert (choice.message["content"] or "") == (answer["content"] or "")
            assert call.sampling.temperature == (1.0 if rollout.purpose is Purpose.TRAIN else 0.0)
            assert {tool["function"]["name"] for tool in call.request["tools"]} == {"stock", "arrival"}
        first, second = rollout.calls
        before = first.prompt_token_ids + first.choices[0].token_ids
        assert second.prompt_token_ids[: len(before)] == before
        assert (second.prompt_mode, second.continues) == ("exact", first.id)


def check_run(run: Path) -> None:
    """Three steps made three versions, each from its own rollouts; what was trained is what was sampled."""
    found = rollouts(run)
    check_calls(found)
    assert {path.name for path in (run / "versions").iterdir()} == {"policy@1", "policy@2", "policy@3"}
    made = steps(run)
    assert [(item["step"], item["kind"], item["version"]) for item in made] == [
        (1, "committed", 1),
        (2, "committed", 2),
        (3, "committed", 3),
    ]
    for item in made:
        mine = {r.id: r for r in found if r.purpose is Purpose.TRAIN and r.step == item["step"]}
        assert set(item["rollout_ids"]) == set(mine)
        assert len(mine) == 6
        assert {rollout.version for rollout in mine.values()} == {f"policy@{item['step'] - 1}"}
        assert item["metrics"]["sampling/sampling_logp_difference/mean"] <= 1e-4
        assert item["metrics"]["sampling/sampling_logp_difference/max"] <= 1e-3
        trained = 0
        for rollout_id, tokens in item["tokens"].items():
            sampled = {call.id: len(call.choices[0].token_ids) for call in mine[rollout_id].calls}
            for part in tokens:
                assert part["trained"] in (sampled[part["call"]], 0)
                assert part["trained"] or part["excluded"] or part["advantage"] == 0
                trained += part["trained"]
        assert trained == item["metrics"]["tokens/trained"] > 0


def test_the_command(trained: Any) -> None:
    check_run(trained.run)
    report = trained.report()
    assert set(report) >= REPORT
    assert (report["steps"], report["rollouts"], report["faults"], report["errors"]) == (3, 18, 0, 0)
    assert (report["version"], report["drifted_calls"], report["held_out"]) == ("policy@3", 0, 1)
    assert report["mean_abs_logprob_difference"] <= 1e-4
    assert report["computed_to_unique_tokens"] >= 1
    assert report["engine_tokens_per_second"] > 0
    assert len(report["examples"]) == 1
    assert (trained.run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (trained.run / "admin.token").stat().st_mode & 0o077 == 0


def test_the_function_with_a_file_of_settings(
    project: Any, trained: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (project.path / "art.toml").write_text(toml + f'base_model = "{project.model}"\nfolder = "{project.run}"\n')
    monkeypatch.chdir(project.path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("OPENAI_API_KEY", "a-fake-key")
    spec = importlib.util.spec_from_file_location("rewards_of_the_function", project.path / "my_rewards.py")
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    try:
        report = art_langgraph.train(
            "my_app:graph",
            scenarios="tasks.jsonl",
            reward=rewards.score,
            config="art.toml",
        )
    finally:
        sys.modules.pop("my_app", None)
    assert (report.steps, report.version, report.drifted_calls) == (3, "policy@3", 0)
    assert report.trained_success is None  # nothing was held out
    check_run(project.run)
    by_file, by_flags = project.state(3)["config"], trained.state(3)["config"]
    assert {key for key in by_file if by_file[key] != by_flags[key]} <= {"folder"}


def test_flags_and_file_give_the_same_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = [part for name, value in settings.items() for part in ("--" + name.replace("_", "-"), str(value))]
    file = tmp_path / "art.toml"
    file.write_text("[art]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    assert from_arguments(parser.parse_args(flags)) == from_arguments(parser.parse_args([]), file)
    assert from_arguments(parser.parse_args(["--rank", "7"]), file).rank == 7
