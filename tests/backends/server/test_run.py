"""Starting and stopping: what is refused in which words, draining, full disks, the end of the parent."""

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.errors import ConfigError, FolderInUseError, ServerError
from art_backends.server.run import serve

FAKE = Path(__file__).with_name("fake_worker.py")
SCRIPT = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from art_backends.config import TrainConfig
    from art_backends.server.run import serve
    from art_backends.server.supervisor import Supervisor

    run, faults, fake = map(Path, sys.argv[1:])
    command = [sys.executable, str(fake), "--versions", str(run / "versions"), "--faults", str(faults)]
    asyncio.run(
        serve(
            TrainConfig(folder=run, base_model="fake"),
            exit_with_parent=True,
            on_ready=lambda url: print(url, flush=True),
            make_worker=lambda *_: Supervisor(command, log_file=run / "logs" / "worker.log"),
        )
    )
    """
)


async def test_a_second_server_on_the_folder_and_a_taken_port(start: Any, tmp_path: Path) -> None:
    async with start() as server:
        with pytest.raises(FolderInUseError, match=f"at {server.url}: stop it"):
            await serve(server.config)
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(FolderInUseError, match=f"at {server.url}: stop it"):
            await serve(server.config, port=port)  # the port is taken by that server, which is what matters
        other = server.config.model_copy(update={"folder": tmp_path / "other"})
        with pytest.raises(ServerError, match=rf"port {port} on 127.0.0.1 is taken by another program; .*--port"):
            await serve(other, port=port)
        assert not (tmp_path / "other").exists(), "nothing is made before the address is known to be free"


async def test_an_address_that_others_reach_needs_to_be_asked_for(start: Any) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="can be reached by other machines; add --allow-remote"):
            async with start(host=host):
                pass
    with pytest.raises(ConfigError, match=r"host: 192\.0\.2\.1"):
        async with start(host="192.0.2.1"):
            pass
    async with start(host="0.0.0.0", allow_remote=True) as server:
        port = server.url.rsplit(":", 1)[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/health", headers={"host": "evil.com"})).status_code == 421


async def test_answers_are_not_held_back_by_nagle(start: Any, monkeypatch: Any) -> None:
    """asyncio switches it off for what says that it is TCP: seen at the connections of a server that runs."""
    accepted: list[socket.socket] = []
    usual = socket.socket.accept

    def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
        connection, address = usual(listener)
        accepted.append(connection)
        return connection, address

    async with start() as server:
        monkeypatch.setattr(socket.socket, "accept", accept)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            assert (await http.get("/health")).status_code == 200
            connection = next(item for item in accepted if item.family == socket.AF_INET)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
async def test_a_client_that_was_given_up_does_not_keep_its_connection(start: Any) -> None:
    """It never reads, so that what lies in the buffers cannot be sent: the system ends the connection."""
    async with start({"limits": {"write_seconds": 0.3}}) as server:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 6_000_000}]}
        content = json.dumps(body).encode()
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        _, writer = await asyncio.open_connection(sock=small)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.agent}\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        mine = writer.get_extra_info("sockname")[1]
        async with asyncio.timeout(30):
            while not theirs(server, mine):  # the request has arrived
                await server.http.get("/health")
            while theirs(server, mine):
                await server.http.get("/health")
        writer.transport.abort()


def theirs(server: Any, port: int) -> bool:
    """Whether the server's side of the connection from this port is still there."""
    here = f":{int(server.url.rsplit(':', 1)[1]):04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(here) and row[2].endswith(f":{port:04X}") for row in rows)


async def test_settings_that_do_not_fit_the_folder(start: Any) -> None:
    async with start():
        pass
    with pytest.raises(ConfigError, match=r"rank: .* was made with 8, now asked for 4"):
        async with start({"rank": 4}):
            pass
    with pytest.raises(ConfigError, match=r"base_model: .* was made with fake \(digest digest-1…\)"):
        async with start(digest="digest-2"):
            pass
    async with start() as server:
        assert (await server.policy())["version"] == 0


