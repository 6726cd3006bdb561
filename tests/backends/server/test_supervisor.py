"""Real children: small scripts that get ready, refuse, die or hang as they are told."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from art_backends.errors import ConfigError, ModelNotFoundError, ServerError
from art_backends.server import supervisor
from art_backends.server.supervisor import Supervisor

READY = """
import json, os, sys
print(json.dumps({"ready": True, "pid": os.getpid(), "uds": sys.argv[-1]}), flush=True)
"""
UNTIL_EOF = "sys.stdin.buffer.read()\n"
CHILD = READY + UNTIL_EOF
HANG = """
import threading
def a_lock_that_nobody_gives_back():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
a_lock_that_nobody_gives_back()
"""
DEADLINE = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervisor, "STOP_GRACE", 5.0)


@pytest.fixture
def make(tmp_path):
    def begin(code: str, **more) -> Supervisor:
        command = [sys.executable, "-c", code]
        return Supervisor(command, log_file=tmp_path / "logs" / "worker.log", **{"start_deadline": DEADLINE, **more})

    return begin


async def restarted(child: Supervisor) -> asyncio.Event:
    """An event that is set when a new child is ready."""
    event = asyncio.Event()

    async def on_restart() -> None:
        event.set()

    child.on_restart = on_restart
    return event


async def given_up(child: Supervisor) -> None:
    """Raise the error with which the child is given up; TimeoutError if it is not."""
    assert child._watcher is not None
    async with asyncio.timeout(DEADLINE):
        await asyncio.shield(child._watcher)
    await child.wait_ready(0)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_ready_and_stopped(make):
    child = make(CHILD)
    await child.start()
    await child.wait_ready(1)
    pid = child.ready["pid"]
    assert child.ready["uds"] == str(child.socket)
    assert child.state() == {"name": "worker", "pid": pid, "state": "up", "restarts": 0}
    assert child.socket.parent.stat().st_mode & 0o777 == 0o700
    await child.stop()
    assert not alive(pid)
    assert not child.socket.parent.exists()
    assert child.state()["state"] == "stopped"


async def test_the_socket_path_is_short_in_a_deep_folder(tmp_path):
    child = Supervisor(["x"], log_file=tmp_path / ("deep" * 40) / "worker.log")
    assert len(str(child.socket).encode()) < 100
    await child.stop()


async def test_a_child_that_refuses_gives_its_own_error(make):
    said = '{"ready": false, "type": "ModelNotFoundError", "message": "no such model"}'
    child = make(f"import sys; print('{said}', flush=True); sys.exit(3)")
    with pytest.raises(ModelNotFoundError, match="no such model"):
        await child.start()
    await child.stop()


@pytest.mark.parametrize("said", ["", "print('hello')", "print('[]')", "print('{}')"])
async def test_a_child_that_ends_before_it_is_ready_shows_its_log(make, said):
    child = make(f"import sys; sys.stderr.write('the reason\\n'); sys.stderr.flush(); {said}")
    with pytest.raises(ServerError, match=r"worker ended before it was ready; .*worker.log:\n(.|\n)*the reason"):
        await child.start()
    await child.stop()


async def test_a_child_that_is_never_ready_is_ended(make, tmp_path):
    child = make(f"import os, sys; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); {UNTIL_EOF}")
    child._start_deadline = 0.5
    with pytest.raises(ServerError, match="did not start in 0 s"):
        await child.start()
    file = tmp_path / "pid"
    assert not file.exists() or not alive(int(file.read_text()))
    await child.stop()


async def test_a_command_that_is_not_there(tmp_path):
    child = Supervisor([str(tmp_path / "nothing")], log_file=tmp_path / "worker.log")
    with pytest.raises(ServerError, match=r"the worker could not be started: .*nothing"):
        await child.start()
    await child.stop()


async def test_a_child_that_dies_is_restarted(make):
    child = make(CHILD)
    await child.start()
    again = await restarted(child)
    first = child.ready["pid"]
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        await again.wait()
        await child.wait_ready(DEADLINE)
    assert child.ready["pid"] != first
    assert alive(child.ready["pid"])
    assert child.state()["restarts"] == 1
    await child.stop()


async def test_nobody_is_told_it_is_up_before_on_restart_is_done(make):
    child = make(CHILD)
    await child.start()
    began, go_on = asyncio.Event(), asyncio.Event()

    async def on_restart() -> None:
        began.set()
        await go_on.wait()

    child.on_restart = on_restart
    os.kill(child.ready["pid"], signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        await began.wait()
    assert child.state()["state"] == "starting"
    with pytest.raises(ServerError, match="not ready within"):
        await child.wait_ready(0.01)
    go_on.set()
    await child.wait_ready(DEADLINE)
    await child.stop()


@pytest.mark.parametrize("error", [ServerError("the adapter is refused"), RuntimeError("a mistake of ours")])
async def test_a_restart_that_fails_is_tried_again(make, error):
    child = make(CHILD)
    await child.start()
    tries = []
    second = asyncio.Event()

    async def on_restart() -> None:
        tries.append(child.ready["pid"])
        if len(tries) == 1:
            raise error
        second.set()

    child.on_restart = on_restart
    os.kill(child.ready["pid"], signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        await second.wait()
    await child.wait_ready(DEADLINE)
    assert not alive(tries[0])
    assert alive(tries[1])
    await child.stop()


async def test_a_child_that_dies_too_often_is_given_up(make, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 3)
    starts = tmp_path / "starts"
    child = make(
        f"open({str(starts)!r}, 'a').write('x')\n{READY}\n"
        "sys.stderr.write('bad luck\\n'); sys.stderr.flush(); os._exit(9)"
    )
    await child.start()
    with pytest.raises(ServerError, match=r"the worker died 3 times within 300 s; (.|\n)*bad luck"):
        await given_up(child)
    assert child.state()["state"] == "failed"
    assert starts.read_text() == "xxx"
    await child.stop()


async def test_old_deaths_are_forgotten(make, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 2)
    monkeypatch.setattr(supervisor, "DEATH_WINDOW", 0.0)
    child = make(CHILD)
    await child.start()
    for _ in range(3):
        again = await restarted(child)
        os.kill(child.ready["pid"], signal.SIGKILL)
        async with asyncio.timeout(DEADLINE):
            await again.wait()
            await child.wait_ready(DEADLINE)
    assert child.state()["restarts"] == 3
    await child.stop()


async def test_a_child_that_says_why_it_cannot_come_back_is_not_tried_again(make, tmp_path):
    flag = tmp_path / "flag"
    refusal = '{"ready": false, "type": "ConfigError", "message": "device: no such"}'
    code = f"import os\nif os.path.exists({str(flag)!r}):\n    print('{refusal}')\nelse:\n"
    code += "".join(f"    {line}\n" for line in CHILD.strip().splitlines())
    child = make(code)
    await child.start()
    flag.touch()
    os.kill(child.ready["pid"], signal.SIGKILL)
    with pytest.raises(ConfigError, match="device: no such"):
        await given_up(child)
    assert child.state()["state"] == "failed"
    await child.stop()


async def test_a_child_that_ignores_sigterm_is_killed(make, monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_GRACE", 0.2)
    ignore = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = make(f"{ignore}\n{READY}\nthreading.Event().wait()")
    await child.start()
    pid = child.ready["pid"]
    await child.stop()
    assert not alive(pid)


async def test_stop_during_a_restart_leaves_no_child(make, tmp_path):
    child = make(CHILD)
    await child.start()
    began = asyncio.Event()

    async def on_restart() -> None:
        began.set()
        await asyncio.Event().wait()

    child.on_restart = on_restart
    os.kill(child.ready["pid"], signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        await began.wait()
    pid = child.ready["pid"]
    await child.stop()
    assert not alive(pid)


@pytest.mark.parametrize("stopped", [False, True], ids=["deaf", "stopped by a signal"])
async def test_a_child_that_hangs_says_where_and_is_killed_and_restarted(make, monkeypatch, tmp_path, stopped):
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "HUNG_SECONDS", 0.3)
    monkeypatch.setattr(supervisor, "STACKS_GRACE", 0.5)
    child = make("from art_backends import stacks\nstacks.on_request()\n" + READY + HANG)
    back = await restarted(child)
    await child.start()
    first = child.ready["pid"]

    async def healthy() -> bool:
        if child.ready["pid"] == first:
            await asyncio.Event().wait()  # no answer
        return True

    child.healthy = healthy
    if stopped:
        os.kill(first, signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE):
        await back.wait()
    assert not alive(first)
    assert child.restarts == 1
    assert alive(child.ready["pid"])
    if not stopped:
        assert "a_lock_that_nobody_gives_back" in (tmp_path / "logs" / "worker.log").read_text()
    await child.stop()


@pytest.mark.parametrize("trouble", [OSError("refused"), ServerError("away"), None])
async def test_a_child_that_is_unwell_for_a_moment_is_left_alone(make, monkeypatch, trouble):
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "HUNG_SECONDS", 5.0)
    looks, seen = iter(range(1000)), asyncio.Event()

    async def healthy() -> bool:
        look = next(looks)
        if look > 20:
            seen.set()
        if look % 2 and trouble is not None:
            raise trouble
        return not look % 2

    child = make(CHILD, healthy=healthy)
    await child.start()
    async with asyncio.timeout(DEADLINE):
        await seen.wait()
    assert child.state() == {"name": "worker", "pid": child.ready["pid"], "state": "up", "restarts": 0}
    await child.stop()


async def test_a_child_that_writes_to_standard_output_does_not_hang(make):
    """A pipe holds 64 KiB: whoever does not read it stops its child."""
    child = make(READY + "sys.stdout.write('x' * 1_000_000 + '\\n'); sys.stdout.flush()\nos._exit(7)")
    await child.start()
    again = await restarted(child)
    async with asyncio.timeout(DEADLINE):
        await again.wait()
    await child.stop()


async def test_the_allocators_settings_give_way_to_the_users(make, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "17")
    ready = (
        "import json, os, sys; print(json.dumps({'ready': True, **{k: os.environ.get(k) for k in KEYS}}), flush=True)"
    )
    child = make(f"KEYS = ['MALLOC_MMAP_MAX_', 'MALLOC_TOP_PAD_']\n{ready}\n{UNTIL_EOF}")
    await child.start()
    assert child.ready["MALLOC_MMAP_MAX_"] == "17"
    assert child.ready["MALLOC_TOP_PAD_"] == supervisor.ALLOCATOR["MALLOC_TOP_PAD_"]
    await child.stop()


def test_the_child_ends_when_its_parent_is_killed(tmp_path):
    """The parent is killed without a word: the end of standard input is all the child gets."""
    ended = tmp_path / "ended"
    os.mkfifo(ended)
    code = f"{CHILD}\nopen({str(ended)!r}, 'w').write('ended')"
    script = f"""
import asyncio, sys
from pathlib import Path
from art_backends.server.supervisor import Supervisor
async def main():
    child = Supervisor([sys.executable, "-c", {code!r}], log_file=Path({str(tmp_path / "log")!r}))
    await child.start()
    print("up", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "up\n"
        parent.kill()
    assert Path(ended).read_text() == "ended"  # waits until the child writes
