"""An engine that injects faults, the proxy in front of it over real HTTP, and clients of every kind.

FakeEngine speaks HTTP by hand and answers what a script says; a World has the proxy, its store and policy around it.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import uvicorn
from art_backends.config import Limits
from art_backends.errors import StoreError
from art_backends.proxy.app import Proxy
from art_backends.proxy.doors import Door
from art_backends.proxy.engine import Engine
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.identity import Identity, RolloutContext
from art_backends.proxy.providers import Providers
from art_backends.trajectories import Call, Purpose
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

WAIT = 10.0  # seconds: a deadline that is never needed
Behaviour = Callable[["FakeEngine", dict[str, Any], asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


# the engine behind


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeEngine:
    """HTTP/1.1 by hand, so that every fault can be made; answers of a chat call come from ``script``, in order."""

    script: deque[Behaviour] = field(default_factory=deque)
    asked: list[Asked] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    serving: set[Any] = field(default_factory=set)
    health: Behaviour | None = None  # of /health, else 200

    @property
    def chats(self) -> list[Asked]:
        return [item for item in self.asked if item.path.startswith("/v1/")]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                headers = {}
                while (row := (await reader.readline()).strip()) != b"":
                    name, _, value = row.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(raw) if raw else {}
                self.asked.append(Asked(path, headers, body))
                if path == "/health":
                    await (self.health or status(200, {}))(self, body, reader, writer)
                    continue
                if not path.startswith("/v1/"):
                    await send_json(writer, 404, {"error": {"message": "no such route"}})
                    continue
                behaviour = self.script.popleft() if self.script else answer("Hi")
                await behaviour(self, body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, Cut):
            pass
        finally:
            writer.transport.abort()


class Cut(Exception):
    """Close the connection now."""


async def send_json(
    writer: asyncio.StreamWriter, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    rows = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
    head = "".join(f"{name}: {text}\r\n" for name, text in rows.items())
    writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + content)
    await writer.drain()


def ids_of(text: str) -> list[int]:
    return [1000 + ord(c) for c in text] + [2]


def logprobs_of(ids: list[int]) -> dict[str, Any]:
    return {"content": [{"token": f"token_id:{i}", "logprob": -0.25, "bytes": [65], "top_logprobs": []} for i in ids]}


def answer(text: str, *, tool_calls: list[Any] | None = None, **changes: Any) -> Behaviour:
    """A whole reply as vLLM gives it, its own extras included; ids and logprobs as asked for."""

    async def behave(engine: FakeEngine, body: dict[str, Any], _r: Any, writer: asyncio.StreamWriter) -> None:
        if body.get("stream"):
            await sse(chunks(text, body))(engine, body, _r, writer)
            return
        ids = ids_of(text)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "reasoning": None, "tool_calls": tool_calls or []},
            "logprobs": logprobs_of(ids) if body.get("logprobs") else None,
            "finish_reason": "tool_calls" if tool_calls else "stop",
            "stop_reason": None,
            "token_ids": ids if body.get("return_token_ids") else None,
            "routed_experts": None,
        }
        choices = [{**choice, "index": i} for i in range(body.get("n") or 1)]
        reply = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": choices,
            "usage": {"prompt_tokens": 3, "completion_tokens": len(ids) * len(choices), "total_tokens": 9},
            "prompt_token_ids": [5, 6, 7] if body.get("return_token_ids") else None,
            "kv_transfer_params": None,
            "metrics": None,
            "prompt_logprobs": None,
            "x_new_field": {"kept": True},
        }
        await send_json(writer, 200, {**reply, **changes}, {"x-request-id": "req-7"})

    return behave


def chunk(choices: list[dict[str, Any]], **top: Any) -> bytes:
    return json.dumps(
        {"id": "c", "object": "chat.completion.chunk", "model": "p@3", "choices": choices, **top}
    ).encode()


def chunks(text: str, body: dict[str, Any], finish: str | None = "stop") -> list[bytes]:
    """A stream as vLLM sends it: one token a chunk, the end-of-turn token in a chunk of its own."""
    ids = ids_of(text)
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events = [chunk([first], prompt_token_ids=[5, 6, 7], prompt_text=None)]
    for letter, token in zip([*text, None], ids, strict=True):
        delta = {} if letter is None else {"content": letter}
        events.append(
            chunk(
                [
                    {
                        "index": 0,
                        "delta": delta,
                        "logprobs": logprobs_of([token]),
                        "finish_reason": None,
                        "token_ids": [token],
                    }
                ]
            )
        )
    if finish:
        events.append(chunk([{"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": None, "token_ids": []}]))
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(chunk([], usage={"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 9}))
    return [*events, b"[DONE]"]


def sse(
    events: list[bytes],
    *,
    cut: bool = False,
    raw: list[bytes] | None = None,
    hold_after: int | None = None,
    headers: str = "",
) -> Behaviour:
    """A stream of these events (or of ``raw`` writes). ``hold_after``: wait for release after so many."""

    async def behave(engine: FakeEngine, body: dict[str, Any], reader: Any, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{headers}"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for number, part in enumerate(raw or [b"data: " + event + b"\n\n" for event in events]):
            if number == hold_after:
                engine.reached.set()
                await until(engine.release, engine, reader)
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        if cut:
            raise Cut
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return behave


def status(code: int, error: Any, **headers: str) -> Behaviour:
    async def behave(_e: Any, _b: Any, _r: Any, writer: asyncio.StreamWriter) -> None:
        await send_json(writer, code, error, {name.replace("_", "-"): text for name, text in headers.items()})

    return behave


async def until(event: asyncio.Event, engine: FakeEngine, reader: asyncio.StreamReader) -> None:
    """Wait for the event, or notice that the proxy has hung up."""
    released, gone = asyncio.ensure_future(event.wait()), asyncio.ensure_future(reader.read(1))
    done, pending = await asyncio.wait({released, gone}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if gone in done:
        engine.aborted.set()
        raise Cut


async def hang(engine: FakeEngine, _body: Any, reader: asyncio.StreamReader, _writer: Any) -> None:
    engine.reached.set()
    await until(engine.release, engine, reader)


def after_release(text: str) -> Behaviour:
    async def behave(engine: FakeEngine, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hang(engine, body, reader, writer)
        await answer(text)(engine, body, reader, writer)

    return behave


async def slam(_e: Any, _b: Any, _r: Any, _w: Any) -> None:
    raise Cut


# what stands around the proxy


class MemoryStore:
    """A store whose writes can be made to fail or to wait; keeps the log of what was written, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Call]] = []
        self.by_id: dict[str, Call] = {}
        self.full = False
        self.finishing = asyncio.Event()
        self.allow = asyncio.Event()
        self.allow.set()
        self.reading = asyncio.Event()
        self.allow_read = asyncio.Event()
        self.allow_read.set()

    def begin_call(self, call: Call) -> None:
        if not self.full:  # nobody is told of an intent that could not be written
            self._write("begin", call)

    async def finish_call(self, call: Call) -> None:
        self.finishing.set()
        await self.allow.wait()
        self._write("finish", call)

    async def calls(self, rollout_id: str) -> list[Call]:
        self.reading.set()
        await self.allow_read.wait()
        return [call for call in self.by_id.values() if call.rollout_id == rollout_id]

    def _write(self, what: str, call: Call) -> None:
        if self.full:
            raise StoreError("no space left on device")
        call = Call.model_validate_json(call.model_dump_json())  # what cannot be stored is an error here too
        self.log.append((what, call))
        self.by_id[call.id] = call

    @property
    def all(self) -> list[Call]:
        return sorted(self.by_id.values(), key=lambda call: call.sequence)

    @property
    def only(self) -> Call:
        (call,) = self.by_id.values()
        return call


