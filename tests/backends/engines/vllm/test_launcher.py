"""The launcher with stand-ins for vLLM: small programs that get ready, die, hold on, or leave children behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from art_backends.errors import ConfigError
from art_backends.server import supervisor
from art_backends.server.supervisor import Supervisor

LAUNCHER = [sys.executable, "-m", "art_backends.engines.vllm.launcher"]
SERVER = textwrap.dedent(
    """
    import http.server, json, os, pathlib, signal, socketserver, subprocess, sys

    here = pathlib.Path(sys.argv[1])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (here / "pids.json").write_text(json.dumps([os.getpid(), child.pid]))
    (here / "variables.json").write_text(json.dumps(dict(os.environ)))
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


    class Health(http.server.BaseHTTPRequestHandler):
        asked = 0

        def address_string(self):
            return "somebody"

        def do_GET(self):
            Health.asked += 1
            self.send_response(200 if Health.asked > 2 else 503)
            self.end_headers()


    class Server(socketserver.UnixStreamServer):
        def get_request(self):
            return super().get_request()[0], ("somebody", 0)


    print("vLLM says hello", flush=True)
    Server(sys.argv[sys.argv.index("--uds") + 1], Health).serve_forever()
    """
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return file


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def launch(started, tmp_path: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*LAUNCHER, *options, "--", *words, "--uds", str(tmp_path / "s.sock")]
    environment = {**os.environ, "SECRET_OF_OURS": "1"}
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    started.append(process)
    return process


def said(process: subprocess.Popen[str]) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def pids(tmp_path: Path) -> list[int]:
    return json.loads((tmp_path / "pids.json").read_text())


def gone(pid: int, seconds: float = 30) -> bool:
    """Whether a process ends within a time; it is nobody's child here."""
    import select

    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_ready_then_all_ends_with_standard_input(started, tmp_path, program):
    process = launch(
        started,
        tmp_path,
        sys.executable,
        str(program),
        str(tmp_path),
        options=("--set=A=b=c", "--unset=SECRET_OF_OURS"),
    )
    ready = said(process)
    assert ready["ready"] is True
    assert ready["engine_pid"] == pids(tmp_path)[0]
    variables = json.loads((tmp_path / "variables.json").read_text())
    assert variables["A"] == "b=c"
    assert "SECRET_OF_OURS" not in variables
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
    assert all(gone(pid) for pid in pids(tmp_path)), "what it had started, too"
    assert "vLLM says hello" in (tmp_path / "log").read_text()


def test_told_to_end(started, tmp_path, program, monkeypatch):
    process = launch(started, tmp_path, sys.executable, str(program), str(tmp_path))
    assert said(process)["ready"] is True
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert all(gone(pid) for pid in pids(tmp_path))


@pytest.mark.slow
def test_one_that_does_not_listen_is_killed(started, tmp_path, program):
    process = launch(started, tmp_path, sys.executable, str(program), str(tmp_path), "deaf")
    assert said(process)["ready"] is True
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_killed_launcher_leaves_no_vllm_behind(started, tmp_path, program):
    process = launch(started, tmp_path, sys.executable, str(program), str(tmp_path), "deaf")
    assert said(process)["ready"] is True
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_killed_server_leaves_no_vllm_behind(started, tmp_path, program):
    """The server of the test is a process that holds the launcher's standard input and is killed."""
    words = [*LAUNCHER, "--", sys.executable, str(program), str(tmp_path), "--uds", str(tmp_path / "s.sock")]
    code = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); p.wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    started.append(process)
    assert said(process)["ready"] is True
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in pids(tmp_path))


def test_one_that_dies_takes_the_launcher_along(started, tmp_path, program):
    process = launch(started, tmp_path, sys.executable, str(program), str(tmp_path))
    assert said(process)["ready"] is True
    server, child = pids(tmp_path)
    os.kill(server, signal.SIGKILL)
    assert process.wait(30) != 0
    assert gone(child), "an engine without its server holds the memory that the next one needs"


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("sys.exit('error: unrecognized arguments: --foo')", "ConfigError", "vllm_args: this vLLM has no option --foo"),
        ("sys.exit('ValueError: No available memory for the cache blocks.')", "ServerError", "not enough memory"),
        ("import no_such_thing", "ServerError", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("os.kill(os.getpid(), 9)", "ServerError", "(signal 9): it was killed, perhaps for want of memory"),
    ],
)
def test_one_that_does_not_start_says_why(started, tmp_path, code, kind, words):
    process = launch(started, tmp_path, sys.executable, "-c", f"import os, sys\n{code}")
    reply = said(process)
    assert (reply["ready"], reply["type"]) == (False, kind)
    assert words in reply["message"]
    assert process.wait(30) == 3


def test_a_program_that_is_not_there(started, tmp_path):
    reply = said(launch(started, tmp_path, "/no/python"))
    assert reply["message"] == "vLLM could not be started: /no/python: No such file or directory"


def test_without_a_command(tmp_path):
    done = subprocess.run([*LAUNCHER, "--uds", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2


async def test_under_the_supervisor(tmp_path, program, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    back = asyncio.Event()

    async def on_restart() -> None:
        back.set()

    command = [*LAUNCHER, "--", sys.executable, str(program), str(tmp_path)]
    child = Supervisor(command, log_file=tmp_path / "vllm.log", name="vLLM", on_restart=on_restart, start_deadline=60)
    await child.start()
    try:
        first = pids(tmp_path)
        os.kill(first[0], signal.SIGKILL)
        async with asyncio.timeout(60):
            await back.wait()
            await child.wait_ready(30)
        second = pids(tmp_path)
        assert second[0] == child.ready["engine_pid"] != first[0]
        back.clear()
        await child.replace()
        async with asyncio.timeout(60):
            await back.wait()
        assert all(gone(pid) for pid in second)
    finally:
        await child.stop()
    assert all(gone(pid) for pid in pids(tmp_path))


async def test_the_supervisor_hears_why(tmp_path):
    code = "import sys; sys.exit('error: unrecognized arguments: --foo')"
    child = Supervisor([*LAUNCHER, "--", sys.executable, "-c", code], log_file=tmp_path / "vllm.log", name="vLLM")
    try:
        with pytest.raises(ConfigError, match="vllm_args: this vLLM has no option --foo"):
            await child.start()
    finally:
        await child.stop()
