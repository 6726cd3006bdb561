"""``art-backends``: what it understands, what it says when something is wrong, and what it shows of a server."""

import asyncio
import contextlib
import json
import sys
import typing
from pathlib import Path

import pytest
from art_backends import cli
from art_backends.cli import main
from art_backends.client import Client
from art_backends.config import TrainConfig
from art_backends.server.folder import PolicyFile
from art_backends.server.run import serve
from art_backends.server.supervisor import Supervisor

FAKE_WORKER = Path(__file__).parent / "server" / "fake_worker.py"


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
        (["status", "--folder", "FOLDER"], "no server runs on FOLDER; start one with: art-backends serve --folder"),
        (["rollouts", "list", "--folder", "FOLDER"], "no server runs on FOLDER"),
        (["rollouts", "show", "x", "--folder", "FOLDER"], "no server runs on FOLDER"),
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


def test_a_server_that_was_killed_is_said_to_be_gone(tmp_path, capsys):
    (tmp_path / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": 1}))
    (tmp_path / "admin.token").write_text("secret")
    assert main(["status", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("art-backends: ")
    assert "127.0.0.1:9" in said
    assert "secret" not in said


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
        (["rollouts", "show"], " rollouts show", "the following arguments are required: id"),
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


def test_what_serving_goes_by_is_an_option_of_serve(capsys):
    text = " ".join(cli._parser().parse_args(["serve"]).__dict__)
    assert "rank" not in text  # what is not given does not count as given
    for name in cli.SERVED:
        options = cli._parser().parse_args(["serve", *option(name)])
        assert name in vars(options)
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert {name for name in TrainConfig.model_fields if f"--{name.replace('_', '-')} " in said} == cli.SERVED


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


@pytest.fixture
async def folder(tmp_path):
    """The folder of a running server with one rollout that was trained; a name with markup in it."""
    run, faults = tmp_path / "run", tmp_path / "faults"
    faults.mkdir()
    config = TrainConfig(folder=run, base_model="fake")
    command = [sys.executable, str(FAKE_WORKER), "--versions", str(run / "versions"), "--faults", str(faults)]
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve(
            config,
            on_ready=ready.set_result,
            stop=stop,
            make_worker=lambda *_: Supervisor(command, log_file=tmp_path / "worker.log"),
            drain_seconds=5,
        )
    )
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    async with Client(ready.result(), (run / "admin.token").read_text().strip()) as client:
        rollouts = []
        for sample in range(2):
            rollout = await client.open_rollout(policy="policy", step=1, group="g", sample=sample, scenario_id="[red]s")
            await chat(rollout.base_url, rollout.token)
            await client.close_rollout(rollout.id, reward=float(sample), metrics={"success": float(sample)})
            rollouts.append(rollout.id)
        await client.train_step(1, config, rollout_ids=rollouts)
    try:
        yield run, rollouts
    finally:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def chat(base_url: str, token: str) -> None:
    import httpx

    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "where [bold]is[/bold] 4417?"}]}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        reply = await http.post(f"{base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {token}"})
        assert reply.status_code == 200, reply.text


async def test_what_a_running_server_shows(folder, capsys):
    run, (first, second) = folder

    async def show(*arguments: str) -> str:
        """The command as a user runs it, in a thread because it has an event loop of its own."""
        capsys.readouterr()
        code = await asyncio.to_thread(main, [*arguments, "--folder", str(run)])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    status = await show("status")
    assert "policy@1" in status
    assert "worker" in status
    assert json.loads(await show("status", "--json"))["policies"][0]["version"] == 1

    listed = await show("rollouts", "list", "--step", "1")
    assert first in listed
    assert second in listed
    assert "[red]s" in listed  # text of the app is shown, not read as markup
    assert first not in await show("rollouts", "list", "--step", "2")
    assert {row["id"] for row in json.loads(await show("rollouts", "list", "--json"))} == {first, second}

    shown = await show("rollouts", "show", first)
    assert "where [bold]is[/bold] 4417?" in shown
    assert "[red]s" in shown
    assert "3 tokens trained with advantage +0.500" in shown
    assert "tokens sampled, stop" in shown
    as_json = json.loads(await show("rollouts", "show", first, "--json"))
    assert as_json["calls"][0]["choices"][0]["token_ids"]
    assert as_json["training"][0]["trained"] == 3

    assert await asyncio.to_thread(main, ["rollouts", "show", "no-such-id", "--folder", str(run)]) == 2
    assert "no-such-id" in capsys.readouterr().err
