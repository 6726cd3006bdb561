"""``--folder`` of every command that looks at a run: what is wrong with it, and what to do, in one line."""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from art_backends import cli_folder
from art_backends.cli import main
from art_backends.config import TrainConfig
from art_backends.server.folder import PolicyFile, RunFolder

SERVER = [["status"], ["stacks"], ["rollouts", "list"], ["rollouts", "show", "abc"]]
VERSIONS = [["versions", "list"], ["versions", "compare", "1", "2"], ["versions", "pin", "1"], ["versions", "prune"]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def held(run: Path) -> Iterator[RunFolder]:
    folder = RunFolder.acquire(run)
    yield folder
    folder.release()


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    PolicyFile.create(folder, TrainConfig(folder=folder), "digest")
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("art-backends: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize("command", SERVER + VERSIONS)
def test_a_folder_that_is_not_there_is_told_with_those_that_are(command, tmp_path, capsys):
    message = said(capsys, *command, "--folder", "nowhere")
    assert "there is no run folder nowhere, and there is none below .art/" in message
    for number, name in enumerate(("old", "games/slider")):
        made = make_run(Path(".art") / name)
        os.utime(made / "policy.json", (number, number))
    message = said(capsys, *command, "--folder", "nowhere")
    assert "there is no run folder nowhere; there are: .art/games/slider, .art/old (choose with --folder)" in message
    assert "serve" not in message
    assert not Path("nowhere").exists()


def test_of_many_run_folders_a_few_are_named(capsys):
    for number in range(7):
        made = make_run(Path(f".art/r{number}"))
        os.utime(made / "policy.json", (number, number))
    assert "there are: .art/r6, .art/r5, .art/r4, .art/r3, .art/r2 and 2 more (" in said(capsys, "status")


@pytest.mark.parametrize("command", SERVER + VERSIONS)
def test_a_folder_that_is_no_run(command, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    assert "docs is no run folder: it has no policy.json" in said(capsys, *command, "--folder", "docs")
    assert list((tmp_path / "docs").iterdir()) == []


@pytest.mark.parametrize("command", [["status"], ["versions", "list"]])
def test_a_run_that_began_just_now_or_ended_before_it_was_one(command, tmp_path, capsys):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    message = said(capsys, *command, "--folder", "run")
    assert "run is no run folder yet: it has no policy.json; if a run was started on it just now, try again" in message
    assert "else run/logs says why it ended" in message


@pytest.mark.parametrize("command", SERVER)
def test_a_run_that_nobody_serves(command, run, capsys):
    message = said(capsys, *command, "--folder", "run")
    assert "no server runs on run; start one with: art-backends serve --folder run\n" in message


@pytest.mark.parametrize("command", SERVER)
@pytest.mark.parametrize("new", [True, False])
def test_a_server_that_is_starting(command, new, run, held, capsys):
    if new:
        (run / "policy.json").unlink()  # as at the first start of all, until the model is loaded
    message = said(capsys, *command, "--folder", "run")
    assert f"a server is starting on run (process {os.getpid()} holds it, the model is being loaded)" in message
    assert "try again in a moment; run/logs has" in message


@pytest.mark.parametrize("command", VERSIONS)
@pytest.mark.parametrize("new", [True, False])
def test_versions_while_a_server_is_starting(command, new, run, held, capsys):
    if new:
        (run / "policy.json").unlink()
    message = said(capsys, *command, "--folder", "run")
    assert f"{run} is in use by process {os.getpid()}, a server that is starting: wait for it" in message
    assert "art-backends status --folder run shows which versions" in message


def test_another_command_that_works_on_the_folder(run, capsys):
    folder = RunFolder.acquire(run, "versions")
    message = said(capsys, "status", "--folder", "run")
    assert f"no server runs on run, and process {os.getpid()} (art-backends versions) works on it" in message
    message = said(capsys, "versions", "list", "--folder", "run")
    assert f"in use by process {os.getpid()}, art-backends versions: try again when it has ended" in message
    folder.release()


@pytest.mark.parametrize("command", SERVER)
def test_a_server_that_was_killed_is_said_to_be_gone_and_its_process_left_alone(command, run, monkeypatch, capsys):
    """By now its process number may be that of another program."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    (run / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": 1}))
    (run / "admin.token").write_text("secret")
    message = said(capsys, *command, "--folder", "run")
    assert "no server runs on run: the last one, process 1 at http://127.0.0.1:9, is gone; start one with" in message
    assert "secret" not in message
    assert killed == []


def test_a_server_without_its_token(held, run, capsys):
    held.announce("http://127.0.0.1:9")
    assert "run/admin.token cannot be read: No such file" in said(capsys, "status", "--folder", "run")


def test_every_command_takes_the_same_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    parser = argparse.ArgumentParser()
    cli_folder.add_folder(parser)
    assert parser.parse_args([]).folder == Path(".art/run") == TrainConfig().folder
    assert parser.parse_args(["--folder=~/run"]).folder == Path("/home/somebody/run")
    with pytest.raises(SystemExit):
        parser.parse_args(["--json"])
    cli_folder.add_folder(parser := argparse.ArgumentParser(), as_json=True)
    assert parser.parse_args(["--json"]).json
