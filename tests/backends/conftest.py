"""A server that has trained one step, and the command line as a user runs it on that server's folder."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from art_backends.cli import main
from art_backends.client import Client
from art_backends.config import TrainConfig
from art_backends.server.run import serve
from art_backends.server.supervisor import Supervisor

FAKE_WORKER = Path(__file__).parent / "server" / "fake_worker.py"


@dataclass
class Trained:
    """A running server whose two rollouts were trained; there is markup in their scenario's id."""

    run: Path
    url: str
    rollouts: list[str]
    client: Client
    capsys: pytest.CaptureFixture[str]

    async def _call(self, code: int, *arguments: str, folder: Path | None = None) -> tuple[str, str]:
        """The command in a thread, because it has an event loop of its own."""
        self.capsys.readouterr()
        done = await asyncio.to_thread(main, [*arguments, "--folder", str(folder or self.run)])
        said = self.capsys.readouterr()
        assert done == code, said.err
        return said.out, said.err

    async def says(self, *arguments: str) -> str:
        """What a command prints."""
        return (await self._call(0, *arguments))[0]

    async def refuses(self, *arguments: str, folder: Path | None = None) -> str:
        """The one line of a command's error."""
        out, err = await self._call(2, *arguments, folder=folder)
        assert out == ""
        assert err.count("\n") == 1
        return err

    async def chat(self, base_url: str, token: str) -> None:
        body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "where [bold]is[/bold] 4417?"}]}
        headers = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            reply = await http.post(f"{base_url}/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text


@pytest.fixture
async def trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Trained]:
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
    url = ready.result()
    async with Client(url, (run / "admin.token").read_text().strip()) as client:
        server = Trained(run, url, [], client, capsys)
        for sample in range(2):
            rollout = await client.open_rollout(policy="policy", step=1, group="g", sample=sample, scenario_id="[red]s")
            await server.chat(rollout.base_url, rollout.token)
            await client.close_rollout(rollout.id, reward=float(sample), metrics={"success": float(sample)})
            server.rollouts.append(rollout.id)
        await client.train_step(1, config, rollout_ids=server.rollouts)
        try:
            yield server
        finally:
            stop.set()
            with contextlib.suppress(asyncio.CancelledError):
                await task
