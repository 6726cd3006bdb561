"""A real server over real HTTP on a port of its own, with the fault-injecting worker as its supervised child."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.client import Client, OpenRollout
from art_backends.config import TrainConfig
from art_backends.server.folder import RunFolder
from art_backends.server.run import serve
from art_backends.server.supervisor import Supervisor

FAKE = Path(__file__).with_name("fake_worker.py")


@dataclass
class Running:
    """A server that answers, and what a test needs of it."""

    url: str
    config: TrainConfig
    folder: Path
    faults: Path
    worker: Supervisor
    client: Client
    http: httpx.AsyncClient  # no token of its own
    engine: httpx.AsyncClient  # the worker's socket
    stop: asyncio.Event
    task: "asyncio.Task[None]" = field(repr=False)

    @property
    def admin(self) -> str:
        return (self.folder / "admin.token").read_text().strip()

    @property
    def agent(self) -> str:
        return (self.folder / "agent.token").read_text().strip()

    async def open(self, **changes: Any) -> OpenRollout:
        return await self.client.open_rollout(policy="policy", **{"step": 1, "group": "g", **changes})

    async def chat(self, token: str, content: str = "hi", **more: Any) -> httpx.Response:
        body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": content}], **more}
        headers = {"authorization": f"Bearer {token}"}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def collect(self, step: int, count: int = 4) -> list[str]:
        """Rollouts of a step with a call and a reward each."""
        ids = []
        for number in range(count):
            rollout = await self.open(step=step, sample=number)
            assert (await self.chat(rollout.token)).status_code == 200
            await self.client.close_rollout(rollout.id, reward=float(number % 2))
            ids.append(rollout.id)
        return ids

    async def policy(self) -> dict[str, Any]:
        return (await self.client.status())["policies"][0]

    async def restarted(self, name: str) -> None:
        """Wait until a new child of this name is up."""
        async with asyncio.timeout(60):
            while True:
                children = (await self.client.status())["children"]
                if any((one["name"], one["state"], one["restarts"]) == (name, "up", 1) for one in children):
                    return

    def fault(self, name: str, times: int = 1) -> None:
        (self.faults / name).write_text(str(times))

    async def loaded(self) -> list[str]:
        models = (await self.engine.get("/v1/models")).json()["data"]
        return [model["id"] for model in models if model["parent"]]


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    @contextlib.asynccontextmanager
    async def begin(
        settings: dict[str, Any] | None = None, *, folder: Path | None = None, digest: str = "digest-1", **more: Any
    ) -> AsyncIterator[Running]:
        run = folder or tmp_path / "run"
        faults = tmp_path / "faults"
        faults.mkdir(exist_ok=True)
        config = TrainConfig(folder=run, base_model="fake", **(settings or {}))
        workers: list[Supervisor] = []

        def make_worker(_: TrainConfig, place: RunFolder) -> Supervisor:
            command = [sys.executable, str(FAKE), "--versions", str(place.versions), "--faults", str(faults)]
            command += ["--digest", digest]
            workers.append(Supervisor(command, log_file=place.path / "logs" / "worker.log", start_deadline=60))
            return workers[0]

        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(config, on_ready=ready.set_result, stop=stop, make_worker=make_worker, **{"drain_seconds": 5, **more})
        )
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        url = ready.result()
        transport = httpx.AsyncHTTPTransport(uds=str(workers[0].socket))
        async with (
            Client(url, (run / "admin.token").read_text().strip()) as client,
            httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
            httpx.AsyncClient(base_url="http://worker", transport=transport, timeout=30) as engine,
        ):
            try:
                yield Running(url, config, run, faults, workers[0], client, http, engine, stop, task)
            finally:
                stop.set()
                await task

    return begin
