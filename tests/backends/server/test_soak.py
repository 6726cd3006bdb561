"""A server under a mixed load for as long as ``--soak`` says: nothing grows, nothing is lost, nothing stays open."""

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.client import Client
from art_backends.store import Store
from art_backends.trajectories import CallStatus

from tests.backends.server.test_killed import ASKS
from tests.backends.server.test_run import FAKE, SCRIPT

AGENTS = 16
TURNS = 6  # of a rollout


class Soaked:
    """The server's process from outside, and what was asked of it."""

    def __init__(self, pid: int, run: Path) -> None:
        self.pid, self.run = pid, run
        self.samples: list[tuple[float, int, int, int]] = []  # seconds, memory, files, log of the store
        self.answered = self.left = 0
        self.rollouts: list[str] = []

    def sample(self, began: float) -> None:
        process = Path(f"/proc/{self.pid}")
        memory = int(process.joinpath("statm").read_text().split()[1]) * 4096
        log = self.run / "store.sqlite-wal"
        size = log.stat().st_size if log.exists() else 0
        self.samples.append((time.monotonic() - began, memory, len(list(process.joinpath("fd").iterdir())), size))

    def later(self, what: int, part: slice) -> float:
        return statistics.median(sample[what] for sample in self.samples[part])


async def play(soaked: Soaked, client: Client, http: httpx.AsyncClient, port: int, number: int) -> None:
    """One rollout: answers whole and streamed in three formats, a refusal, and a stream that is left."""
    rollout = await client.open_rollout(policy="policy", step=1, group="g", sample=number)
    bearer = {"authorization": f"Bearer {rollout.token}"}
    for turn in range(TURNS):
        path, asked = ASKS[turn % len(ASKS)]
        body = json.loads(json.dumps({"model": "m", "stream": turn % 2 == 1, **asked}).replace("hold", f"turn {turn}"))
        reply = await http.post(path, json=body, headers=bearer)
        assert reply.status_code == 200, reply.text
        soaked.answered += 1
    assert (await http.post("/v1/messages", content=b"{", headers=bearer)).status_code == 400
    content = json.dumps({"model": "m", "stream": True, **ASKS[0][1]}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {ASKS[0][0]} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {rollout.token}\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    writer.transport.abort()
    soaked.left += 1
    await client.close_rollout(rollout.id, reward=1.0)
    soaked.rollouts.append(rollout.id)


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_nothing_grows(tmp_path: Path, soak: float, capsys: Any) -> None:
    run, faults = tmp_path / "run", tmp_path / "faults"
    faults.mkdir()
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(run), str(faults), str(FAKE),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    try:
        url = (await asyncio.wait_for(server.stdout.readline(), 60)).decode().strip()
        soaked, began = Soaked(server.pid, run), time.monotonic()
        async with (
            Client(url, (run / "admin.token").read_text().strip()) as client,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http,
        ):

            async def agent(number: int) -> None:
                while time.monotonic() - began < soak:
                    await play(soaked, client, http, int(url.rsplit(":", 1)[1]), number)
                    soaked.sample(began)

            await asyncio.gather(*(agent(number) for number in range(AGENTS)))
            async with asyncio.timeout(60):
                while (await client.status())["proxy"]["in_flight"]:
                    pass
            proxy = (await client.status())["proxy"]
            assert (proxy["capture_lost"], proxy["waiting"]) == (0, 0)
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 60)
    fifth = max(1, len(soaked.samples) // 5)
    before, after = slice(2 * fifth, 3 * fifth), slice(-fifth, None)
    memory = [soaked.later(1, part) / 2**20 for part in (before, after)]
    files = [soaked.later(2, part) for part in (before, after)]
    log = max(sample[3] for sample in soaked.samples) / 2**20
    with capsys.disabled():
        figures = (
            f"memory {memory[0]:.1f} → {memory[1]:.1f} MiB, files {files[0]:.0f} → {files[1]:.0f}, log ≤ {log:.1f} MiB"
        )
        sys.stdout.write(f"\n{soaked.answered} calls answered, {soaked.left} left in {soak:.0f} s: {figures}\n")
    assert memory[1] - memory[0] < 0.03 * memory[0] + 2, f"memory grew: {memory}"
    assert files[1] - files[0] < AGENTS, f"files stay open: {files}"
    assert log < 64, "the store's log is not taken back"
    store = Store.open(run / "store.sqlite")
    try:
        kept = [call for rollout in soaked.rollouts for call in store.calls(rollout)]
    finally:
        store.close()
    assert sum(call.status is CallStatus.OK for call in kept) >= soaked.answered
    assert len(kept) <= soaked.answered + soaked.left
