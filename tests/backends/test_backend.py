"""The real server process (with a worker that computes nothing), and processes that are no server at all."""

import asyncio
import fcntl
import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from art_backends import backend as module
from art_backends.backend import LocalBackend, LocalServer
from art_backends.config import TrainConfig
from art_backends.errors import ArtError, ConfigError, FolderInUseError, ModelNotFoundError, ServerError

FAKE_WORKER = Path(__file__).parent / "server" / "fake_worker.py"

# Stands where Python stands in `python -m art_backends.cli serve …`: the real command, with another worker.
REAL_SERVER = f"""
import sys
from art_backends import cli
from art_backends.server import hosting
from art_backends.server.supervisor import Supervisor

def worker(config, folder):
    command = [sys.executable, {str(FAKE_WORKER)!r}, "--versions", str(folder.versions), "--faults", str(folder.path)]
    return Supervisor(command, log_file=folder.path / "logs" / "worker.log")

hosting.worker = worker
assert sys.argv[1:4] == ["-m", "art_backends.cli", "serve"], sys.argv
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return TrainConfig(folder=tmp_path / "run", base_model="fake", name="mine", models=["gpt-4o-mini"])


@pytest.fixture
def python(tmp_path):
    """Make an executable that is started in Python's place."""

    def make(code: str) -> str:
        file = tmp_path / "python"
        file.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
        file.chmod(0o700)
        return str(file)

    return make


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_server_for_the_length_of_a_block(config, python):
    async with LocalServer(config, python=python(REAL_SERVER)) as backend:
        status = await backend.client.status()
        assert [(policy["name"], policy["base_model"]) for policy in status["policies"]] == [("mine", "fake")]
        assert status["policies"][0]["models"] == ["gpt-4o-mini"]
        assert backend.url.startswith("http://127.0.0.1:")
        server = json.loads((config.folder / "server.json").read_text())
        assert server["url"] == backend.url
        worker = status["children"][0]["pid"]
        assert list((config.folder / "logs").glob("*.json")) == []  # the settings' file is gone again
    assert gone(server["pid"])
    assert gone(worker)
    assert not (config.folder / "server.json").exists()


async def test_two_on_one_folder_and_again_when_the_first_is_done(config, python):
    own = python(REAL_SERVER)
    async with LocalServer(config, python=own) as first:
        with pytest.raises(FolderInUseError, match=f"in use by process .* at {first.url}"):
            async with LocalServer(config, python=own):
                pytest.fail("the folder is in use")
        assert await first.client.status()  # the first is left alone
    async with LocalServer(config, python=own) as again:
        assert await again.client.status()


async def test_settings_travel_in_a_private_file(config, python, tmp_path):
    code = f"""
    import os, sys
    file = sys.argv[sys.argv.index("--settings") + 1]
    with open({str(tmp_path / "seen")!r}, "w") as out:
        out.write(oct(os.stat(file).st_mode & 0o777) + open(file).read())
    """
    with pytest.raises(ServerError):
        async with LocalServer(config, python=python(code)):
            pass
    seen = (tmp_path / "seen").read_text()
    assert seen.startswith(oct(stat.S_IRUSR | stat.S_IWUSR))
    assert TrainConfig.model_validate_json(seen.removeprefix("0o600")) == config
    assert list((config.folder / "logs").glob("*.json")) == []


async def test_what_the_server_refuses_is_the_error_here(config, python):
    said = {"ready": False, "type": "ModelNotFoundError", "message": "base model 'x' was not found"}
    with pytest.raises(ModelNotFoundError, match="base model 'x' was not found"):
        async with LocalServer(config, python=python(f"print({json.dumps(said)!r})")):
            pass


@pytest.mark.parametrize("code", ["", "print('hello')", "print('[]')"])
async def test_a_server_that_ends_shows_its_log(config, python, code):
    own = python(f"import sys; sys.stderr.write('the reason\\n'); sys.stderr.flush()\n{code}")
    with pytest.raises(ServerError, match=r"ended before it was ready; end of .*server.log:\n(.|\n)*the reason"):
        async with LocalServer(config, python=own):
            pass


