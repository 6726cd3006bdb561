"""What a server does is found out by asking: the embedded engine has it all; what lacks is told with its flag.

``Toy`` is a server in miniature whose flags can be turned off one by one; its distribution is written down, so that raw
and processed logprobs, and defaults that a server adds, are what they are at a real one (tests/vllm/test_probe.py).
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from art_backends.errors import ConfigError, EngineError
from art_backends.proxy.engine_client import EngineClient
from art_backends.server import probe
from art_backends.server.abilities import Abilities, agree
from art_backends.trajectories import CaptureLevel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.backends.engines.conftest import make_model
from tests.backends.engines.embedded.conftest import make_tokenizer
from tests.backends.proxy.fake_engine import serving


def refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


@dataclass
class Toy:
    """Draws from fixed logits, with vLLM's words for what it refuses."""

    logits: list[float] = field(default_factory=lambda: [2.0, 1.6, 1.1, 0.9, 0.2, -0.4, -1.0, -2.0])
    processed: bool = True
    logits_told: bool = False
    defaults: dict[str, float] = field(default_factory=dict)
    ids: bool = True
    logprobs: bool = True
    exact: bool = True
    tools: bool = True
    routes: bool = True
    lora: bool = True
    tokenizes: bool = True
    steady: bool = True
    length: int = 2048
    name: str = "base"
    prompt: tuple[int, ...] = (1, 2, 3)
    loaded: list[str] = field(default_factory=list)
    calls: int = 0

    async def models(self, _: Request) -> Response:
        card = {"id": self.name, "root": "/models/toy", "parent": None, "max_model_len": self.length}
        return JSONResponse({"data": [card]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.calls += 1
        if body.get("tools") and not self.tools:
            return refusal(
                400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            )
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given if given and self.exact else list(self.prompt)
        temperature = body.get("temperature", self.defaults.get("temperature", 1.0))
        drawn = random.Random(f"{body.get('seed')}{'' if self.steady else self.calls}")
        raw = softmax(self.logits)
        warm = softmax([value / (temperature or 1.0) for value in self.logits])
        told = warm if self.processed else raw
        content, tokens = [], []
        for _ in range(body["max_tokens"]):
            token = warm.index(max(warm)) if temperature == 0 else drawn.choices(range(len(warm)), warm)[0]
            values = self.logits if self.logits_told else [math.log(value) for value in told]
            best = sorted(range(len(values)), key=lambda index: -values[index])
            listed = list(dict.fromkeys([token, *best]))[: body.get("top_logprobs") or 0]
            top = [{"token": f"token_id:{index}", "logprob": values[index]} for index in listed]
            content.append({"token": str(token), "logprob": values[token], "top_logprobs": top})
            tokens.append(token)
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
        choice["token_ids"] = tokens if self.ids else None
        choice["logprobs"] = {"content": content} if self.logprobs and body.get("logprobs") else None
        return JSONResponse({"choices": [choice], "prompt_token_ids": prompt if self.ids else None})

    async def tokenize(self, _: Request) -> Response:
        return JSONResponse({"tokens": list(self.prompt)}) if self.tokenizes else refusal(404, "Not Found")

    async def load(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if not self.lora:
            return refusal(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        return refusal(404, f"Loading lora {name} failed: No adapter found for <path>")

    async def unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        return refusal(404, f"The lora adapter '{name}' cannot be found.")

    def app(self) -> Starlette:
        lora = [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                *(lora if self.routes else []),
            ]
        )


def softmax(values: list[float]) -> list[float]:
    raised = [math.exp(value - max(values)) for value in values]
    return [value / sum(raised) for value in raised]


@asynccontextmanager
async def asking(app: Any) -> AsyncIterator[EngineClient]:
    async with serving(app) as port:
        client = EngineClient(url=f"http://127.0.0.1:{port}/v1")
        try:
            yield client
        finally:
            await client.aclose()


async def found(toy: Toy) -> Abilities:
    async with asking(toy.app()) as client:
        return await probe.abilities(client, toy.name)


@pytest.fixture(scope="module")
def embedded() -> Iterator[Any]:
    from art_backends.engines.embedded.app import create_app
    from art_backends.engines.embedded.core import Engine
    from art_backends.engines.embedded.render import HERMES_PATH

    tokenizer = make_tokenizer(HERMES_PATH.read_text())
    engine = Engine(make_model(vocab_size=len(tokenizer)), max_model_len=512)
    engine.start()
    yield create_app(engine, tokenizer, base_name="base", vocab_size=len(tokenizer))
    asyncio.run(engine.close())


async def test_the_embedded_engine_does_all(embedded: Any) -> None:
    async with asking(embedded) as client:
        assert await probe.base_id(client) == "base"
        assert await probe.capture_level(client, "base") == (CaptureLevel.TOKENS, True)
        does = await probe.abilities(client, "base")
    assert does.problems == []
    assert (does.capture, does.exact_prompts, does.tokenizes, does.tools) == (CaptureLevel.TOKENS, True, True, True)
    assert (does.processed, does.neutral, does.lora) == (True, True, None)
    assert (does.model, does.root, does.max_model_len) == ("base", "base", 512)
    assert len(does.prompt) > 3
    agree(["a", "b"], [does, does])


async def test_a_server_that_does_all_has_no_problems() -> None:
    toy = Toy()
    does = await found(toy)
    assert (does.problems, does.processed, does.neutral) == ([], True, True)
    assert len(does.top) == 4


FLAGS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "no ids": ({"ids": False}, "return_token_ids", True),
    "no logprobs": ({"logprobs": False}, "--max-logprobs", True),
    "no route for adapters": ({"routes": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", True),
    "no adapters": ({"lora": False}, "--enable-lora", True),
    "raw logprobs": ({"processed": False}, "--logprobs-mode processed_logprobs", False),
    "logits": ({"logits_told": True}, "--logprobs-mode processed_logprobs", False),
    "a temperature of its own": ({"defaults": {"temperature": 0.6}}, "--generation-config vllm", False),
    "no tool parser": ({"tools": False}, "--enable-auto-tool-choice", False),
    "no exact prompts": ({"exact": False}, "kv_transfer_params", False),
    "no tokenize": ({"tokenizes": False}, "/tokenize", False),
}


@pytest.mark.parametrize("what", FLAGS)
async def test_what_lacks_is_told_with_the_flag_that_brings_it(what: str) -> None:
    changes, flag, fatal = FLAGS[what]
    does = await found(Toy(**changes))
    assert [flag in problem for problem in does.problems].count(True) == 1, does.problems
    assert any(flag in problem for problem in (does.fatal if fatal else does.warnings))


async def test_a_default_temperature_is_seen_in_what_is_drawn_if_logprobs_are_raw() -> None:
    does = await found(Toy(processed=False, defaults={"temperature": 0.3}))
    assert (does.processed, does.neutral) == (False, False)


async def test_what_cannot_be_told_is_not_claimed() -> None:
    flat = await found(Toy(logits=[0.0] * 8))
    assert (flat.processed, flat.problems) == (None, [])
    unsteady = await found(Toy(steady=False, processed=False))
    assert unsteady.neutral is None


async def test_nothing_is_left_loaded_by_a_server_that_looks_at_files_later() -> None:
    class Lazy(Toy):
        async def load(self, request: Request) -> Response:
            self.loaded.append((await request.json())["lora_name"])
            return Response("loaded")

        async def unload(self, request: Request) -> Response:
            name = (await request.json())["lora_name"]
            if name not in self.loaded:
                return refusal(404, f"{name} cannot be found")
            self.loaded.remove(name)
            return Response("gone")

    lazy = Lazy()
    assert ((await found(lazy)).lora, lazy.loaded) == (None, [])


# servers that are none


async def test_a_wrong_url_is_said(tmp_path: Path) -> None:
    client = EngineClient(uds=str(tmp_path / "none.sock"))
    with pytest.raises(EngineError, match=r"none\.sock.*cannot be reached.*is this its URL"):
        await probe.abilities(client, "base")
    await client.aclose()


async def test_what_is_no_engine_is_said() -> None:
    async def page(_: Request) -> Response:
        return PlainTextResponse("<html>hello</html>")

    async def locked(_: Request) -> Response:
        return JSONResponse({"error": "Unauthorized"}, 401)

    async with asking(Starlette(routes=[Route("/v1/models", page)])) as client:
        with pytest.raises(ConfigError, match=r"engine_url: http://127\.0\.0\.1:\d+ is no engine.*no JSON object"):
            await probe.abilities(client, "base")
    async with asking(Starlette()) as client:
        with pytest.raises(ConfigError, match=r"is no engine.*Not Found"):
            await probe.abilities(client, "base")
    async with asking(Starlette(routes=[Route("/v1/models", locked)])) as client:
        with pytest.raises(ConfigError, match="asks for a key"):
            await probe.abilities(client, "base")


async def test_another_model_is_said() -> None:
    async with asking(Toy(name="qwen").app()) as client:
        with pytest.raises(ConfigError, match="does not serve smollm, but qwen"):
            await probe.abilities(client, "smollm")


# several servers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"length": 4096}, "2048 and 4096 tokens"),
        ({"prompt": (1, 2, 4)}, "3 and 3 tokens"),
        ({"logits": [9.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]}, "other degrees"),
        ({"tools": False}, "of the second alone, it takes no tools"),
        ({"name": "other"}, "called base and other"),
    ],
)
async def test_servers_that_differ_are_named_with_the_difference(changes: dict[str, Any], said: str) -> None:
    one, other = await found(Toy()), await found(Toy(**changes))
    with pytest.raises(ConfigError, match=f"http://a and http://b do not serve the same: .*{said}"):
        agree(["http://a", "http://b"], [one, other])
    with pytest.raises(ConfigError, match="http://a and http://c"):
        agree(["http://a", "http://b", "http://c"], [one, one, other])


async def test_the_same_model_may_lie_in_another_folder() -> None:
    one = await found(Toy())
    agree(["a", "b"], [one, replace(one, root="/elsewhere/toy")])
    with pytest.raises(ConfigError, match="comes from /models/toy and /models/other"):
        agree(["a", "b"], [one, replace(one, root="/models/other")])
