"""What the proxy costs, in one run: an engine that only answers, asked directly and through several proxies.

    python benchmarks/proxy.py [--json FILE] [--quick] [--seconds 5] [--repeats 3] [--litellm PYTHON]
                               [--agent-lightning PYTHON]

Plain and streamed (40 tokens), 1, 32 and 256 callers at once, prompts of 50 and of 30,000 tokens. ``floor`` is
Starlette and aiohttp and nothing else; ``captured`` is this project's server with every call recorded durably,
``uncaptured`` the same server for an app's calls, which are not. With ``--litellm``, the interpreter of an environment
that has ``litellm[proxy]``, that proxy as well; with ``--agent-lightning`` Agent Lightning's, which records, too (it
asks for whole answers and makes streams of those). All servers have one worker; callers, proxy and engine share the
machine, the same for each. Told are medians over ``--repeats``, in turn.

Afterwards every captured call is looked for in the store (``lost``). ``--quick`` is one short repeat of few cases. It
refuses to say how fast an engine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from art_backends.client import Client
from art_backends.trajectories import CallStatus

SERVERS = Path(__file__).with_name("proxy_servers.py")
AGENT_LIGHTNING = Path(__file__).with_name("agent_lightning_proxy.py")
PROMPTS = {"small": 50, "large": 30_000}  # tokens
CALLS = 8  # of one rollout
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}


@dataclass(frozen=True)
class Case:
    """How the engine is asked."""

    stream: bool
    callers: int
    prompt: str

    @property
    def name(self) -> str:
        return f"{'stream' if self.stream else 'plain'} {self.callers:>3} {self.prompt}"


@dataclass
class Measured:
    """Of one case on one server: answers per second, and seconds to the first byte and to the end."""

    rps: float
    first: float
    whole: float


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(stream, callers, "small") for stream in (False, True) for callers in (1, 32)]
    found = [Case(stream, callers, "small") for stream in (False, True) for callers in (1, 32, 256)]
    return [*found, Case(False, 1, "large"), Case(True, 1, "large"), Case(True, 32, "large")]


@contextmanager
def server(*words: str, python: str = sys.executable, ready: bool = True, **environment: str) -> Iterator[Any]:
    """A server in a process of its own; what its first line says."""
    command = [python, *words]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if ready else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | environment,
    )  # fmt: skip
    try:
        yield json.loads(process.stdout.readline()) if ready and process.stdout else None
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Target:
    """A server that is asked; ``keys`` are used in turn, each for CALLS calls."""

    def __init__(self, name: str, url: str, keys: list[str]) -> None:
        self.name, self.url, self._keys, self._asked = name, url, keys, 0
        self.captured = 0

    def key(self) -> str:
        self._asked += 1
        return self._keys[(self._asked - 1) // CALLS % len(self._keys)]


async def measure(target: Target, case: Case, seconds: float) -> Measured:
    """Ask for some seconds, ``case.callers`` at once; an answer that is not whole is an error."""
    content = "word " * (PROMPTS[case.prompt] * 4 // 5)
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": content}]}
    if case.stream:
        body["stream"] = True
    sent = orjson.dumps(body)
    firsts: list[float] = []
    wholes: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def ask() -> None:
            headers = {"authorization": f"Bearer {target.key()}", "content-type": "application/json"}
            begun = time.perf_counter()
            async with session.post(f"{target.url}/v1/chat/completions", data=sent, headers=headers) as reply:
                first = await reply.content.readany()
                firsts.append(time.perf_counter() - begun)
                rest = await reply.content.read()
                wholes.append(time.perf_counter() - begun)
                if reply.status != 200 or not (first + rest).rstrip().endswith(b"[DONE]" if case.stream else b"}"):
                    raise RuntimeError(f"{target.name}: {reply.status} {(first + rest)[-300:]!r}")
            target.captured += 1

        await asyncio.gather(*(ask() for _ in range(case.callers)))  # connections are made, code is warm
        firsts.clear()
        wholes.clear()
        begun = time.perf_counter()

        async def caller() -> None:
            while time.perf_counter() - begun < seconds:
                await ask()

        await asyncio.gather(*(caller() for _ in range(case.callers)))
        took = time.perf_counter() - begun
    return Measured(len(wholes) / took, statistics.median(firsts), statistics.median(wholes))


async def rollouts(url: str, folder: Path, count: int) -> list[str]:
    """Keys of fresh rollouts."""
    async with Client(url, (folder / "admin.token").read_text().strip()) as client:
        return [(await client.open_rollout(policy="policy", step=1, group=str(n))).token for n in range(count)]


async def run(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    port, floor_port = free_port(), free_port()
    stack.enter_context(server(str(SERVERS), "upstream", "--port", str(port)))
    upstream = f"http://127.0.0.1:{port}"
    stack.enter_context(server(str(SERVERS), "floor", "--port", str(floor_port), "--upstream", upstream))
    served = ExitStack()
    url = served.enter_context(server(str(SERVERS), "ours", "--folder", str(folder)))["url"]
    count = 200 if options.quick else 4000
    captured = Target("captured", url, await rollouts(url, folder, count))
    agent = (folder / "agent.token").read_text().strip()
    targets = [
        Target("direct", upstream, ["none"]),
        Target("floor", f"http://127.0.0.1:{floor_port}", ["none"]),
        captured,
        Target("uncaptured", url, [agent]),
    ]
    if options.litellm:
        targets.append(await litellm(stack, options.litellm, upstream))
    if options.agent_lightning:
        targets.append(agent_lightning(stack, options.agent_lightning, upstream))
    seconds, repeats = (1.0, 1) if options.quick else (options.seconds, options.repeats)
    found: dict[str, dict[str, list[Measured]]] = {}
    try:
        for case in cases(options.quick):
            for _ in range(repeats):
                for target in targets:
                    measured = await measure(target, case, seconds)
                    found.setdefault(case.name, {}).setdefault(target.name, []).append(measured)
            row = {name: median(items) for name, items in found[case.name].items()}
            print(
                case.name, "  ".join(f"{name} {item.rps:.0f}/s {item.whole * 1e3:.1f} ms" for name, item in row.items())
            )
    finally:
        served.close()
    figures = {case: {name: vars(median(items)) for name, items in row.items()} for case, row in found.items()}
    return {**ratios(figures), "lost": captured.captured - recorded(folder), "cases": figures}


async def litellm(stack: ExitStack, python: Path, upstream: str) -> Target:
    """LiteLLM's proxy for the same engine."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    params = {"model": "openai/base", "api_base": f"{upstream}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "m", "litellm_params": params}], "general_settings": {}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    program = str(python.parent / "litellm")
    words = ["--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    stack.enter_context(server(program, *words, python=str(python), ready=False, **LITELLM))
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        async with asyncio.timeout(180):
            while True:
                try:
                    async with session.get(f"{url}/health/liveliness") as reply:
                        if reply.status == 200:
                            return Target("litellm", url, ["none"])
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)


