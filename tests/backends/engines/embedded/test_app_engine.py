"""The HTTP face on the real engine with a tiny random model: what only sampling itself can show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import orjson
import pytest
import torch
from art_backends.engines.embedded.app import create_app
from art_backends.engines.embedded.core import Engine
from transformers import LlamaConfig, LlamaForCausalLM

HI: Any = [{"role": "user", "content": "hi"}]
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["near", "far"]}, "x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "x"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "point", "parameters": POINT}}]
IDS = {"return_token_ids": True}
LIMIT = 640


def _model(tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # rows that no token has, as real models do
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[Engine]:
    engine = Engine(_model(tokenizer), max_model_len=LIMIT)
    engine.start()
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def app(engine: Engine, tokenizer: Any) -> Any:
    return create_app(engine, tokenizer, base_name="base", vocab_size=len(tokenizer) + 3)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode([index for index in ids if index < len(tokenizer)], skip_special_tokens=True))


async def test_rows_of_a_request_and_their_ids(sdk: openai.AsyncOpenAI, tokenizer: Any) -> None:
    ask: dict[str, Any] = {"model": "base", "messages": HI, "n": 4, "max_tokens": 12, "seed": 3, "logprobs": True}
    first = await sdk.chat.completions.create(**ask, top_logprobs=2, extra_body=IDS)
    again = await sdk.chat.completions.create(**ask, extra_body=IDS)
    ids = [choice.token_ids for choice in first.choices]  # type: ignore[attr-defined]
    assert ids == [choice.token_ids for choice in again.choices], "a seed repeats"  # type: ignore[attr-defined]
    assert len({tuple(row) for row in ids}) == 4, "rows of one seed differ"
    for choice, row in zip(first.choices, ids, strict=True):
        assert choice.message.content == _decoded(tokenizer, row)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * len(row)
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
        assert choice.finish_reason == ("stop" if row[-1] == tokenizer.eos_token_id else "length")


async def test_exact_prompts_and_streams_say_the_same(http: httpx2.AsyncClient, sdk: openai.AsyncOpenAI) -> None:
    rendered = (await http.post("/tokenize", json={"messages": HI})).json()["tokens"]
    ask: dict[str, Any] = {"model": "base", "messages": HI, "max_tokens": 20, "seed": 5}
    whole = await sdk.chat.completions.create(**ask, extra_body=IDS)
    exact = {**IDS, "kv_transfer_params": {"prompt_token_ids": rendered}}
    other: Any = [{"role": "user", "content": "something else"}]
    chunks = [
        chunk
        async for chunk in await sdk.chat.completions.create(
            **{**ask, "messages": other}, stream=True, extra_body=exact
        )
    ]
    assert chunks[0].prompt_token_ids == rendered == whole.prompt_token_ids  # type: ignore[attr-defined]
    streamed = [index for chunk in chunks[1:] for index in chunk.choices[0].token_ids]  # type: ignore[attr-defined]
    assert streamed == whole.choices[0].token_ids  # type: ignore[attr-defined]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    completion = await sdk.completions.create(model="base", prompt=rendered, max_tokens=20, seed=5, extra_body=IDS)
    assert completion.choices[0].token_ids == streamed  # type: ignore[attr-defined]


async def test_forced_tools_are_called(sdk: openai.AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "point"}}
    for choice in ("required", named):
        reply = await sdk.chat.completions.create(
            model="base", messages=HI, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=2, seed=1
        )
        for answer in reply.choices:
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            (call,) = answer.message.tool_calls or ()
            assert call.type == "function"
            assert call.function.name == "point"
            arguments = json.loads(call.function.arguments)
            assert arguments["kind"] in ("near", "far")
            assert 0 <= arguments["x"] <= 99


async def test_a_schema_holds_in_a_stream(sdk: openai.AsyncOpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    async with sdk.chat.completions.stream(model="base", messages=HI, response_format=wanted) as chunks:
        final = await chunks.get_final_completion()
    assert set(json.loads(final.choices[0].message.content or "")) == {"kind", "x"}
    assert final.choices[0].finish_reason == "stop"


async def test_constrained_and_free_requests_at_once(sdk: openai.AsyncOpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    asks = [{"response_format": wanted} if index % 2 else {"max_tokens": 8} for index in range(10)]
    replies = await asyncio.gather(
        *(sdk.chat.completions.create(model="base", messages=HI, **ask) for ask in asks)  # type: ignore[call-overload]
    )
    for ask, reply in zip(asks, replies, strict=True):
        if "response_format" in ask:
            json.loads(reply.choices[0].message.content)


async def test_the_rest_of_the_context_is_the_default(http: httpx2.AsyncClient) -> None:
    ask = {"kv_transfer_params": {"prompt_token_ids": [5] * (LIMIT - 4)}, "messages": HI, "ignore_eos": True, **IDS}
    choice = (await http.post("/v1/chat/completions", json=ask)).json()["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (4, "length")


async def test_stop_strings_end_rows(http: httpx2.AsyncClient, tokenizer: Any) -> None:
    ask = {"messages": HI, "seed": 2, "max_tokens": 40, "ignore_eos": True, **IDS}
    free = (await http.post("/v1/chat/completions", json=ask)).json()["choices"][0]
    stop = next(char for char in free["message"]["content"][3:] if char.isascii() and char != "\ufffd")
    cut = (await http.post("/v1/chat/completions", json={**ask, "stop": stop})).json()["choices"][0]
    assert cut["message"]["content"] == free["message"]["content"].split(stop)[0]
    assert cut["token_ids"] == free["token_ids"][: len(cut["token_ids"])]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


async def test_a_client_that_leaves_frees_the_engine(app: Any, engine: Engine, http: httpx2.AsyncClient) -> None:
    incoming = [
        {
            "type": "http.request",
            "body": orjson.dumps({"messages": HI, "n": 3, "stream": True, "ignore_eos": True}),
            "more_body": False,
        }
    ]
    begun, before = asyncio.Event(), engine.metrics()["tokens_sampled"]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        begun.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    async with asyncio.timeout(30):
        await app(scope, receive, send)
        # a later request is answered, and by then the rows that were left are gone
        await http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1})
    assert engine.metrics()["running"] == 0
    assert engine.metrics()["tokens_sampled"] - before < 3 * 600


async def test_adapters_that_cannot_be_loaded(http: httpx2.AsyncClient, tmp_path: Path) -> None:
    reply = await http.post("/v1/load_lora_adapter", json={"lora_name": "policy@1", "lora_path": str(tmp_path)})
    assert reply.status_code == 400
    assert str(tmp_path) in reply.json()["error"]["message"]
    assert len((await http.get("/v1/models")).json()["data"]) == 1


async def test_a_closed_engine_says_so(tokenizer: Any) -> None:
    engine = Engine(_model(tokenizer), max_model_len=LIMIT)
    await engine.close()
    app = create_app(engine, tokenizer, base_name="base")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://engine") as http:
        assert (await http.get("/health")).status_code == 503
        assert (await http.post("/v1/chat/completions", json={"messages": HI})).status_code == 503