async def test_draining_finishes_what_is_in_flight(start: Any) -> None:
    """Row R17: no call that was begun is dropped, none is begun."""
    async with start() as server:
        rollout = await server.open()
        server.fault("hold_call")
        in_flight = asyncio.create_task(server.chat(rollout.token, "hold"))
        await server.engine.get("/test/held/call")
        proxy = (await server.client.status())["proxy"]
        assert [call["rollout"] for call in proxy["oldest"]] == [rollout.id]
        assert (proxy["in_flight"], proxy["oldest"][0]["seconds"] >= 0) == (1, True)
        server.stop.set()
        port = int(server.url.rsplit(":", 1)[1])
        async with asyncio.timeout(20):
            while not await refused(port):
                pass
        await server.engine.post("/test/release/call")
        assert (await in_flight).status_code == 200
        async with asyncio.timeout(20):
            await server.task
    async with start() as server:
        calls = (await server.client.rollout(rollout.id)).calls
        assert [call.status for call in calls] == ["ok"]


async def test_draining_has_a_deadline(start: Any) -> None:
    async with start(drain_seconds=1) as server:
        server.fault("hold_call")
        in_flight = asyncio.create_task(server.chat(server.agent, "hold"))
        await server.engine.get("/test/held/call")
        server.stop.set()
        async with asyncio.timeout(20):
            await server.task
        outcome = (await asyncio.gather(in_flight, return_exceptions=True))[0]
        assert isinstance(outcome, httpx.TransportError) or outcome.status_code >= 500


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()
    except ConnectionRefusedError:
        return True
    except ConnectionError:  # reset: it was in the queue of the socket that closes just now
        return False
    return False


async def test_a_full_disk_stops_the_capture_and_not_the_agent(start: Any) -> None:
    """Row R6: the agent is served, the loss is counted, the rollout does not train, and it goes on by itself."""
    async with start() as server:
        rollout = await server.open()
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = sum(path.stat().st_size for path in server.folder.glob("store.sqlite*"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (min(size, 4096), before[1]))
        try:
            statuses = [(await server.chat(rollout.token, f"turn {turn}")).status_code for turn in range(5)]
            with pytest.raises(Exception, match="free space, then capture goes on by itself"):
                await server.open()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert statuses == [200] * 5
        assert (await server.client.status())["proxy"]["capture_lost"] == 5
        closed = await server.client.close_rollout(rollout.id, reward=1.0)
        assert closed.fault == "capture lost: 5 of its calls could not be recorded"
        assert await server.client.close_rollout(rollout.id, reward=1.0) == closed
        after = await server.open()
        await server.chat(after.token)
        assert len((await server.client.rollout(after.id)).calls) == 1


@pytest.mark.parametrize("how", ["SIGTERM", "parent", "SIGKILL"])
def test_the_process_and_its_child_end(tmp_path: Path, how: str) -> None:
    run, faults = tmp_path / "run", tmp_path / "faults"
    faults.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(run), str(faults), str(FAKE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()
        assert json.loads((run / "server.json").read_text()) == {"url": url, "pid": process.pid}
        token = (run / "admin.token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        status = httpx.get(f"{url}/control/v1/status", headers=headers, trust_env=False, timeout=30).json()
        child = status["children"][0]["pid"]
        if how == "parent":
            process.stdin.close()
        else:
            process.send_signal(signal.Signals[how])
        code = process.wait(timeout=30)
        errors = process.stderr.read()
    assert code == (-9 if how == "SIGKILL" else 0), errors
    assert (run / "server.json").exists() == (how == "SIGKILL")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) != 0
    # its input has ended with the server: it is gone, or going (a zombie has no command line)
    for _ in range(10_000):
        command = Path(f"/proc/{child}/cmdline")
        if not command.exists() or not command.read_bytes():
            break
    else:
        pytest.fail("the worker outlived the server")
