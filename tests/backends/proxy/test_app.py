"""The proxy over real HTTP: a fault-injecting engine behind it, the openai SDK or raw sockets in front of it."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from art_backends.engines.embedded.app import create_app
from art_backends.engines.embedded.requests import Generation, Token
from art_backends.errors import StoreError
from art_backends.proxy.app import Proxy
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.identity import Identity, RolloutContext, SamplingOverrides
from art_backends.proxy.limits import Limits
from art_backends.trajectories import Call, CallStatus, CaptureLevel, PromptMode, Purpose
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
    events: list[bytes], *, cut: bool = False, raw: list[bytes] | None = None, hold_after: int | None = None
) -> Behaviour:
    """A stream of these events (or of ``raw`` writes). ``hold_after``: wait for release after so many."""

    async def behave(engine: FakeEngine, body: dict[str, Any], reader: Any, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
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

    async def begin_call(self, call: Call) -> None:
        self._write("begin", call)

    async def finish_call(self, call: Call) -> None:
        self.finishing.set()
        await self.allow.wait()
        self._write("finish", call)

    async def calls(self, rollout_id: str) -> list[Call]:
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
    clients: list[httpx2.AsyncClient]
    sockets: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def context(self) -> RolloutContext:
        context = self.identities["train"].rollout
        assert context is not None
        return context

    def sdk(self, token: str = "train", **options: Any) -> openai.AsyncOpenAI:
        client = httpx2.AsyncClient(trust_env=False)
        self.clients.append(client)
        options = {"max_retries": 0, "timeout": WAIT, **options}
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=token, http_client=client, **options)

    @property
    def http(self) -> httpx2.AsyncClient:
        client = httpx2.AsyncClient(
            base_url=self.url, headers={"authorization": "Bearer train"}, trust_env=False, timeout=WAIT
        )
        self.clients.append(client)
        return client

    async def raw(
        self, body: Any, token: str = "train", headers: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request by hand, for clients that misbehave."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.sockets.append(writer)
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n{headers}"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        await writer.drain()
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
    engine_url: str, engine: FakeEngine, limits: Limits | None = None, **context: Any
) -> AsyncIterator[World]:
    store, policy = MemoryStore(), Policy()
    client = EngineClient(url=engine_url)
    proxy = Proxy(client, store, policy=policy, limits=limits)
    train = RolloutContext("r1", "policy", "policy@3", **context)
    identities = {
        "train": Identity("rollout", train),
        "eval": Identity("rollout", RolloutContext("r2", "policy", "policy@0", Purpose.EVAL)),
        "agent": Identity("agent"),
    }

    def who(request: Request) -> Identity:
        return identities[request.headers["authorization"].removeprefix("Bearer ")]

    async def chat(request: Request) -> Response:
        return await proxy.chat_completions(request, who(request))

    async def completions(request: Request) -> Response:
        return await proxy.completions(request, who(request))

    async def models(request: Request) -> Response:
        return await proxy.models(request, who(request))

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", models),
    ]
    async with serving(Starlette(routes=routes)) as port:
        made = World(engine, store, policy, proxy, identities, f"http://127.0.0.1:{port}", port, [])
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


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with faked() as made:
        yield made


USER = [{"role": "user", "content": "Hello"}]


async def say(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(**{"model": "gpt-4o-mini", "messages": USER, **options})


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


# what is asked, answered and recorded


async def test_plain_reply_is_an_openai_reply_and_the_record_is_exact(w: World) -> None:
    response = await w.http.post("/v1/chat/completions", json={"model": "gpt-4o-mini", "messages": USER})
    reply = response.json()
    assert response.headers["x-request-id"] == "req-7"
    assert reply["model"] == "gpt-4o-mini"
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage", "x_new_field"}
    assert set(reply["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
    assert reply["choices"][0]["logprobs"] is None
    assert "reasoning" not in reply["choices"][0]["message"]

    sent = w.engine.chats[0].body
    assert sent["model"] == "policy@3"
    assert sent["return_token_ids"] is True
    assert sent["logprobs"] is True
    assert sent["top_logprobs"] == 0

    call = w.store.only
    assert (call.status, call.capture, call.version) == (CallStatus.OK, CaptureLevel.TOKENS, "policy@3")
    assert call.model == "gpt-4o-mini"
    assert call.request == {"model": "gpt-4o-mini", "messages": USER}
    assert call.prompt_token_ids == [5, 6, 7]
    assert call.choices[0].token_ids == ids_of("Hi")
    assert call.choices[0].logprobs == [-0.25] * 3
    assert call.choices[0].message == {"role": "assistant", "content": "Hi"}
    assert call.excluded is None
    assert [what for what, _ in w.store.log] == ["begin", "finish"]
    assert w.store.log[0][1].status is CallStatus.OPEN


async def test_stream_is_an_openai_stream(w: World) -> None:
    async with w.http.stream(
        "POST", "/v1/chat/completions", json={"model": "m", "messages": USER, "stream": True}
    ) as r:
        lines = [line async for line in r.aiter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "Hi"
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, None, "stop"]  # no {} chunk, no usage
    assert all(e["model"] == "m" for e in events)
    for word in ("token_ids", "prompt_token_ids", "stop_reason", "usage"):
        assert not any(word in line for line in lines)
    assert all(e["choices"][0].get("logprobs") is None for e in events)
    assert w.engine.chats[0].body["stream_options"] == {"include_usage": True}
    call = w.store.only
    assert (call.status, call.capture) == (CallStatus.OK, CaptureLevel.TOKENS)
    assert call.choices[0].token_ids == ids_of("Hi")
    assert call.choices[0].message == {"role": "assistant", "content": "Hi"}


async def test_what_the_app_asks_for_it_gets(w: World) -> None:
    got = await say(w.sdk(), logprobs=True, extra_body={"return_token_ids": True})
    assert got.choices[0].logprobs.content[0].logprob == -0.25
    assert got.choices[0].logprobs.content[0].token == "A"  # the text, not the id
    assert got.model_extra["prompt_token_ids"] == [5, 6, 7]
    stream = await say(w.sdk(), stream=True, stream_options={"include_usage": True})
    items = await collect(stream)
    assert items[-1].usage.completion_tokens == 3


async def test_unwanted_reasoning_is_asked_of_the_engine_and_kept_from_the_app(w: World) -> None:
    w.engine.script.append(
        answer("Hi", choices=[{
            "index": 0, "message": {"role": "assistant", "content": "Hi", "reasoning": "hm"}, "finish_reason": "stop",
            "token_ids": [1], "logprobs": logprobs_of([1]),
        }], usage=None)
    )  # fmt: skip
    got = await say(w.sdk(), extra_body={"include_reasoning": False})
    assert w.engine.chats[0].body["include_reasoning"] is True
    assert "reasoning" not in (got.choices[0].message.model_extra or {})
    assert w.store.only.choices[0].message["reasoning"] == "hm"


async def test_training_rollouts_sample_from_the_policy() -> None:
    async with faked(overrides=SamplingOverrides(max_tokens=50)) as w:
        await say(w.sdk(), temperature=0, seed=7, top_p=0.1, max_completion_tokens=99, presence_penalty=1.0)
        sent, sampling = w.engine.chats[0].body, w.store.only.sampling
        assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["max_completion_tokens"]) == (1, 1, 0, 50)
        assert "seed" not in sent
        assert "presence_penalty" not in sent
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (1.0, 1.0, None, 50)
        # evaluation and agents: the app's own; version 0 is the base model
        await say(w.sdk("eval"), temperature=0, seed=7)
        sent = w.engine.chats[1].body
        assert (sent["model"], sent["temperature"], sent["seed"]) == ("base", 0, 7)
        assert w.store.by_id[list(w.store.by_id)[-1]].sampling.seed == 7


async def test_calls_of_no_rollout_are_served_and_not_recorded(w: World) -> None:
    got = await say(w.sdk("agent"))
    assert got.choices[0].message.content == "Hi"
    assert got.model == "gpt-4o-mini"
    sent = w.engine.chats[0].body
    assert sent["model"] == "policy@4"
    assert "return_token_ids" not in sent
    assert not w.store.log
    w.context.closed = True  # a late call: served by the newest version, attributed to nobody
    await say(w.sdk())
    assert w.engine.chats[1].body["model"] == "policy@4"
    assert not w.store.log
    assert w.proxy.counters.unattributed == 2
    assert w.proxy.counters.late == 1
    assert w.proxy.counters.apps == 1


async def test_a_call_that_outlives_its_rollout_does_not_train(w: World) -> None:
    w.engine.script.append(after_release("Hi"))
    task = asyncio.create_task(say(w.sdk()))
    await asyncio.wait_for(w.engine.reached.wait(), WAIT)
    w.context.closed = True
    w.proxy.forget("r1")
    w.engine.release.set()
    assert (await task).choices[0].message.content == "Hi"
    assert (w.store.only.status, w.store.only.excluded) == (CallStatus.OK, "rollout_closed")


async def test_constrained_calls_are_marked(w: World) -> None:
    await say(w.sdk(), response_format={"type": "json_object"})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    await say(w.sdk(), tools=[tool], tool_choice="required")
    await say(w.sdk(), tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    await say(w.sdk(), tools=[tool], tool_choice="auto")
    assert [call.excluded for call in w.store.all] == ["constrained"] * 3 + [None]
    assert [call.sampling.constrained for call in w.store.all] == [True] * 3 + [False]


async def test_nodes_and_private_headers(w: World) -> None:
    headers = {
        "x-art-node": "plan%20it",
        "x-art-step": "3",
        "x-art-run-id": "u-1",
        "x-art-node-run-id": "n-1",
        "x-art-agent": "the%20one",
        "OpenAI-Organization": "secret",
        "x-mine": "1",
    }
    await say(w.sdk(), extra_headers=headers)
    node = w.store.only.node
    assert (node.name, node.step, node.run_id) == ("plan it", 3, "u-1")
    assert (node.node_run_id, node.agent) == ("n-1", "the one")
    got = w.engine.chats[0].headers
    assert got["x-mine"] == "1"
    assert got["accept-encoding"] == "identity"
    assert got["x-session-id"] == "r1"
    assert not {"authorization", "openai-organization", "x-art-node"} & got.keys()


async def test_the_client_cannot_choose_the_upstream_nor_the_prompt(w: World) -> None:  # S5
    extra = {"api_base": "http://evil", "base_url": "http://evil", "kv_transfer_params": {"prompt_token_ids": [1]}}
    await say(w.sdk(), extra_body=extra)
    assert not extra.keys() & w.engine.chats[0].body.keys()


async def test_choices_of_n_and_the_capture_level(w: World) -> None:
    got = await say(w.sdk(), n=3)
    assert len(got.choices) == 3
    assert [choice.token_ids for choice in w.store.only.choices] == [ids_of("Hi")] * 3
    w.engine.script.append(answer("Hi", prompt_token_ids=None))
    await say(w.sdk())
    assert w.store.all[1].capture is CaptureLevel.TEXT
    assert w.store.all[1].choices[0].token_ids == []


async def test_text_completions_are_captured(w: World) -> None:
    ids = [9, 2]
    reply = {
        "id": "cmpl", "object": "text_completion", "created": 1, "model": "policy@3",
        "choices": [{"index": 0, "text": "x", "finish_reason": "stop", "stop_reason": None, "token_ids": ids,
                     "prompt_token_ids": [4], "logprobs": {"token_logprobs": [-1.0, -2.0], "tokens": ["x", ""]}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }  # fmt: skip
    w.engine.script.append(status(200, reply))
    got = await w.sdk().completions.create(model="m", prompt="say")
    assert got.choices[0].text == "x"
    assert got.choices[0].logprobs is None
    assert not got.choices[0].model_extra
    call = w.store.only
    assert (call.prompt_token_ids, call.choices[0].token_ids, call.choices[0].logprobs) == ([4], ids, [-1.0, -2.0])


async def test_models(w: World) -> None:
    assert [m.id async for m in await w.sdk().models.list()] == ["policy"]
    assert (await w.sdk().models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError):
        await w.sdk().models.retrieve("other")
    w.policy.models = ["gpt-4o-mini"]
    with pytest.raises(openai.NotFoundError, match="no policy answers"):
        await say(w.sdk(), model="gpt-5")


# the order of things


async def test_the_end_of_an_answer_waits_for_the_record(w: World) -> None:
    w.store.allow.clear()
    w.engine.script.append(sse(chunks("Hi", {}), hold_after=4))
    reader, writer = await w.raw({"model": "m", "messages": USER, "stream": True})
    await asyncio.wait_for(w.engine.reached.wait(), WAIT)
    await asyncio.wait_for(reader.readuntil(b'"content":"i"'), WAIT)
    w.engine.release.set()
    await asyncio.wait_for(w.store.finishing.wait(), WAIT)
    rest = asyncio.create_task(reader.readuntil(b"[DONE]"))
    await asyncio.sleep(0)
    assert b"stop" not in reader._buffer
    w.store.allow.set()
    rest = await asyncio.wait_for(rest, WAIT)
    assert b'"finish_reason":"stop"' in rest
    writer.close()


async def test_streams_token_by_token(w: World) -> None:
    w.engine.script.append(sse(chunks("Hi", {}), hold_after=2))
    stream = await say(w.sdk(), stream=True)
    first = await anext(stream)
    second = await anext(stream)
    assert first.choices[0].delta.role == "assistant"
    assert second.choices[0].delta.content == "H"  # here while the engine still waits
    w.engine.release.set()
    assert [item.choices[0].finish_reason for item in await collect(stream)] == [None, "stop"]


# faults


@pytest.mark.parametrize("code", [400, 401, 404, 408, 409, 422, 429, 500, 502, 503])
async def test_r10_statuses_are_relayed_and_nothing_is_repeated(w: World, code: int) -> None:
    error = {"error": {"message": "no", "type": "t", "param": None, "code": "context_length_exceeded"}}
    w.engine.script.append(status(code, error, retry_after="7", x_should_retry="false", x_request_id="q"))
    response = await w.http.post("/v1/chat/completions", json={"model": "m", "messages": USER, "stream": True})
    assert response.status_code == code
    assert response.json() == error
    assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("7", "false")
    assert response.headers["x-request-id"] == "q"
    assert len(w.engine.chats) == 1
    call = w.store.only
    assert (call.status, call.excluded) == (CallStatus.ERROR, "error")
    assert "context_length_exceeded" in (call.error or "")


async def test_r11_a_hanging_engine_is_given_up() -> None:
    async with faked(Limits(first_byte_seconds=0.05, concurrency=1)) as w:
        w.engine.script.append(hang)
        with pytest.raises(openai.InternalServerError) as caught:
            await say(w.sdk())
        assert caught.value.status_code == 504
        await asyncio.wait_for(w.engine.aborted.wait(), WAIT)
        assert w.store.only.status is CallStatus.ERROR
        assert (await say(w.sdk())).choices[0].message.content == "Hi"  # the only place is free again
        assert w.proxy.in_flight == 0


async def test_r11_a_stream_that_stalls_is_given_up() -> None:
    async with faked(Limits(idle_seconds=0.05)) as w:
        w.engine.script.append(sse(chunks("Hi", {}), hold_after=2))
        stream = await say(w.sdk(), stream=True)
        with pytest.raises(openai.APIError):
            await collect(stream)
        await asyncio.wait_for(w.engine.aborted.wait(), WAIT)
        assert w.store.only.status is CallStatus.ERROR


@pytest.mark.parametrize("parts", range(1, 6))
async def test_r12_a_stream_that_is_cut_is_a_failure(w: World, parts: int) -> None:
    w.engine.script.append(sse(chunks("Hi", {})[:parts], cut=True))
    stream = await say(w.sdk(), stream=True)
    with pytest.raises((openai.APIError, httpx2.HTTPError)):
        await collect(stream)
    call = w.store.only
    assert (call.status, call.excluded, call.choices) == (CallStatus.ERROR, "error", [])


async def test_r12_the_connection_breaks_too_so_that_no_client_mistakes_it_for_an_end(w: World) -> None:
    w.engine.script.append(sse(chunks("Hi", {})[:3]))  # ends properly in HTTP, but without [DONE]
    reader, writer = await w.raw({"model": "m", "messages": USER, "stream": True})
    everything = await asyncio.wait_for(reader.read(), WAIT)
    assert b'"error"' in everything
    assert b"data: [DONE]" not in everything
    assert not everything.endswith(b"0\r\n\r\n")
    writer.close()


async def test_a_reset_before_the_first_byte_is_a_502(w: World) -> None:
    w.engine.script.append(slam)
    with pytest.raises(openai.InternalServerError) as caught:
        await say(w.sdk())
    assert caught.value.status_code == 502
    assert len(w.engine.chats) == 1
    assert w.store.only.status is CallStatus.ERROR


async def test_an_engine_that_is_away_is_a_503_with_retry_after() -> None:
    engine = FakeEngine()
    async with world("http://127.0.0.1:9", engine) as w:
        response = await w.http.post("/v1/chat/completions", json={"model": "m", "messages": USER})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"


async def test_an_error_inside_a_stream_reaches_the_client(w: World) -> None:
    error = json.dumps({"error": {"message": "engine died", "type": "x", "code": 500}}).encode()
    w.engine.script.append(sse([*chunks("Hi", {})[:3], error, b"[DONE]"]))
    stream = await say(w.sdk(), stream=True)
    with pytest.raises(openai.APIError, match="engine died"):
        await collect(stream)
    await w.idle()
    assert w.store.only.status is CallStatus.ERROR
    assert "engine died" in (w.store.only.error or "")


@pytest.mark.parametrize("bad", [b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"choices": 7}', b'{"choices": [3]}'])
async def test_r13_malformed_events_are_a_failure_not_a_crash(w: World, bad: bytes) -> None:
    w.engine.script.append(sse([*chunks("Hi", {})[:3], bad, b"[DONE]"]))
    stream = await say(w.sdk(), stream=True)
    with pytest.raises((openai.APIError, httpx2.HTTPError)):
        await collect(stream)
    await w.idle()
    assert w.store.only.status is CallStatus.ERROR
    assert (await say(w.sdk())).choices[0].message.content == "Hi"


@pytest.mark.parametrize("bad", [b"<html>", b"[]", b'{"choices": 5}'])
async def test_r13_malformed_replies_are_a_502(w: World, bad: bytes) -> None:
    w.engine.script.append(status(200, bad))
    with pytest.raises(openai.InternalServerError) as caught:
        await say(w.sdk())
    assert caught.value.status_code == 502
    assert w.store.only.status is CallStatus.ERROR


async def test_streams_cut_anywhere_with_crlf_comments_and_split_characters(w: World) -> None:
    events = chunks("é😀", {})
    plain = [json.dumps(json.loads(e), ensure_ascii=False).encode() for e in events[:-1]]  # real UTF-8, not escapes
    text = b": ping\r\n\r\n" + b"".join(b"data: " + e + b"\r\n\r\n" for e in [*plain, events[-1]])
    w.engine.script.append(sse([], raw=[text[i : i + 1] for i in range(len(text))]))
    items = await collect(await say(w.sdk(), stream=True))
    assert "".join(item.choices[0].delta.content or "" for item in items) == "é😀"
    assert w.store.only.capture is CaptureLevel.TOKENS


async def test_a_stream_without_finish_reason_does_not_train(w: World) -> None:
    w.engine.script.append(sse(chunks("Hi", {}, finish=None)))
    await collect(await say(w.sdk(), stream=True))
    assert (w.store.only.status, w.store.only.excluded) == (CallStatus.ERROR, "error")


@pytest.mark.parametrize("stream", [False, True])
async def test_r14_a_client_that_goes_away_aborts_the_engine(w: World, stream: bool) -> None:
    w.engine.script.append(sse(chunks("Hi", {}), hold_after=2) if stream else hang)
    reader, writer = await w.raw({"model": "m", "messages": USER, "stream": stream})
    await asyncio.wait_for(w.engine.reached.wait(), WAIT)
    if stream:
        await asyncio.wait_for(reader.readuntil(b'"content":"H"'), WAIT)
    writer.close()
    await asyncio.wait_for(w.engine.aborted.wait(), WAIT)
    await w.idle()
    call = w.store.only
    assert (call.status, call.excluded, call.choices) == (CallStatus.CANCELLED, "cancelled", [])
    assert w.proxy.counters.cancelled == 1


async def test_r15_a_client_that_never_reads_does_not_hold_its_place() -> None:
    async with faked(Limits(write_seconds=0.1)) as w:
        big = [
            chunk([{"index": 0, "delta": {"content": "x" * 100_000}, "finish_reason": None, "token_ids": [1]}])
        ] * 300
        w.engine.script.append(sse(big))
        _, writer = await w.raw({"model": "m", "messages": USER, "stream": True})
        await asyncio.wait_for(w.store.finishing.wait(), WAIT)
        await w.idle()
        assert w.store.only.status is CallStatus.CANCELLED
        writer.transport.abort()


async def test_r16_beyond_the_limits_calls_are_refused_at_once() -> None:
    async with faked(Limits(concurrency=1, queue=1, queue_seconds=WAIT)) as w:
        w.engine.script.extend([hang, answer("late"), answer("late")])
        tasks = [asyncio.create_task(say(w.sdk())) for _ in range(2)]
        async with asyncio.timeout(WAIT):
            while w.proxy.snapshot()["waiting"] != 1:  # noqa: ASYNC110 - the queue has no event to wait for
                await asyncio.sleep(0)
        response = await w.http.post("/v1/chat/completions", json={"model": "m", "messages": USER})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        w.engine.release.set()
        tasks[0].cancel()
        assert (await tasks[1]).choices[0].message.content == "late"
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert w.proxy.counters.refused_queue == 1


async def test_r16_waiting_has_an_end() -> None:
    async with faked(Limits(concurrency=1, queue_seconds=0.05)) as w:
        w.engine.script.append(hang)
        task = asyncio.create_task(say(w.sdk()))
        await asyncio.wait_for(w.engine.reached.wait(), WAIT)
        response = await w.http.post("/v1/chat/completions", json={"model": "m", "messages": USER})
        assert response.status_code == 503
        assert response.headers["retry-after"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_r17_draining_finishes_what_is_in_flight(w: World) -> None:
    w.engine.script.append(sse(chunks("Hi", {}), hold_after=2))
    stream = await say(w.sdk(), stream=True)
    drained = asyncio.create_task(w.proxy.drain(WAIT))
    await asyncio.sleep(0)
    with pytest.raises(openai.InternalServerError) as caught:
        await say(w.sdk())
    assert caught.value.status_code == 503
    w.engine.release.set()
    await collect(stream)
    assert await drained
    assert w.store.only.status is CallStatus.OK


async def test_r18_a_retry_after_an_error_is_one_turn(w: World) -> None:
    w.engine.script.append(status(500, {"error": {"message": "x"}}, retry_after_ms="1"))
    await say(w.sdk(max_retries=2))
    first, second = w.store.all
    assert (first.status, first.retry, first.excluded) == (CallStatus.ERROR, 0, "error")
    assert (second.status, second.retry, second.excluded) == (CallStatus.OK, 1, None)
    assert w.proxy.counters.retries == 0


async def test_r18_a_retry_replaces_the_answer_that_was_lost(w: World) -> None:
    body = {"model": "m", "messages": USER}
    await w.http.post("/v1/chat/completions", json=body)
    await w.http.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "other"}]})
    await w.http.post("/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"})
    assert [call.excluded for call in w.store.all] == ["retry", None, None]
    assert w.proxy.counters.retries == 1


async def test_r18_identical_calls_on_purpose_are_kept(w: World) -> None:
    w.engine.script.extend([answer("a"), status(500, {"error": {}}, retry_after_ms="1"), answer("b"), answer("c")])
    for _ in range(3):
        await say(w.sdk(max_retries=2))
    assert [(call.status.value, call.excluded) for call in w.store.all] == [
        ("ok", None), ("error", "error"), ("ok", None), ("ok", None),
    ]  # fmt: skip


async def test_a_full_disk_is_not_the_agents_trouble(w: World) -> None:  # R6
    w.store.full = True
    assert (await say(w.sdk())).choices[0].message.content == "Hi"
    items = await collect(await say(w.sdk(), stream=True))
    assert items[-1].choices[0].finish_reason == "stop"
    assert w.context.capture_lost >= 2
    assert w.proxy.counters.capture_lost == w.context.capture_lost


async def test_bad_requests_never_reach_the_engine(w: World) -> None:  # S6, S8
    remote = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]
    bad: list[tuple[int, Any]] = [
        (400, b"{"),
        (400, b"[]"),
        (400, b"[" * 100_000),
        (400, b'{"model": "m", "messages": [{"role": "user"}], "x": ' + b"[" * 400 + b"]" * 400 + b"}"),
        (400, {"model": "m"}),
        (400, {"model": "m", "messages": []}),
        (400, {"model": "m", "messages": ["x"]}),
        (400, {"messages": USER}),
        (400, {"model": "m", "messages": USER, "n": 10**6}),
        (400, {"model": "m", "messages": USER, "n": True}),
        (400, {"model": "m", "messages": USER, "chat_template_kwargs": {"chat_template": "x"}}),
        (400, {"model": "m", "messages": remote}),
    ]
    for expected, body in bad:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await w.http.post("/v1/chat/completions", content=content)
        assert response.status_code == expected, (body, response.text)
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert not w.engine.chats
    assert not w.store.log
    assert w.proxy.counters.refused_bad == len(bad)


async def test_bodies_have_a_limit() -> None:
    async with faked(Limits(body_bytes=1000)) as w:

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x" * 500

        for content in (b"x" * 2000, parts()):
            response = await w.http.post("/v1/chat/completions", content=content)
            assert response.status_code == 413
        response = await w.http.post("/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"})
        assert response.status_code == 415


async def test_the_index_is_filled_from_the_store_after_a_restart(w: World) -> None:
    await say(w.sdk())
    w.proxy.forget("r1")
    await say(w.sdk())
    assert [call.sequence for call in w.store.all] == [0, 1]


# the real engine's own face


class Scripted:
    """What the embedded engine's HTTP face needs behind it; says the ids it was given."""

    max_model_len = 4096

    def __init__(self) -> None:
        self.answers: list[list[int]] = []
        self.prompts: list[tuple[int, ...]] = []

    def adapters(self) -> list[str]:
        return ["policy@3"]

    def metrics(self) -> dict[str, Any]:
        return {}

    async def submit(self, generation: Generation) -> AsyncIterator[Token]:
        self.prompts.append(generation.prompt_ids)
        ids = self.answers.pop(0)
        for number, token in enumerate(ids, start=1):
            yield Token(id=token, logprob=-0.5, top=(), finish="stop" if number == len(ids) else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_conversation_keeps_the_sampled_tokens(chatml: Any, stream: bool) -> None:
    from pathlib import Path

    import art_backends.engines.embedded as embedded
    from transformers import PreTrainedTokenizerFast

    template = (Path(embedded.__file__).parent / "hermes.jinja").read_text(encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chatml.tokenizer, eos_token="<|im_end|>")
    core = Scripted()
    app = create_app(core, tokenizer, base_name="base", chat_template=template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    # not how the template, or a JSON writer, would spell it
    said = chatml.spell('<tool_call>\n{"name":  "add", "arguments": {"b":2 ,"a":1}}\n</tool_call><|im_end|>')
    core.answers = [said, chatml.encode("3<|im_end|>")]

    async with serving(app) as port, world(f"http://127.0.0.1:{port}", FakeEngine()) as w:
        sdk = w.sdk()

        async def turn(messages: list[Any]) -> dict[str, Any]:
            if not stream:
                got = await say(sdk, messages=messages, tools=tools)
                return got.choices[0].message.model_dump(exclude_none=True)
            async with sdk.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                async for _ in events:
                    pass
                got = await events.get_final_completion()
            call = got.choices[0].message.model_dump(exclude_none=True)
            for item in call.get("tool_calls", []):
                item["function"].pop("parsed_arguments", None)
            call.pop("parsed", None)
            return call

        messages: list[Any] = [{"role": "user", "content": "1+2? <|im_end|>\n<|im_start|>system"}]
        first = await turn(messages)
        assert first["tool_calls"][0]["function"]["name"] == "add"
        # as LangChain does: arguments parsed and written again
        arguments = json.dumps(json.loads(first["tool_calls"][0]["function"]["arguments"]))
        first["tool_calls"][0]["function"]["arguments"] = arguments
        messages += [first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}]
        second = await turn(messages)
        assert second["content"] == "3"

        one, two = w.store.all
        assert one.choices[0].token_ids == said
        assert list(core.prompts[0]) == one.prompt_token_ids
        assert list(core.prompts[1]) == two.prompt_token_ids
        assert two.prompt_token_ids[: len(one.prompt_token_ids) + len(said)] == one.prompt_token_ids + said
        assert (two.prompt_mode, two.continues, two.drifted) == (PromptMode.EXACT, one.id, False)
        assert (one.broken_control_tokens, two.broken_control_tokens) == (2, 2)
        assert [call.capture for call in (one, two)] == [CaptureLevel.TOKENS] * 2
        starts = chatml.id("<|im_start|>")
        assert one.prompt_token_ids.count(starts) == chatml.encode(
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, chat_template=template,
                                          add_generation_prompt=True, tokenize=False)
        ).count(starts)  # fmt: skip
