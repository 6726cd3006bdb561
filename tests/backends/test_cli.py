"""``art-backends``: what it understands, what it says when something is wrong, and what it shows of a server."""

import json
import os
import re
import signal
import typing

import pytest
from art_backends import cli, cli_train
from art_backends.cli import main
from art_backends.config import FILE_ONLY, TrainConfig
from art_backends.engines.vllm import environment
from art_backends.server.folder import PolicyFile


@pytest.fixture
def served(monkeypatch) -> list[TrainConfig]:
    """What ``serve`` would be started with; nothing is started."""
    taken: list[TrainConfig] = []

    async def serve(config: TrainConfig, **options) -> None:
        taken.append(config)
        options["on_ready"]("http://127.0.0.1:1234")

    monkeypatch.setattr(cli, "serve", serve)
    return taken


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")


# serving


def test_serve_says_how_to_use_it(served, tmp_path, capsys):
    assert main(["serve", "--folder", str(tmp_path), "--rank", "3"]) == 0
    said = capsys.readouterr().out
    assert "http://127.0.0.1:1234/v1" in said
    assert f"OPENAI_BASE_URL=http://127.0.0.1:1234/v1 OPENAI_API_KEY=$(cat {tmp_path}/agent.token)" in said
    assert served == [TrainConfig(folder=tmp_path, rank=3)]


def test_the_announcement_is_one_line_of_json(served, tmp_path, capsys):
    settings = tmp_path / "settings.json"
    settings.write_text(TrainConfig(folder=tmp_path, rank=4).model_dump_json())
    assert main(["serve", "--settings", str(settings), "--announce"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ready": True, "url": "http://127.0.0.1:1234"}
    assert served == [TrainConfig(folder=tmp_path, rank=4)]


def test_an_existing_folder_is_served_with_its_own_settings(served, tmp_path):
    made = TrainConfig(
        folder=tmp_path, name="mine", rank=4, alpha=8.0, base_model="org/model", target_modules=["q_proj"]
    )
    PolicyFile.create(tmp_path, made, "digest")
    assert main(["serve", "--folder", str(tmp_path)]) == 0
    assert served == [made]


def test_the_command_line_and_a_file_win_over_the_folders_settings(served, tmp_path):
    """Whether they fit is for the server to say; they must not be dropped."""
    PolicyFile.create(tmp_path, TrainConfig(folder=tmp_path, rank=4, alpha=8.0), "digest")
    file = tmp_path / "art.toml"
    file.write_text("alpha = 4.0\n")
    assert main(["serve", "--folder", str(tmp_path), "--config", str(file), "--rank", "2"]) == 0
    assert (served[0].rank, served[0].alpha) == (2, 4.0)


def test_defaults_given_in_so_many_words_win_too(served, tmp_path):
    PolicyFile.create(tmp_path, TrainConfig(folder=tmp_path, rank=4), "digest")
    assert main(["serve", "--folder", str(tmp_path), "--rank", "8"]) == 0
    assert served[0].rank == 8


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], {"engine": "vllm", "engine_url": ["http://a:1"]}),
        (["--engine", "embedded"], {"engine": "embedded", "engine_url": []}),
        (["--engine", "vllm"], {"engine": "vllm", "engine_url": []}),
        (["--engine-url", "http://b:2"], {"engine": "vllm", "engine_url": ["http://b:2"]}),
    ],
)
def test_a_folder_is_served_by_its_engine_unless_another_is_named(served, tmp_path, words, wanted):
    PolicyFile.create(tmp_path, TrainConfig(folder=tmp_path, engine_url=["http://a:1"]), "digest")
    assert main(["serve", "--folder", str(tmp_path), *words]) == 0
    assert {name: getattr(served[0], name) for name in wanted} == wanted


def test_a_vllm_that_was_named_once_is_started_again(served, tmp_path):
    kept = {"vllm": "/opt/vllm/bin/python", "vllm_args": "--max-num-seqs 8"}
    PolicyFile.create(tmp_path, TrainConfig(folder=tmp_path, engine="vllm", **kept), "digest")
    assert main(["serve", "--folder", str(tmp_path), "--engine", "vllm", "--vllm-args=--seed 3"]) == 0
    assert (served[0].vllm, served[0].vllm_args) == ("/opt/vllm/bin/python", "--seed 3")
    assert main(["serve", "--folder", str(tmp_path), "--engine", "embedded"]) == 0
    assert (served[1].vllm, served[1].vllm_args) == ("", "")


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_a_folder_whose_settings_cannot_be_read(served, tmp_path, capsys, content):
    (tmp_path / "policy.json").write_text(content)
    assert main(["serve", "--folder", str(tmp_path)]) == 2
    assert f"art-backends: {tmp_path}/policy.json: cannot be read" in capsys.readouterr().err
    assert served == []


