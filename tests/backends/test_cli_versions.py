"""``art-backends versions``: figures for people in its tables, exact ones in JSON. What it does is in tests/e2e."""

import json
from pathlib import Path

import pytest
from art_backends.cli import main
from art_backends.config import TrainConfig
from art_backends.server.folder import PolicyFile
from art_backends.training import versions

REWARDS = {1: 0.30000000000000004, 2: 0.40750000000000003}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "run"
    for number, reward in REWARDS.items():
        version = folder / "versions" / f"policy@{number}"
        version.mkdir(parents=True)
        metrics = {"reward": reward, "tokens/trained": 12345.0 * number, "entropy": 0.1234561 + 1e-7 * number}
        state = {"format": 1, "policy": "policy", "version": number, "step": number, "rollout_ids": []}
        state |= {"metrics": metrics, "config": TrainConfig().model_dump(mode="json")}
        (version / "state.json").write_bytes(versions.encode_json(state))
    PolicyFile.create(folder, TrainConfig(folder=folder), "digest")
    rows = [{"evaluation": n, "version": f"policy@{n}", "held_out/reward": r} for n, r in REWARDS.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_tables_round_and_json_is_exact(run, capsys):
    assert main(["versions", "list", "--folder", run]) == 0
    table = capsys.readouterr().out
    assert "│ 0.3 " in table
    assert table.count("│ 0.4075 ") == 2  # reward and held-out reward
    assert "0000" not in table
    assert main(["versions", "list", "--folder", run, "--json"]) == 0
    assert [row["reward"] for row in json.loads(capsys.readouterr().out)] == list(REWARDS.values())


def test_what_is_compared_is_seen_to_differ(run, capsys):
    assert main(["versions", "compare", "1", "2", "--folder", run]) == 0
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert [word.strip() for word in rows["reward"].split("│")[2:4]] == ["0.3", "0.4075"]
    assert [word.strip() for word in rows["tokens/trained"].split("│")[2:4]] == ["12345", "24690"]
    assert [word.strip() for word in rows["entropy"].split("│")[2:4]] == ["0.1234562", "0.1234563"]


def test_the_base_model_stands_beside_what_was_made_of_it(run, capsys):
    file = Path(run) / "metrics.jsonl"
    row = {"evaluation": 0, "version": "policy@0", "held_out/reward": 0.5, "held_out/success": 0.25}
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    assert main(["versions", "list", "--folder", run]) == 0
    table = capsys.readouterr().out
    base = next(line for line in table.splitlines() if line.startswith("│ base"))
    assert [word.strip() for word in base.split("│")[4:6]] == ["0.5", "0.25"]


def test_a_folder_without_versions_says_so(run, capsys):
    for number in REWARDS:
        (Path(run) / "versions" / f"policy@{number}" / "state.json").unlink()
        (Path(run) / "versions" / f"policy@{number}").rmdir()
    assert main(["versions", "list", "--folder", run]) == 0
    assert "no version was made yet: policy@0, the base model, answers" in capsys.readouterr().out


def test_pruned_versions_are_named(run, capsys):
    assert main(["versions", "prune", "--keep", "1", "--folder", run]) == 0
    said = capsys.readouterr().out
    assert "removed 1 of 2 versions (@1), " in said
