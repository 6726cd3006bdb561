from __future__ import annotations

import json
import subprocess
import sys

import pytest
from art_backends.training import versions


def make_version(folder, number, policy="policy", **changes):
    state = {"format": 1, "policy": policy, "version": number, "rollout_ids": [], **changes}
    with versions.new_version(folder, policy, number) as place:
        versions.write_file(place / versions.STATE, versions.encode_json(state))


def test_versions_are_listed_in_order_of_their_number(tmp_path):
    for number in (2, 10, 1):
        make_version(tmp_path, number)
    make_version(tmp_path, 3, policy="policy.b")
    (tmp_path / "policy@x").mkdir()
    (tmp_path / "policy@0").mkdir()
    (tmp_path / "policy@4").write_text("a file")
    assert [info.version for info in versions.list_versions(tmp_path, "policy")] == [1, 2, 10]
    assert [info.path.name for info in versions.list_versions(tmp_path, "policy.b")] == ["policy.b@3"]
    assert versions.list_versions(tmp_path / "nowhere", "policy") == []


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 2, "policy": "policy", "version": 2, "rollout_ids": []}',
        b'{"format": 1, "policy": "other", "version": 2, "rollout_ids": []}',
        b'{"format": 1, "policy": "policy", "version": 3, "rollout_ids": []}',
        b'{"format": 1, "policy": "policy", "version": 2}',
        b"\xff\xfe",
    ],
)
def test_an_unreadable_version_is_left_out_and_can_be_made_again(tmp_path, state, caplog):
    make_version(tmp_path, 1)
    (tmp_path / "policy@2").mkdir()
    (tmp_path / "policy@2" / versions.STATE).write_bytes(state)
    assert [info.version for info in versions.list_versions(tmp_path, "policy")] == [1]
    assert "policy@2: version left out" in caplog.text
    make_version(tmp_path, 2)
    assert [info.version for info in versions.list_versions(tmp_path, "policy")] == [1, 2]
    assert versions.sweep(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy@1", "policy@2"]


def test_a_valid_version_is_never_replaced(tmp_path):
    make_version(tmp_path, 1, mark="first")
    with pytest.raises(FileExistsError, match="policy@1 exists already"):
        make_version(tmp_path, 1, mark="second")
    assert versions.list_versions(tmp_path, "policy")[0].state["mark"] == "first"


def test_sweeping_removes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    make_version(tmp_path, 1)
    (tmp_path / ".tmp-policy@2-dead").mkdir()
    (tmp_path / ".tmp-policy@2-dead" / "half").write_bytes(b"x")
    (tmp_path / ".tmp-file").write_text("x")
    (tmp_path / "policy.guard.json").write_text("{}")
    assert versions.sweep(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.guard.json", "policy@1"]


def test_a_version_whose_writing_fails_leaves_nothing(tmp_path):
    def fails():
        with versions.new_version(tmp_path, "policy", 1) as place:
            (place / "half").write_bytes(b"x")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fails()
    assert list(tmp_path.iterdir()) == []


def test_json_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "small.json"
    versions.replace_json(path, {"b": 1, "a": 2})
    assert path.read_bytes() == versions.encode_json({"a": 2, "b": 1})

    def full(_path, _data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(versions, "write_file", full)
    with pytest.raises(OSError, match="No space"):
        versions.replace_json(path, {})
    assert json.loads(path.read_bytes()) == {"a": 2, "b": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["small.json"]


def test_the_light_modules_import_no_torch_and_versions_no_numpy():
    code = (
        "import sys; import art_backends.training.versions, art_backends.training.requests, "
        "art_backends.training.guard; assert 'numpy' not in sys.modules; "
        "import art_backends.training.sequences, art_backends.training.advantages, art_backends.training.packing, "
        "art_backends.training.report; assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