# what is wrong is one line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--rank", "many"], "art-backends: --rank must be a whole number, not 'many'"),
        (["serve", "--config", "nothing.toml"], "nothing.toml: cannot be read"),
        (["serve", "--host", "0.0.0.0", "--folder", "FOLDER"], "--allow-remote"),
        (["serve", "--settings", "nothing.json"], "nothing.json: cannot be read"),
        (["status", "--folder", "FOLDER"], "there is no run folder FOLDER"),
    ],
)
def test_errors_are_one_clear_line_and_code_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "run")
    assert main([folder if word == "FOLDER" else word for word in arguments]) == 2
    said = capsys.readouterr()
    assert words.replace("FOLDER", folder) in said.err
    assert said.err.startswith("art-backends: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_refused_start_is_announced(tmp_path, capsys):
    settings = tmp_path / "settings.json"
    settings.write_text(TrainConfig(folder=tmp_path).model_dump_json())
    assert main(["serve", "--settings", str(settings), "--host", "0.0.0.0", "--announce"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["ready"] is False
    assert said["type"] == "ConfigError"


def test_ctrl_c_is_130(monkeypatch, tmp_path):
    async def serve(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "serve", serve)
    assert main(["serve", "--folder", str(tmp_path)]) == 130


@pytest.mark.parametrize(
    ("arguments", "command", "words"),
    [
        ([], "", "the following arguments are required: COMMAND"),
        (["serv"], "", "did you mean serve?"),
        (["rollouts"], " rollouts", "the following arguments are required: ACTION"),
        (["rollouts", "show"], " rollouts show", "the following arguments are required: ID"),
        (["serve", "--port", "high"], " serve", "argument --port: invalid int value: 'high'"),
        (["serve", "--foldr", "x"], " serve", "unrecognized arguments: --foldr; did you mean --folder?"),
        (["versions", "list", "--jsn"], " versions list", "unrecognized arguments: --jsn; did you mean --json?"),
        (["sft", "x.jsonl", "--steps", "3"], " sft", "--steps has no effect on this command: leave it out"),
        (
            ["serve", "--steps", "3", "--seed=1"],
            " serve",
            "--seed have no effect on this command: leave them out",
        ),
    ],
)
def test_usage_errors(arguments, command, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"art-backends{command}: ")
    assert first.endswith(words)
    assert second == f"see `art-backends{command} --help`"


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (["serve"], cli.SERVED),
        (["sft", "x.jsonl"], cli.IMITATED),
        (["train", "--command", "x", "--scenarios", "x.jsonl"], cli_train.SETTINGS),
    ],
    ids=["serve", "sft", "train"],
)
def test_what_a_command_goes_by_is_an_option_of_it(command, settings, capsys):
    text = " ".join(cli._parser().parse_args(command).__dict__)
    assert "rank" not in text  # what is not given does not count as given
    settings = settings - FILE_ONLY
    for name in settings:
        options = cli._parser().parse_args([*command, *option(name)])
        assert name in vars(options)
    with pytest.raises(SystemExit):
        main([command[0], "--help"])
    said = capsys.readouterr().out
    assert {name for name in TrainConfig.model_fields if re.search(rf"--{name.replace('_', '-')}\s", said)} == settings


def test_a_file_for_training_serves_too(served, tmp_path):
    file = tmp_path / "art.toml"
    file.write_text(f"folder = '{tmp_path}'\nsteps = 3\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert served == [TrainConfig(folder=tmp_path, steps=3)]


def option(name: str) -> list[str]:
    kind = TrainConfig.model_fields[name].annotation
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return [flag]
    return [flag, typing.get_args(kind)[-1] if typing.get_origin(kind) is typing.Literal else "1"]


# what it shows, of a real server


async def test_status_of_a_running_server(trained, capsys):
    shown = await trained.says("status")
    assert "policy@1" in shown
    assert "worker" in shown
    assert "app calls answered since start, not kept │ 0 " in shown
    assert json.loads(await trained.says("status", "--json"))["policies"][0]["version"] == 1
    await trained.chat(f"{trained.url}/v1", (trained.run / "agent.token").read_text().strip())
    shown = await trained.says("status")
    assert "app calls answered since start, not kept │ 1 " in shown
    assert re.search(r"calls +│ 2 ", shown), "those of the two rollouts alone are kept"


async def test_a_second_server_is_refused_for_its_folder_before_its_port(trained):
    port = trained.url.rsplit(":", 1)[1]
    message = await trained.refuses("serve", "--port", port)
    assert f"{trained.run} is in use by process {os.getpid()} at {trained.url}: stop it" in message
    message = await trained.refuses("serve", "--port", port, folder=trained.run.with_name("other"))
    assert f"port {port} on 127.0.0.1 is taken by another program" in message
    assert "--port 0" in message


async def test_stacks_asks_the_server_and_its_worker(trained, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.append((pid, number)))
    shown = await trained.says("stacks")
    (child,) = (await trained.client.status())["children"]
    assert asked == [(os.getpid(), signal.SIGUSR1), (child["pid"], signal.SIGUSR1)]
    assert f"asked server (process {os.getpid()}) and worker ({child['pid']})" in shown


def test_a_folder_in_the_home_is_served_with_its_own_settings(served, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    PolicyFile.create(tmp_path / "run", TrainConfig(rank=4), "digest")
    assert main(["serve", "--folder=~/run"]) == 0
    assert served[0].rank == 4


# vLLM's environment


def test_vllm_is_installed_by_a_command(tmp_path, monkeypatch, capsys):
    given = []

    def install(package, torch, *, say):
        given.append((package, torch))
        say("installing [it]")

    monkeypatch.setenv("ART_INPLACE_CACHE", str(tmp_path))
    assert main(["vllm", "show"]) == 0
    assert f"{tmp_path / 'vllm'}: not made yet; make it with `art-backends vllm install`" in capsys.readouterr().out
    monkeypatch.setattr(environment, "install", install)
    assert main(["vllm", "install"]) == 0
    assert main(["vllm", "install", "--package", "vllm==0.33.0", "--torch", "torch --index-url u"]) == 0
    assert given == [(None, None), ("vllm==0.33.0", "torch --index-url u")]
    assert "installing [it]" in capsys.readouterr().out