def agent_lightning(stack: ExitStack, python: Path, upstream: str) -> Target:
    """Agent Lightning's proxy for the same engine."""
    port = free_port()
    words = [str(AGENT_LIGHTNING), "--port", str(port), "--upstream", upstream]
    said = stack.enter_context(server(*words, python=str(python)))
    return Target("agent lightning", f"http://127.0.0.1:{port}{said['path']}", ["none"])


def median(items: list[Measured]) -> Measured:
    return Measured(*(statistics.median(getattr(item, name) for item in items) for name in ("rps", "first", "whole")))


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What the goals are about: 32 callers, and one alone."""
    plain, stream = figures["plain  32 small"], figures["stream  32 small"]
    one, one_stream = figures["plain   1 small"], figures["stream   1 small"]
    found = {
        "rps_ratio_to_floor": plain["captured"]["rps"] / plain["floor"]["rps"],
        "stream_rps_ratio_to_floor": stream["captured"]["rps"] / stream["floor"]["rps"],
        "uncaptured_rps_ratio_to_floor": plain["uncaptured"]["rps"] / plain["floor"]["rps"],
        "uncaptured_stream_rps_ratio_to_floor": stream["uncaptured"]["rps"] / stream["floor"]["rps"],
        "added_latency_ratio_to_floor": (one["captured"]["whole"] - one["direct"]["whole"])
        / (one["floor"]["whole"] - one["direct"]["whole"]),
        "ttft_added_ms": (one_stream["captured"]["first"] - one_stream["direct"]["first"]) * 1e3,
    }
    for peer in ("litellm", "agent lightning"):
        if peer in plain:
            name = peer.replace(" ", "_")
            found[f"rps_ratio_to_{name}"] = plain["captured"]["rps"] / plain[peer]["rps"]
            found[f"stream_rps_ratio_to_{name}"] = stream["captured"]["rps"] / stream[peer]["rps"]
    return found


def recorded(folder: Path) -> int:
    """Calls in the store that have their answer."""
    with closing(sqlite3.connect(f"file:{folder / 'store.sqlite'}?mode=ro", uri=True)) as store:
        return int(store.execute("SELECT count(*) FROM calls WHERE status = ?", [CallStatus.OK.value]).fetchone()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="one short repeat of few cases")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case (default: 5)")
    parser.add_argument("--repeats", type=int, default=3, help="of each case, in turn (default: 3)")
    parser.add_argument("--litellm", type=Path, metavar="PYTHON", help="interpreter with litellm[proxy]")
    parser.add_argument("--agent-lightning", type=Path, metavar="PYTHON", help="interpreter with agentlightning")
    options = parser.parse_args()
    with ExitStack() as stack:
        figures = asyncio.run(run(options, stack))
    for name, value in figures.items():
        if name != "cases":
            print(f"{name:40} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
