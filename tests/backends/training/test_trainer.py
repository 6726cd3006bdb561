from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from art_backends.errors import AdapterError, NonFiniteError, TrainingError
from art_backends.training import adapters, guard, versions
from art_backends.training.requests import StepOutcome
from art_backends.trajectories import Sampling

from tests.backends.training.conftest import make_call, make_group, make_request, rich_batch

WRITTEN = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in WRITTEN}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def second_batch():
    return [
        make_group(
            "three",
            ("s1", 1.0, [make_call("x1", [9, 8, 7], [6, 5])]),
            ("s2", 0.0, [make_call("x2", [9, 8, 7], [4, 5])]),
        )
    ]


def flat_batch():
    return [make_group("flat", *((f"f{n}", 0.5, [make_call(f"y{n}", [1, 2], [3 + n])]) for n in range(3)))]


def poison(trainer, request, value: float) -> list:
    """Make every gradient of the first adapter tensor ``value``; returns the handles."""
    state = trainer._load(request)
    first = next(iter(adapters.parameters(state.model).values()))
    return [first.register_hook(lambda gradient: torch.full_like(gradient, value))]


def test_a_step_commits_a_complete_version(make_trainer, tmp_path):
    seen = []
    request = make_request(tmp_path / "versions", rich_batch())
    outcome = make_trainer().step(request, lambda done, packs: seen.append((done, packs)))
    assert (outcome.kind, outcome.version, outcome.reason) == ("committed", 1, None)
    (info,) = versions.list_versions(tmp_path / "versions", "policy")
    assert info.state["rollout_ids"] == [f"r{n}" for n in range(1, 9)]
    assert info.state["base_digest"] == "digest"
    assert info.state["config"]["rank"] == 4
    assert seen == [(0, 1), (1, 1)]
    assert adapters.read(info.path, base_digest="digest").rank == 4
    assert not list((tmp_path / "versions").glob(".tmp-*"))
    assert StepOutcome.model_validate_json(outcome.model_dump_json()) == outcome


def test_the_outcome_says_what_every_answer_gave(make_trainer, tmp_path):
    group = make_group(
        "g",
        ("a", 1.0, [make_call("a1", [1], [2, 3]), make_call("a2", [1], [4], sequence=1, excluded="retry")]),
        ("b", 0.0, [make_call("b1", [1], [2], sampling=Sampling(constrained=True)), make_call("b2", [1], [5])]),
    )
    outcome = make_trainer().step(make_request(tmp_path / "versions", [group, *flat_batch()]))
    told = {
        rollout: [(item.call, item.trained, item.advantage, item.excluded) for item in items]
        for rollout, items in outcome.tokens.items()
    }
    assert told["a"] == [("a1", 2, 0.5, None), ("a2", 0, 0.5, "retry")]
    assert told["b"] == [("b1", 0, -0.5, "constrained"), ("b2", 1, -0.5, None)]
    assert told["f0"] == [("y0", 0, 0.0, "no_spread")]
    metrics = outcome.metrics
    assert metrics["tokens/trained"] == 3
    assert metrics["calls/excluded"] == 2
    assert metrics["calls/excluded/constrained"] == 1
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward"] == pytest.approx((1 + 0 + 0.5 * 3) / 5)
    assert 0 < metrics["ess"] <= 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_step_raises_the_probability_of_what_was_rewarded(make_trainer, tmp_path):
    trainer = make_trainer()
    folder = tmp_path / "versions"
    differences = []
    for version in range(3):
        batch = [
            make_group(
                "g",
                ("a", 1.0, [make_call("a1", [1, 2, 3], [4, 5])]),
                ("b", 0.0, [make_call("b1", [1, 2, 3], [6, 7])]),
            )
        ]
        trainer.step(make_request(folder, batch, version))
        state = trainer._loaded
        ids = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            logits = torch.log_softmax(state.model(input_ids=ids).logits[0, -1], -1)
        differences.append(float(logits[4] - logits[6]))
    assert differences[0] < differences[1] < differences[2]


# ---- same bytes


def test_a_new_trainer_from_disk_goes_on_with_the_same_bytes(make_trainer, tmp_path):
    batches = [rich_batch(), second_batch(), rich_batch()]
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    trainer = make_trainer(through)
    for version, batch in enumerate(batches):
        trainer.step(make_request(through, batch, version, weight_decay=0.01))
        make_trainer(resumed).step(make_request(resumed, batch, version, weight_decay=0.01))
    for version in (1, 2, 3):
        assert contents(through / f"policy@{version}") == contents(resumed / f"policy@{version}")