class Policy:
    name = "policy"

    def __init__(self) -> None:
        self.models: list[str] = []
        self.in_flight: Counter[str] = Counter()
        self.idle = asyncio.Event()  # no call is in flight
        self.newest = 4

    def version_of(self, model: str) -> str:
        return model if model.startswith("policy@") else f"policy@{self.newest}"

    def claims(self, model: str) -> bool:
        return model in self.models

    def answers(self, model: str) -> bool:
        return not self.models or model in self.models

    @contextmanager
    def lease(self, version: str) -> Any:
        self.in_flight[version] += 1
        self.idle.clear()
        try:
            yield "base" if version.endswith("@0") else version
        finally:
            self.in_flight[version] -= 1
            if not self.in_flight.total():
                self.idle.set()


@dataclass
class World:
    engine: FakeEngine
    store: MemoryStore
    policy: Policy
    proxy: Proxy
    identities: dict[str, Identity]
    url: str
    port: int
    engine_url: str
    clients: list[httpx2.AsyncClient]
    sockets: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def context(self) -> RolloutContext:
        context = self.identities["train"].rollout
        assert context is not None
        return context

    def sdk(self, token: str = "train", *, straight: bool = False, **options: Any) -> openai.AsyncOpenAI:
        """The openai SDK on the proxy, or ``straight`` on the engine."""
        client = httpx2.AsyncClient(trust_env=False)
        self.clients.append(client)
        options = {"max_retries": 0, "timeout": WAIT, **options}
        url = self.engine_url if straight else self.url
        return openai.AsyncOpenAI(base_url=url + "/v1", api_key=token, http_client=client, **options)

    @property
    def http(self) -> httpx2.AsyncClient:
        client = httpx2.AsyncClient(
            base_url=self.url, headers={"authorization": "Bearer train"}, trust_env=False, timeout=WAIT
        )
        self.clients.append(client)
        return client

    async def raw(
        self, body: Any, token: str = "train", headers: str = "", path: str = "/v1/chat/completions"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request by hand, for clients that misbehave."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self.connect()
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n{headers}"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        await writer.drain()
        return reader, writer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of a client that writes its requests by hand."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.sockets.append(writer)
        return reader, writer

    async def idle(self) -> None:
        """Until no call is in flight any more."""
        await asyncio.wait_for(self.policy.idle.wait(), WAIT)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none")
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
        assert not task.done()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(task, WAIT)


@asynccontextmanager
async def world(
    engine_url: str,
    engine: FakeEngine,
    limits: Limits | None = None,
    providers: Providers | None = None,
    client: Engine | None = None,
    policy: Any = None,
    **context: Any,
) -> AsyncIterator[World]:
    """``client``: the proxy's engine, closed in the end; else ``engine_url`` alone."""
    store, policy = MemoryStore(), policy or Policy()
    client = client or EngineClient(url=engine_url)
    proxy = Proxy(client, store, policy=policy, limits=limits, providers=providers)
    train = RolloutContext("r1", "policy", "policy@3", **context)
    identities = {
        "train": Identity("rollout", train),
        "eval": Identity("rollout", RolloutContext("r2", "policy", "policy@0", Purpose.EVAL)),
        "agent": Identity("agent"),
    }

    def who(request: Request) -> Identity:
        key = request.headers.get("authorization") or request.headers["x-api-key"]
        return identities[key.removeprefix("Bearer ")]

    def through(door: Door) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await door.answer(request, who(request))

        return answer

    routes = [Route(door.path, through(door), methods=[door.method]) for door in proxy.doors.all]
    async with serving(Starlette(routes=routes)) as port:
        made = World(engine, store, policy, proxy, identities, f"http://127.0.0.1:{port}", port, engine_url, [])
        try:
            yield made
        finally:
            for writer in made.sockets:
                writer.transport.abort()
            for item in made.clients:
                await item.aclose()
            engine.release.set()
    await client.aclose()


@asynccontextmanager
async def faked(limits: Limits | None = None, **context: Any) -> AsyncIterator[World]:
    engine = FakeEngine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        async with world(f"http://127.0.0.1:{port}", engine, limits, **context) as made:
            yield made
    finally:
        server.close()
        for task in engine.serving:
            task.cancel()
        await asyncio.gather(*engine.serving, return_exceptions=True)
        await asyncio.sleep(0)  # transports say goodbye in the next turn of the loop


USER = [{"role": "user", "content": "Hello"}]


async def say(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(**{"model": "gpt-4o-mini", "messages": USER, **options})


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]