async def test_a_server_that_says_nothing_at_all(config, python):
    with pytest.raises(ServerError, match=r"server.log is empty"):
        async with LocalServer(config, python=python("")):
            pass


async def test_a_server_that_never_answers_is_ended(config, python, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "START_DEADLINE", 1.0)
    own = python(f"import os, sys; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); sys.stdin.read()")
    with pytest.raises(ServerError, match="did not start in 1 s"):
        async with LocalServer(config, python=own):
            pass
    assert not (tmp_path / "pid").exists() or gone(int((tmp_path / "pid").read_text()))


async def test_a_server_that_does_not_stop_is_killed_with_its_children(config, python, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "STOP_DEADLINE", 0.3)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"import threading; file = open({str(pipe)!r}, 'w'); print('open', flush=True); threading.Event().wait()"
    code = f"""
    import json, os, signal, subprocess, sys, threading
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
    child.stdout.readline()
    open({str(config.folder / "admin.token")!r}, "w").write("secret")
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    print(json.dumps({{"ready": True, "url": "http://127.0.0.1:1"}}), flush=True)
    threading.Event().wait()
    """
    child_ended = asyncio.create_task(asyncio.to_thread(pipe.read_text))  # a pipe ends with those who hold it
    async with LocalServer(config, python=python(code)):
        assert not child_ended.done()
    await asyncio.wait_for(child_ended, 20)
    assert gone(int((tmp_path / "pid").read_text()))


async def test_cancelled_while_it_starts_leaves_no_process(config, python, tmp_path):
    os.mkfifo(tmp_path / "began")
    own = python(f"import os, sys; open({str(tmp_path / 'began')!r}, 'w').write(str(os.getpid())); sys.stdin.read()")
    starting = asyncio.ensure_future(LocalServer(config, python=own).__aenter__())
    pid = int(await asyncio.to_thread((tmp_path / "began").read_text))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert gone(pid)
    assert list((config.folder / "logs").glob("*.json")) == []


def test_the_server_ends_when_its_starter_is_killed(config, python):
    script = f"""
import asyncio
from pathlib import Path
from art_backends.backend import LocalBackend, LocalServer
from art_backends.config import TrainConfig
async def main():
    async with LocalServer(TrainConfig(folder=Path({str(config.folder)!r})), python={python(REAL_SERVER)!r}):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout.readline() == "up\n"
        pid = json.loads((config.folder / "server.json").read_text())["pid"]
        starter.kill()
    with (config.folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the server is done
    assert gone(pid) or not (config.folder / "server.json").exists()


async def test_the_client_before_the_start(config):
    with pytest.raises(ServerError, match="async with LocalServer"):
        _ = LocalServer(config).client


async def test_a_folder_that_cannot_be_made(config):
    config.folder.write_text("a file")
    with pytest.raises(ServerError, match=r"run folder .* cannot be made: (Not a directory|File exists)"):
        async with LocalServer(config):
            pass


async def test_a_python_that_is_not_there(config, tmp_path):
    with pytest.raises(ArtError, match=r"the server could not be started: .*nothing"):
        async with LocalServer(config, python=str(tmp_path / "nothing")):
            pass


async def test_the_engine_of_a_backend_is_that_of_its_models(config, monkeypatch):
    started: list[TrainConfig] = []

    async def enter(self: LocalServer) -> LocalServer:
        started.append(self.config)
        return self

    monkeypatch.setattr(LocalServer, "__aenter__", enter)
    named = config.model_copy(update={"vllm_args": "--seed 3"})
    for given, wanted in (
        ({}, ("embedded", [], "--seed 3")),
        ({"engine": "vllm"}, ("vllm", [], "--seed 3")),
        ({"engine": "vllm", "vllm_args": ""}, ("vllm", [], "")),
        ({"engine_url": "http://a:1,http://b:2", "vllm_args": ""}, ("vllm", ["http://a:1", "http://b:2"], "")),
    ):
        await LocalBackend(path=".art", **given).start(named)
        assert (started[-1].engine, started[-1].engine_url, started[-1].vllm_args) == wanted
    with pytest.raises(ConfigError, match="LocalBackend: engine must be 'embedded' or 'vllm', not 'x'"):
        LocalBackend(engine="x")  # type: ignore[arg-type]