def test_the_seed_decides_the_first_adapter(make_trainer, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_trainer(tmp_path / name).step(make_request(tmp_path / name, rich_batch(), seed=seed))
    first, same, other = (contents(tmp_path / name / "policy@1")["adapter_model.safetensors"] for name in "abc")
    assert first == same != other


KILLER = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from art_backends.training import adapters, optimizer, trainer as module, versions
from art_backends.training.requests import StepRequest
model, folder, script = sys.argv[1:4]
points = {
    "inside the step": (module.Updates, "run"),
    "before the adapter": (adapters, "write"),
    "between the files": (optimizer, "write"),
    "before the rename": (versions, "commit"),
    "after the rename": (versions, "_sync_folder"),
}
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
def child(act):
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def step(place):
    text = (Path(script) / "request.json").read_text().replace("FOLDER", str(place))
    trainer = module.Trainer(
        Path(model), policy="policy", versions=place, dtype="float32", device="cpu", base_digest="digest"
    )
    trainer.step(StepRequest.model_validate_json(text))
for number, (name, (owner, attribute)) in enumerate(points.items()):
    place = Path(folder) / str(number)
    def act():
        if name == "after the rename":
            original = versions._sync_folder
            setattr(owner, attribute, lambda path: die() if (path / "policy@1").exists() else original(path))
        else:
            setattr(owner, attribute, die)
        step(place)
    assert child(act) == -signal.SIGKILL, name
    assert child(lambda: step(place)) == 0, name
"""


@pytest.mark.timeout(300)
def test_killed_at_five_points_and_repeated_gives_the_bytes_of_an_uninterrupted_step(
    make_trainer, model_path, tmp_path
):
    folder = tmp_path / "versions"
    request = make_request(folder, rich_batch())
    make_trainer().step(request)
    expected = contents(folder / "policy@1")
    text = request.model_dump_json().replace(json.dumps(str(folder)), '"FOLDER"')
    (tmp_path / "request.json").write_text(text)
    command = [sys.executable, "-c", KILLER, str(model_path), str(tmp_path / "killed"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for number in range(5):
        place = tmp_path / "killed" / str(number)
        assert contents(place / "policy@1") == expected
        assert [path.name for path in place.iterdir()] == ["policy@1"]


# ---- once only


def test_repeating_a_committed_step_answers_without_training(make_trainer, tmp_path):
    request = make_request(tmp_path / "versions", rich_batch())
    first = make_trainer().step(request)
    before = everything(tmp_path / "versions")
    again = make_trainer().step(request, lambda _done, _packs: pytest.fail("nothing may be computed"))
    assert again == first
    assert everything(tmp_path / "versions") == before


def test_a_version_made_of_other_rollouts_is_refused(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.step(make_request(tmp_path / "versions", rich_batch()))
    with pytest.raises(TrainingError, match="already trained on other rollouts"):
        trainer.step(make_request(tmp_path / "versions", second_batch()))


def test_wrong_requests(make_trainer, tmp_path):
    request = make_request(tmp_path / "versions", rich_batch())
    with pytest.raises(TrainingError, match="trains policy, not other"):
        make_trainer().step(request.model_copy(update={"policy": "other"}))
    with pytest.raises(TrainingError, match="writes to"):
        make_trainer(tmp_path / "elsewhere").step(request)
    with pytest.raises(AdapterError, match="policy@4: the version to train from is not there"):
        make_trainer().step(make_request(tmp_path / "versions", rich_batch(), 4))
    with pytest.raises(AdapterError, match=r"no linear module named nothing_proj"):
        make_trainer().step(
            make_request(tmp_path / "versions", rich_batch(), target_modules=["q_proj", "nothing_proj"])
        )


def test_other_targets_can_follow_refused_ones(make_trainer, tmp_path):
    trainer = make_trainer()
    with pytest.raises(AdapterError):
        trainer.step(make_request(tmp_path / "versions", rich_batch(), target_modules=["q_proj", "nothing_proj"]))
    assert trainer.step(make_request(tmp_path / "versions", rich_batch())).kind == "committed"
    with pytest.raises(AdapterError, match="rank 4"):
        trainer.step(make_request(tmp_path / "versions", second_batch(), 1, rank=2))
    assert trainer.step(make_request(tmp_path / "versions", second_batch(), 1)).kind == "committed"


def test_a_missing_model_is_named(make_trainer, tmp_path):
    with pytest.raises(TrainingError, match="nowhere: the base model cannot be loaded"):
        make_trainer(path=tmp_path / "nowhere").step(make_request(tmp_path / "versions", rich_batch()))


# ---- nothing to learn (R25)


def test_no_spread_leaves_every_byte(make_trainer, tmp_path):
    trainer = make_trainer()
    folder = tmp_path / "versions"
    outcome = trainer.step(make_request(folder, flat_batch()))
    assert (outcome.kind, outcome.version, outcome.reason) == ("skipped", 0, "no_spread")
    assert outcome.metrics["frac_reward_zero_std"] == 1
    trainer.step(make_request(folder, rich_batch()))
    before = everything(folder)
    outcome = trainer.step(make_request(folder, flat_batch(), 1))
    assert (outcome.kind, outcome.version, outcome.reason) == ("skipped", 1, "no_spread")
    assert everything(folder) == before
    # and what comes next is what would have come without it
    trainer.step(make_request(folder, second_batch(), 1))
    other = tmp_path / "other"
    make_trainer(other).step(make_request(other, rich_batch()))
    make_trainer(other).step(make_request(other, second_batch(), 1))
    assert contents(folder / "policy@2") == contents(other / "policy@2")


def test_a_spread_without_a_token_to_train(make_trainer, tmp_path):
    constrained = Sampling(constrained=True)
    group = make_group(
        "g",
        ("a", 1.0, [make_call("a1", [1], [2], sampling=constrained)]),
        ("b", 0.0, [make_call("b1", [1], [3], sampling=constrained)]),
    )
    outcome = make_trainer().step(make_request(tmp_path / "versions", [group]))
    assert (outcome.kind, outcome.reason) == ("skipped", "no_tokens")
    assert outcome.metrics["calls/excluded/constrained"] == 2
    assert outcome.metrics["trajectories/excluded"] == 2


# ---- not finite (R26)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_the_third_stops(value, make_trainer, tmp_path):
    folder = tmp_path / "versions"
    trainer = make_trainer()
    trainer.step(make_request(folder, rich_batch()))
    before = contents(folder / "policy@1")
    request = make_request(folder, second_batch(), 1)
    for number in (1, 2):
        handles = poison(trainer, request, value)
        outcome = trainer.step(request.model_copy(update={"step": 10 + number}))
        assert (outcome.kind, outcome.version, outcome.reason) == ("skipped", 1, "non_finite")
        [handle.remove() for handle in handles]
    trainer = make_trainer()  # the count survives a restart
    poison(trainer, request, value)
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        trainer.step(request.model_copy(update={"step": 13}))
    assert contents(folder / "policy@1") == before
    assert [info.version for info in versions.list_versions(folder, "policy")] == [1]
    assert make_trainer().step(request.model_copy(update={"step": 14})).kind == "committed"
    assert guard.skipped(folder, "policy") == []


def test_a_skipped_step_changes_nothing_for_the_next(make_trainer, tmp_path):
    folder, clean = tmp_path / "versions", tmp_path / "clean"
    trainer, other = make_trainer(), make_trainer(clean)
    for place, one in ((folder, trainer), (clean, other)):
        one.step(make_request(place, rich_batch()))
    request = make_request(folder, second_batch(), 1)
    handles = poison(trainer, request, math.nan)
    assert trainer.step(request).reason == "non_finite"
    [handle.remove() for handle in handles]
    trainer.step(request)
    other.step(make_request(clean, second_batch(), 1))
    assert contents(folder / "policy@2") == contents(clean / "policy@2")


def test_the_same_step_repeated_after_a_crash_counts_once(tmp_path):
    assert [guard.add(tmp_path, "policy", step) for step in (5, 5, 6, 6, 7)] == [1, 1, 2, 2, 3]
    guard.clear(tmp_path, "policy")
    guard.clear(tmp_path, "policy")
    assert guard.add(tmp_path, "policy", 8) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_recorded_logprob_that_is_not_finite_takes_only_its_answer_out(value, make_trainer, tmp_path):
    group = make_group(
        "g",
        ("a", 1.0, [make_call("a1", [1], [2]), make_call("a2", [1], [3, 4], [-1.0, value], sequence=1)]),
        ("b", 0.0, [make_call("b1", [1], [5])]),
    )
    outcome = make_trainer().step(make_request(tmp_path / "versions", [group]))
    assert outcome.kind == "committed"
    assert outcome.metrics["calls/excluded/logprob_not_finite"] == 1
    files = adapters.read(tmp_path / "versions" / "policy@1")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in files.tensors.values())


# ---- too far (R27)


def test_a_step_beyond_max_kl_is_undone(make_trainer, tmp_path):
    folder, clean = tmp_path / "versions", tmp_path / "clean"
    trainer = make_trainer()
    trainer.step(make_request(folder, rich_batch()))
    before = everything(folder)
    outcome = trainer.step(make_request(folder, second_batch(), 1, learning_rate=5.0, max_kl=0.05))
    assert (outcome.kind, outcome.version, outcome.reason) == ("skipped", 1, "kl")
    assert outcome.metrics.get("kl/step", math.inf) > 0.05
    assert everything(folder) == before
    outcome = trainer.step(make_request(folder, second_batch(), 1, learning_rate=1e-4, max_kl=0.05))
    assert outcome.kind == "committed"
    assert 0 <= outcome.metrics["kl/step"] < 0.05
    make_trainer(clean).step(make_request(clean, rich_batch()))
    make_trainer(clean).step(make_request(clean, second_batch(), 1, learning_rate=1e-4, max_kl=0.05))
    assert contents(folder / "policy@2") == contents(clean / "policy@2")


@pytest.mark.parametrize("importance", ["truncate", "off"])
def test_a_step_whose_sampler_is_too_far_from_the_trainer_is_not_made(make_trainer, tmp_path, importance):
    """The recorded logprobs are all -2, as no model of ours would say: KL(sampler || trainer) is far from 0."""
    folder = tmp_path / "versions"
    trainer = make_trainer()
    limit = {"max_sampler_kl": 0.01, "importance": importance}
    outcome = trainer.step(make_request(folder, second_batch(), **limit))
    assert (outcome.kind, outcome.version, outcome.reason) == ("skipped", 0, "sampler_kl")
    assert outcome.metrics["sampling/kl"] > 0.01
    assert versions.list_versions(folder, "policy") == []
    outcome = trainer.step(make_request(folder, second_batch(), max_sampler_kl=1e6, importance=importance))
    assert outcome.kind == "committed"


def test_released_between_two_steps_it_writes_the_same_bytes(make_trainer, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, after in ((one, lambda _: None), (other, lambda trainer: trainer.release())):
        trainer = make_trainer(folder)
        trainer.step(make_request(folder, rich_batch()))
        after(trainer)
        trainer.step(make_request(folder, second_batch(), 1))
    assert contents(one / "policy@2") == contents(other / "policy@2")


def test_a_huge_learning_rate_never_commits_values_that_are_not_finite(make_trainer, tmp_path):
    folder = tmp_path / "versions"
    outcome = make_trainer().step(make_request(folder, rich_batch(), learning_rate=1e30, updates_per_batch=3))
    assert outcome.kind == "skipped"
    assert outcome.reason == "non_finite"
    assert versions.list_versions(folder, "policy") == []


# ---- the disk (R7), cancelling


def test_a_file_size_limit_leaves_the_version_before(make_trainer, tmp_path):
    folder = tmp_path / "versions"
    trainer = make_trainer()
    trainer.step(make_request(folder, rich_batch()))
    before = everything(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"policy@2 could not be written: File too large.*version 1 is intact"):
            trainer.step(make_request(folder, second_batch(), 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert everything(folder) == before
    assert trainer.step(make_request(folder, second_batch(), 1)).version == 2


@pytest.mark.parametrize("failing", range(4))
def test_a_full_disk_at_any_file(failing, make_trainer, tmp_path, monkeypatch):
    folder = tmp_path / "versions"
    trainer = make_trainer()
    count = iter(range(100))
    original = versions.write_file

    def full(path, data):
        if next(count) == failing:
            original(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        original(path, data)

    monkeypatch.setattr(versions, "write_file", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        trainer.step(make_request(folder, rich_batch()))
    assert list(folder.iterdir()) == []
    assert trainer.step(make_request(folder, rich_batch())).kind == "committed"


def test_cancelling_leaves_the_version_before(make_trainer, tmp_path):
    folder = tmp_path / "versions"
    trainer = make_trainer()
    with pytest.raises(TrainingError, match="cancelled"):
        trainer.step(make_request(folder, rich_batch()), cancelled=lambda: True)
    assert versions.list_versions(folder, "policy") == []
    assert trainer.step(make_request(folder, rich_batch())).kind == "committed"


# ---- an adapter that went bad on disk (R22)


def test_a_broken_version_is_refused_before_it_is_trained_from(make_trainer, tmp_path):
    folder = tmp_path / "versions"
    make_trainer().step(make_request(folder, rich_batch()))
    weights = folder / "policy@1" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(AdapterError, match="truncated"):
        make_trainer().step(make_request(folder, second_batch(), 1))


def test_a_version_of_another_base_model_is_refused(make_trainer, tmp_path):
    folder = tmp_path / "versions"
    make_trainer().step(make_request(folder, rich_batch()))
    with pytest.raises(AdapterError, match="another base model"):
        make_trainer(base_digest="other").step(make_request(folder, second_batch(), 1))


def test_bfloat16_and_checkpointing_train_too(make_trainer, tmp_path):
    trainer = make_trainer(dtype="bfloat16")
    outcome = trainer.step(make_request(tmp_path / "versions", rich_batch(), gradient_checkpointing=True))
    assert outcome.kind == "committed"
    files = adapters.read(tmp_path / "versions" / "policy@1")
    assert {tensor.dtype for tensor in files.tensors.values()} == {torch.float32}
