"""Rows R1, R2, R17: agent or server end in the middle; what was acknowledged is kept, nothing half is."""

import asyncio
import contextlib
import json
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from art_backends.client import Client
from art_backends.store import Store
from art_backends.trajectories import CallStatus

from tests.backends.server.test_run import FAKE, SCRIPT, refused

HUNDRED = 100
AGENT = textwrap.dedent(
    """
    import asyncio, json, sys

    port, tokens = int(sys.argv[1]), sys.argv[2:]

    async def turns(number, token):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for turn in range(1000):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{number}.{turn}"}]}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\\r\\nhost: localhost\\r\\nauthorization: Bearer {token}\\r\\n"
            writer.write(f"{head}content-length: {len(body)}\\r\\n\\r\\n".encode() + body)
            answer = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
            await reader.readexactly(int(answer.partition("content-length: ")[2].split()[0]))
            assert " 200 " in answer, answer
            print(f"{number}.{turn}", flush=True)

    async def main():
        await asyncio.gather(*(turns(*item) for item in enumerate(tokens)))

    asyncio.run(main())
    """
)


async def test_r1_turns_of_an_agent_that_is_killed_are_kept_and_do_not_train(start: Any) -> None:
    """A hundred rollouts of a program that is killed at some turn: of those it had an answer to, none is lost."""
    async with start() as server:
        opened = await asyncio.gather(*(server.open(sample=number) for number in range(HUNDRED)))
        port = server.url.rsplit(":", 1)[1]
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT, port, *(item.token for item in opened), stdout=asyncio.subprocess.PIPE
        )
        assert agent.stdout is not None
        async with asyncio.timeout(90):
            answered = [(await agent.stdout.readline()).decode() for _ in range(2 * HUNDRED)]
            agent.kill()
            answered += (await agent.stdout.read()).decode().splitlines(keepends=True)
            await agent.wait()
            while (status := await server.client.status())["proxy"]["in_flight"] or status["rollouts"]["unfinished"]:
                pass
        acknowledged = {line.strip() for line in answered if line.endswith("\n")}
        assert len(acknowledged) >= 2 * HUNDRED
        kept: set[str] = set()
        for item in opened:
            rollout = await server.client.rollout(item.id)
            assert not rollout.closed
            assert [call.sequence for call in rollout.calls] == list(range(len(rollout.calls)))
            assert {call.status for call in rollout.calls} <= {CallStatus.OK, CallStatus.CANCELLED}
            kept |= {call.request["messages"][0]["content"] for call in rollout.calls if call.status is CallStatus.OK}
        assert acknowledged - kept == set()
        whole = await server.collect(1, 2)
        ids = [*whole, *(item.id for item in opened)]
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)
        assert outcome.excluded == {item.id: "open" for item in opened}
        assert sorted(outcome.tokens) == sorted(whole)


def _abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hold"}]}),
    ("/v1/responses", {"input": "hold"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hold"}], "max_tokens": 50}),
]


@dataclass
class Streaming:
    """A server's process with a hundred streams of three formats, each begun and held by the engine."""

    process: asyncio.subprocess.Process
    run: Path
    rollout: str
    worker: Path  # the engine's socket
    begun: list[bytes]
    readers: list[asyncio.StreamReader]
    port: int

    def calls(self) -> list[tuple[CallStatus, int]]:
        """Status and number of answers of each call, as they are stored."""
        store = Store.open(self.run / "store.sqlite")
        try:
            return [(call.status, len(call.choices)) for call in store.calls(self.rollout)]
        finally:
            store.close()


def socket_of(pid: int) -> Path:
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return Path(command[command.index("--uds") + 1])


@contextlib.asynccontextmanager
async def streaming(tmp_path: Path) -> AsyncIterator[Streaming]:
    run, faults = tmp_path / "run", tmp_path / "faults"
    faults.mkdir()
    (faults / "hold_call").write_text("1000")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(run), str(faults), str(FAKE),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(90), contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: process.returncode is None and process.kill())
        url = (await process.stdout.readline()).decode().strip()
        port = int(url.rsplit(":", 1)[1])
        async with Client(url, (run / "admin.token").read_text().strip()) as client:
            rollout = await client.open_rollout(policy="policy", step=1, group="g")
            (child,) = (await client.status())["children"]
        readers = []
        for number in range(HUNDRED):
            path, asked = ASKS[number % len(ASKS)]
            body = json.dumps({"model": "m", "stream": True, **asked}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(_abort, writer)
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {rollout.token}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            readers.append(reader)
        begun = [await reader.readuntil(b'"b"') for reader in readers]  # the first letter of what the base model says
        yield Streaming(process, run, rollout.id, socket_of(child["pid"]), begun, readers, port)


ENDS = (b"[DONE]", b"response.completed", b"message_stop")


async def test_r2_a_server_that_is_killed_in_a_stream_leaves_no_half_turn(tmp_path: Path) -> None:
    """Every client sees its connection break, and nothing is half."""
    async with streaming(tmp_path) as server:
        server.process.kill()
        await server.process.wait()
        for begun, reader in zip(server.begun, server.readers, strict=True):
            rest = b""
            with contextlib.suppress(ConnectionError):
                rest = await reader.read()
            for end in (*ENDS, b"\r\n0\r\n\r\n"):
                assert end not in begun + rest
        assert server.calls() == [(CallStatus.OPEN, 0)] * HUNDRED


async def test_r17_sigterm_under_load_drops_nothing(tmp_path: Path) -> None:
    """A real signal: no connection is taken any more, and a hundred streams end as they would have."""
    async with streaming(tmp_path) as server:
        server.process.terminate()
        while not await refused(server.port):
            pass
        transport = httpx.AsyncHTTPTransport(uds=str(server.worker))
        async with httpx.AsyncClient(base_url="http://worker", transport=transport, timeout=30) as worker:
            await worker.post("/test/release/call")
        for reader in server.readers:
            rest = await reader.read()
            assert rest.endswith(b"\r\n0\r\n\r\n")
            assert any(end in rest for end in ENDS)
        assert await server.process.wait() == 0
        assert server.calls() == [(CallStatus.OK, 1)] * HUNDRED
