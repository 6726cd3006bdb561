"""Two real engines behind one proxy, one of them killed under load: nothing is lost that had not begun to be said."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.identity import Identity, RolloutContext
from art_backends.proxy.replicas import Replicas
from art_backends.server import probe
from art_backends.server.adapters import Adapters
from art_backends.server.policy import PolicyTable
from art_backends.training import versions
from art_backends.trajectories import CallStatus, CaptureLevel

from tests.backends.engines.conftest import make_adapter
from tests.backends.proxy.fake_engine import FakeEngine, World, world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
CALLERS = 16
TOKENS = 60
LONG = 120.0  # seconds: a deadline that is never needed


class Engine:
    """A process with the tiny model; it can be stopped, killed and started again on the same socket."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.backends.server.tiny_engine",
            "--uds",
            str(self.socket),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(LONG):
            assert await self.process.stdout.readline() == b"ready\n"

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def engines(folder: Path) -> AsyncIterator[list[Engine]]:
    made = [Engine(folder / f"{number}.sock") for number in range(2)]
    try:
        await asyncio.gather(*(engine.start() for engine in made))
        yield made
    finally:
        for engine in made:
            await engine.end()


class Callers:
    """16 agents that stream one call after the other until they are told to end."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.over = asyncio.Event()
        self.whole = 0
        self.broken: list[int] = []  # chunks that had come of each call that failed
        self.problems: list[str] = []

    async def run(self, number: int) -> None:
        self.w.identities[f"t{number}"] = Identity("rollout", RolloutContext(f"r{number}", "policy", "policy@1"))
        client = self.w.sdk(f"t{number}", timeout=LONG)
        turn = 0
        while not self.over.is_set():
            turn += 1
            await self.call(client, f"hello {number} {turn}")

    async def call(self, client: openai.AsyncOpenAI, content: str) -> None:
        chunks, ended = 0, False
        messages: Any = [{"role": "user", "content": content}]
        try:
            stream = await client.chat.completions.create(
                model="gpt-4o-mini",
                messages=messages,
                stream=True,
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                chunks += 1
                ended = ended or chunk.choices[0].finish_reason is not None
        except (openai.APIError, openai.APIConnectionError) as error:
            self.broken.append(chunks)
            self.problems.append(f"{chunks} {error!r}")
            return
        assert ended
        self.whole += 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110 - things of several processes change
            await asyncio.sleep(0.005)


async def test_a_killed_engine_loses_no_call_that_had_no_token_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    folder.mkdir()
    with versions.new_version(folder, "policy", 1) as place:
        make_adapter(place)
        state = {"format": 1, "policy": "policy", "version": 1, "step": 1, "rollout_ids": [], "metrics": {}}
        versions.write_file(place / versions.STATE, versions.encode_json(state))
    async with engines(tmp_path) as made:
        clients = [EngineClient(uds=str(engine.socket)) for engine in made]
        names = ["left", "right"]
        found = [await probe.abilities(client, "base") for client in clients]
        probe.agree(names, found)
        assert [does.problems for does in found] == [[], []]
        replicas = Replicas(clients, names=names, up_seconds=2, out_seconds=0.1, health_seconds=30)
        policies = PolicyTable("policy", base_model="base")
        adapters = Adapters(replicas, policies, folder)
        replicas.on_back = adapters.reload
        await adapters.load(1)
        policies.move(1)
        await replicas.start()
        async with world("", FakeEngine(), client=replicas, policy=policies) as w:
            callers = Callers(w)
            tasks = [asyncio.create_task(callers.run(number)) for number in range(CALLERS)]
            left = replicas._replicas[0]
            await until(lambda: callers.whole >= CALLERS and left.in_flight >= 4)
            assert callers.problems == []
            made[0].signal(signal.SIGSTOP)  # what comes now waits there without a token
            tasks += [asyncio.create_task(callers.run(CALLERS + number)) for number in range(CALLERS)]
            await until(lambda: len(left.unanswered) >= 3)
            waiting = len(left.unanswered)
            talking = left.in_flight - waiting
            made[0].signal(signal.SIGKILL)
            await until(lambda: not left.up)
            await until(lambda: left.in_flight == 0)
            await until(lambda: left.moved >= waiting)
            assert len(callers.broken) <= talking + 1, callers.problems
            assert all(chunks > 0 for chunks in callers.broken), callers.problems
            before = callers.whole
            await until(lambda: callers.whole >= before + CALLERS)  # the other one does it all
            await made[0].end()
            await made[0].start()
            await until(lambda: left.up)
            assert [item["id"] for item in await clients[0].models()] == ["base", "policy@1"]
            asked, lost = left.calls, len(callers.broken)
            await until(lambda: left.calls >= asked + CALLERS)
            callers.over.set()
            async with asyncio.timeout(LONG):
                await asyncio.gather(*tasks)
            assert len(callers.broken) == lost, "it came back with the adapter: nobody notices"
            for call in w.store.all:
                assert call.version == "policy@1"
                assert (call.capture is CaptureLevel.TOKENS) == (call.status is CallStatus.OK)
            assert sum(call.status is CallStatus.OK for call in w.store.all) == callers.whole
        assert replicas.figures()["moved"] == left.moved
