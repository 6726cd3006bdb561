"""Who holds a run folder: told by the lock alone, and without a trace in the folder."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from art_backends.errors import ConfigError, FolderInUseError
from art_backends.server import folder as folder_module
from art_backends.server.folder import RunFolder
from art_backends.server.holder import decode, held_by


def test_nobody_holds_what_is_not_there_and_looking_leaves_no_trace(tmp_path: Path) -> None:
    assert held_by(tmp_path) is None
    assert held_by(tmp_path / "none") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert held_by(tmp_path / "file") is None


def test_a_server_from_its_start_to_its_end(tmp_path: Path) -> None:
    run = RunFolder.acquire(tmp_path)
    held = held_by(tmp_path)
    assert held is not None
    assert (held.pid, held.url, held.starting) == (os.getpid(), "", True)
    with pytest.raises(
        FolderInUseError,
        match=rf"in use by process {os.getpid()}, a server that is starting: wait for it and use it, stop it \(kill \d",
    ):
        RunFolder.acquire(tmp_path)
    run.announce("http://127.0.0.1:1234")
    held = held_by(tmp_path)
    assert held is not None
    assert (held.pid, held.url, held.starting) == (os.getpid(), "http://127.0.0.1:1234", False)
    run.release()
    assert held_by(tmp_path) is None


def test_a_command_that_is_no_server(tmp_path: Path) -> None:
    run = RunFolder.acquire(tmp_path, "versions")
    held = held_by(tmp_path)
    assert held is not None
    assert (held.url, held.starting) == ("", False)
    with pytest.raises(
        FolderInUseError, match=rf"by process {os.getpid()}, art-backends versions: try again when it has ended"
    ):
        RunFolder.acquire(tmp_path)
    run.release()


def test_what_a_killed_process_left_does_not_count(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from art_backends.server.folder import RunFolder\n"
        "kept = RunFolder.acquire(Path(sys.argv[1])); kept.announce('http://127.0.0.1:9'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert "127.0.0.1:9" in (tmp_path / "lock").read_text()
    assert held_by(tmp_path) is None
    run = RunFolder.acquire(tmp_path)
    assert not (tmp_path / "server.json").exists(), "the address of the killed one would be taken for this one's"
    run.release()


def test_one_that_only_looks_keeps_nobody_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder.acquire(tmp_path).release()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(folder_module.time, "sleep", lambda _: os.close(looking))  # it looks away meanwhile
    RunFolder.acquire(tmp_path).release()


def test_a_lock_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("lock")
    with pytest.raises(ConfigError, match=r"lock: cannot be read"):
        held_by(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"12"])
def test_a_holder_that_has_not_said_all_yet(content: bytes) -> None:
    held = decode(content)
    assert held.starting
    assert held.pid == (12 if content == b"12" else None)
    assert ("kill" in str(held.refusal(Path("run")))) == (content == b"12")
