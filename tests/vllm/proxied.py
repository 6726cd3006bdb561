"""The server's parts around a real vLLM, in this process: policy table, adapters, proxy on a port, store in a file."""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from art_backends.engines.embedded.text import Vocabulary
from art_backends.proxy.app import Proxy
from art_backends.proxy.doors import Door
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.identity import Identity, RolloutContext
from art_backends.server import probe, probe_reasoning, probe_sampling
from art_backends.server.adapters import Adapters
from art_backends.server.policy import PolicyTable
from art_backends.store import AsyncStore
from art_backends.trajectories import Call, Purpose, Rollout, version_name
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import AutoTokenizer

from tests.backends.proxy.fake_engine import serving as on_a_port
from tests.vllm.serving import Vllm

PIECE = 5  # characters; the fewer, the odder and the slower
SECONDS = 300.0  # for an answer: the first one of a kind is slow on a CPU

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


class Engine(EngineClient):
    """vLLM tells nothing of its tokenizer; the trainer does, from the model's files. Here it is told in its place."""

    def __init__(self, uds: str, told: Mapping[str, Any]) -> None:
        super().__init__(uds=uds)
        self._told = dict(told)

    async def tokenizer_info(self) -> dict[str, Any] | None:
        return self._told


@dataclass
class Answer:
    """What a client got: the whole reply or every chunk, and the messages put together as a client does."""

    status: int
    raw: list[dict[str, Any]]
    messages: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish: dict[int, str | None] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any]:
        return self.messages[0]

    @property
    def fields(self) -> set[str]:
        """Every key at the top, in a choice, in a message and in a delta."""
        found: set[str] = set()
        for data in self.raw:
            found |= set(data)
            for choice in data.get("choices") or ():
                found |= set(choice) | set(choice.get("message") or ()) | set(choice.get("delta") or ())
        return found


@dataclass
class Turns:
    """One open rollout and whoever plays in it."""

    w: Proxied
    context: RolloutContext
    key: str

    async def ask(self, messages: Sequence[Any], *, stream: bool = False, **more: Any) -> Answer:
        body = {"model": "gpt-4o-mini", "messages": list(messages), **more}
        if stream:
            body["stream"] = True
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.w.url, trust_env=False, timeout=SECONDS) as client:
            reply = await client.post("/v1/chat/completions", json=body, headers=headers)
        return _streamed(reply) if stream and reply.status_code == 200 else _whole(reply)

    async def calls(self) -> list[Call]:
        return await self.w.store.calls(self.context.id)

    async def last(self) -> Call:
        return (await self.calls())[-1]


@dataclass
class Proxied:
    """A proxy that answers at ``url``."""

    vllm: Vllm
    engine: Engine
    store: AsyncStore
    policies: PolicyTable
    adapters: Adapters
    proxy: Proxy
    versions: Path
    url: str
    tokenizer: Any
    identities: dict[str, Identity]

    async def open(self, purpose: Purpose = Purpose.EVAL, version: int | None = None, **more: Any) -> Turns:
        """A rollout, pinned to a version; ``close`` it to unpin."""
        number = self.policies.newest if version is None else version
        self.policies.pin(number)
        name = version_name(self.policies.name, number)
        rollout = Rollout(id=uuid.uuid4().hex, policy=self.policies.name, version=name, purpose=purpose)
        await self.store.open_rollout(rollout)
        context = RolloutContext(rollout.id, self.policies.name, name, purpose=purpose, **more)
        key = f"key-{len(self.identities)}"
        self.identities[key] = Identity("rollout", context)
        return Turns(self, context, key)

    def close(self, turns: Turns) -> None:
        turns.context.closed = True
        number = self.policies.number(turns.context.version)
        assert number is not None
        self.policies.unpin(number)
        self.proxy.forget(turns.context.id)

    def spell(self, text: str) -> list[int]:
        """The text in pieces of some characters: not as the tokenizer would write it. Added tokens stay themselves."""
        found: list[int] = []
        added = "|".join(map(re.escape, sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)))
        for piece in re.findall(f"{added}|(?:(?!{added}).){{1,{PIECE}}}", text, re.DOTALL):
            found += self.tokenizer.encode(piece, add_special_tokens=False)
        return found

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))


@asynccontextmanager
async def proxied(vllm: Vllm, folder: Path, *, probed: bool = False) -> AsyncIterator[Proxied]:
    """The parts, wired as the server wires them; ``probed``: what the engine does by itself is found out first."""
    tokenizer = AutoTokenizer.from_pretrained(vllm.model, local_files_only=True)
    ends = json.loads((vllm.model / "generation_config.json").read_bytes()).get("eos_token_id") or []
    vocabulary = Vocabulary(tokenizer, eos_token_ids=[ends] if isinstance(ends, int) else ends)
    told = {"special_tokens": vocabulary.control_strings, "eos_token_ids": sorted(vocabulary.eos_token_ids)}
    engine = Engine(str(vllm.socket), told)
    store = await AsyncStore.open(folder / "store.sqlite")
    versions = folder / "versions"
    versions.mkdir(exist_ok=True)
    policies = PolicyTable("policy", base_model=await probe.base_id(engine))
    policies.capture, policies.exact_prompts = await probe.capture_level(engine, policies.base_id)
    proxy = Proxy(
        engine,
        store,
        policy=policies,
        defaults=await probe_sampling.defaults(engine, policies.base_id) if probed else None,
        keep_reasoning=await probe_reasoning.may_be_kept(engine, policies.base_id) if probed else True,
        tools_by_grammar=True,
    )
    identities: dict[str, Identity] = {"agent": Identity("agent")}

    def through(door: Door) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await door.answer(request, identities[request.headers["authorization"].removeprefix("Bearer ")])

        return answer

    routes = [Route(door.path, through(door), methods=[door.method]) for door in proxy.doors.all]
    try:
        async with on_a_port(Starlette(routes=routes)) as port:
            yield Proxied(
                vllm,
                engine,
                store,
                policies,
                Adapters(engine, policies, versions),
                proxy,
                versions,
                f"http://127.0.0.1:{port}",
                tokenizer,
                identities,
            )
    finally:
        await engine.aclose()
        await store.aclose()


def _whole(reply: httpx.Response) -> Answer:
    data = reply.json()
    answer = Answer(reply.status_code, [data])
    for choice in data.get("choices") or ():
        answer.messages[choice["index"]] = choice["message"]
        answer.finish[choice["index"]] = choice["finish_reason"]
    return answer


def _streamed(reply: httpx.Response) -> Answer:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", reply.text[-500:]
    answer = Answer(reply.status_code, [json.loads(line) for line in lines[:-1]])
    for choice in itertools.chain.from_iterable(data.get("choices") or () for data in answer.raw):
        index, delta = choice["index"], choice.get("delta") or {}
        message = answer.messages.setdefault(index, {"role": "assistant", "content": ""})
        for name in ("content", "reasoning"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            while len(calls) <= part["index"]:
                calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
            call, function = calls[part["index"]], part.get("function") or {}
            call["id"] = call["id"] or part.get("id")
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
        if choice.get("finish_reason") is not None:
            answer.finish[index] = choice["finish_reason"]
    return answer
