"""The run folder: one server at a time, private tokens, settings that must fit."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from art_backends.config import TrainConfig
from art_backends.errors import ConfigError, FolderInUseError
from art_backends.server.folder import PolicyFile, RunFolder


def test_one_server_per_folder(tmp_path: Path) -> None:
    first = RunFolder.acquire(tmp_path / "run")
    first.announce("http://127.0.0.1:1234")
    with pytest.raises(FolderInUseError, match=rf"in use by process {os.getpid()} at http://127.0.0.1:1234: stop it"):
        RunFolder.acquire(tmp_path / "run")
    assert json.loads((tmp_path / "run/server.json").read_text()) == {
        "url": "http://127.0.0.1:1234",
        "pid": os.getpid(),
    }
    first.release()
    first.release()
    assert not (tmp_path / "run/server.json").exists()
    RunFolder.acquire(tmp_path / "run").release()


def test_the_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from art_backends.server.folder import RunFolder\n"
        "kept = RunFolder.acquire(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    RunFolder.acquire(tmp_path).release()


def test_tokens_are_private_and_stay(tmp_path: Path) -> None:
    folder = RunFolder.acquire(tmp_path)
    token = folder.token("admin")
    assert len(token) >= 43
    assert folder.token("admin") == token
    assert folder.token("agent") != token
    file = tmp_path / "admin.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    folder.token("admin")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("")
    assert folder.token("admin") not in ("", token)
    assert stat.S_IMODE(folder.store.stat().st_mode) == 0o600
    folder.release()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"folder: .*file/run cannot be used as run folder"):
        RunFolder.acquire(tmp_path / "file" / "run")


def test_settings_must_fit(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("one")
    config = TrainConfig(chat_template=template)
    assert PolicyFile.read(tmp_path) is None
    PolicyFile.create(tmp_path, config, "d" * 64)
    kept = PolicyFile.read(tmp_path)
    assert kept is not None
    kept.check(config, "d" * 64)
    kept.check(config.model_copy(update={"learning_rate": 1.0, "steps": 3, "base_model": "same weights, other name"}))
    cases = {
        r"rank: .* was made with 8, now asked for 16; use the same value": {"rank": 16},
        r"alpha: .* 16.0, now asked for 2.0": {"alpha": 2.0},
        r"target_modules: .*'q_proj'.* now asked for \['q_proj'\]": {"target_modules": ["q_proj"]},
        r"name: .* 'policy', now asked for 'other'": {"name": "other"},
        r"chat_template: ": {"chat_template": None},
    }
    for said, change in cases.items():
        with pytest.raises(ConfigError, match=said):
            kept.check(config.model_copy(update=change))
    with pytest.raises(
        ConfigError, match=r"base_model: .*digest dddddddddddd…\), now asked for .*digest eeeeeeeeeeee…"
    ):
        kept.check(config, "e" * 64)
    template.write_text("two")
    with pytest.raises(ConfigError, match="chat_template: "):
        kept.check(config)


def test_a_damaged_policy_file(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"rank": 8')
    with pytest.raises(ConfigError, match=r"policy.json: cannot be read"):
        PolicyFile.read(tmp_path)
