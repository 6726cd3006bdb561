"""Models that are not the policy's: to their provider and back as they are, heard for the record, nowhere else."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from art_backends.config import Limits, Provider, TrainConfig, make_config
from art_backends.errors import ConfigError
from art_backends.proxy.engine_client import _proxy
from art_backends.proxy.providers import Providers
from art_backends.trajectories import CallStatus, CaptureLevel

from tests.backends.proxy.fake_engine import (
    USER,
    WAIT,
    FakeEngine,
    World,
    answer,
    chunk,
    collect,
    faked,
    hang,
    say,
    send_json,
    slam,
    sse,
    status,
)
from tests.backends.proxy.speakers import SPEAKERS, gives

KEYS = {"OPENAI_KEY": "sk-of-the-server", "CLAUDE_KEY": "sk-ant-of-the-server"}
LOOKED_UP: Any = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"city": "Rome"}}
MESSAGE: Any = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Hi"}, LOOKED_UP],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 2},
}
EMPTY: Any = {"text": {"text": ""}, "thinking": {"thinking": ""}, "tool_use": {"input": {}}}
SAID: Any = {
    "role": "assistant",
    "content": "Hi",
    "reasoning": "hm",
    "tool_calls": [
        {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": '{"city":"Rome"}'}},
    ],
}


@asynccontextmanager
async def provided(limits: Limits | None = None) -> AsyncIterator[tuple[World, FakeEngine]]:
    """A policy for "policy-model", and a provider of both formats at an address of its own."""
    upstream = FakeEngine()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    configured = [
        Provider(name="open", url=f"{url}/v1", models=["gpt-*"], key_env="OPENAI_KEY"),
        Provider(name="claude", url=url, format="anthropic", models=["claude-*"], key_env="CLAUDE_KEY"),
    ]
    providers = Providers(configured, KEYS)
    try:
        async with faked(limits, providers=providers) as world:
            yield world, upstream
    finally:
        upstream.release.set()
        await providers.aclose()
        server.close()
        for task in list(upstream.serving):
            task.cancel()
        await asyncio.gather(*upstream.serving, return_exceptions=True)


@asynccontextmanager
async def claude(w: World, token: str = "train") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        httpx2.AsyncClient(trust_env=False) as http,
        anthropic.AsyncAnthropic(
            base_url=w.url, api_key=token, max_retries=0, timeout=WAIT, http_client=http
        ) as client,
    ):
        yield client


def whole_message(**changes: Any) -> Any:
    async def behave(_e: Any, _b: Any, _r: Any, writer: asyncio.StreamWriter) -> None:
        await send_json(writer, 200, {**MESSAGE, **changes})

    return behave


def events(*given: dict[str, Any]) -> Any:
    return sse([], raw=[f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in given])


# where a call goes


async def test_a_call_goes_to_its_provider_with_the_server_s_key_and_the_policy_s_does_not() -> None:
    async with provided() as (w, upstream):
        got = await say(w.sdk(), model="gpt-4o", extra_body={"api_base": "http://169.254.169.254", "new": 1})
        assert got.choices[0].message.content == "Hi"
        assert not w.engine.chats
        (asked,) = upstream.asked
        assert (asked.path, asked.headers["authorization"]) == ("/v1/chat/completions", "Bearer sk-of-the-server")
        assert asked.body == {"model": "gpt-4o", "messages": USER, "new": 1}, "as the app sent it, no address"
        w.policy.models = ["gpt-4o"]
        await say(w.sdk(), model="gpt-4o")
        assert len(w.engine.chats) == 1, "the policy's own names come before any provider's"
        w.policy.models = []
        await say(w.sdk(), model="something-else")
        assert len(w.engine.chats) == 2


async def test_the_answer_is_untouched_and_recorded_as_text() -> None:
    async with provided() as (w, upstream):
        upstream.script.append(answer("Hi"))
        reply = await w.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": USER})
        assert reply.headers["x-request-id"] == "req-7"
        assert set(reply.json()) >= {"kv_transfer_params", "x_new_field"}, "nothing is stripped"
        call = w.store.only
        assert (call.status, call.capture, call.excluded) == (CallStatus.OK, CaptureLevel.TEXT, "provider")
        assert (call.version, call.prompt_token_ids, call.choices[0].token_ids) == (None, [], [])
        assert (call.model, call.request["messages"]) == ("gpt-4o", USER)
        assert call.choices[0].message["content"] == "Hi"
        await say(w.sdk("agent"), model="gpt-4o")
        assert len(w.store.all) == 1, "an app's calls are not kept"


async def test_a_stream_is_the_provider_s_bytes() -> None:
    async with provided() as (w, upstream):
        raw = [b": ping\r\n\r\nda", b'ta: {"choices": [{"index": 0, "delta": {"content": "H', b'i"}}]}\r\n\r\n']
        end = [b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n', b"data: [DONE]\n\n"]
        upstream.script.append(sse([], raw=[*raw, *end]))
        reply = await w.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": USER, "stream": True})
        assert reply.content == b"".join([*raw, *end])
        assert w.store.only.choices[0].message["content"] == "Hi"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_heard(stream: bool) -> None:
    async with provided() as (w, upstream), claude(w) as sdk:
        asked: Any = {"model": "claude-x", "max_tokens": 9, "messages": USER}
        if stream:
            start = {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}}
            blocks = []
            for index, block in enumerate(MESSAGE["content"]):
                empty = {**block, **EMPTY[block["type"]]}
                deltas = {
                    "text": {"type": "text_delta", "text": "Hi"},
                    "thinking": {"type": "thinking_delta", "thinking": "hm"},
                    "tool_use": {"type": "input_json_delta", "partial_json": '{"city":"Rome"}'},
                }
                blocks += [
                    {"type": "content_block_start", "index": index, "content_block": empty},
                    {"type": "content_block_delta", "index": index, "delta": deltas[block["type"]]},
                    {"type": "content_block_stop", "index": index},
                ]
            end = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}}
            upstream.script.append(events(start, *blocks, end, {"type": "message_stop"}))
            async with sdk.messages.stream(**asked) as streamed:
                got = await streamed.get_final_message()
        else:
            upstream.script.append(whole_message())
            got = await sdk.messages.create(**asked)
        assert got.content[1].text == "Hi"
        assert upstream.asked[0].headers["x-api-key"] == "sk-ant-of-the-server"
        assert "authorization" not in upstream.asked[0].headers
        call = w.store.only
        assert (call.choices[0].message, call.choices[0].finish_reason) == (SAID, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_heard(stream: bool) -> None:
    async with provided() as (w, upstream):
        output = [
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
            {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
            {"type": "function_call", "id": "f", "call_id": "t1", "name": "look_up", "arguments": '{"city":"Rome"}'},
        ]
        response = {"id": "r", "object": "response", "status": "completed", "output": output, "model": "gpt-5"}
        if stream:
            upstream.script.append(events({"type": "response.completed", "sequence_number": 0, "response": response}))
            created = await w.sdk().responses.create(model="gpt-5", input="x", stream=True)
            assert [event.type async for event in created] == ["response.completed"]
        else:
            upstream.script.append(status(200, response))
            # what is refused of the policy is the provider's to do
            got = await w.sdk().responses.create(model="gpt-5", input="x", tools=[{"type": "web_search"}])
            assert got.output_text == "Hi"
        call = w.store.only
        assert (call.choices[0].message, call.choices[0].finish_reason) == (SAID, "tool_calls")
        assert call.request["input" if not stream else "messages"]


# what goes wrong


@pytest.mark.parametrize("code", [400, 429, 500])
async def test_its_refusals_are_the_app_s(code: int) -> None:
    async with provided() as (w, upstream):
        upstream.script.append(status(code, {"error": {"message": "no", "mine": True}}, retry_after="7"))
        reply = await w.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": USER})
        assert (reply.status_code, reply.json()["error"]["mine"], reply.headers["retry-after"]) == (code, True, "7")
        call = w.store.only
        assert call.status is CallStatus.ERROR
        assert (call.error or "").startswith(f"{code} open: ")


async def test_what_cannot_be_read_here_goes_through_and_is_kept_as_it_is() -> None:
    async with provided() as (w, upstream):
        odd: Any = {"model": "gpt-5", "input": [{"type": "computer_call", "content": 5}]}
        upstream.script.append(status(200, {"unheard": "of"}))
        assert (await w.http.post("/v1/responses", json=odd)).json() == {"unheard": "of"}
        assert upstream.asked[0].body == odd
        call = w.store.only
        assert (call.status, call.request, call.choices) == (CallStatus.OK, odd, [])


async def test_a_stream_is_not_held_back() -> None:
    """Each read of the provider's reaches the client before the next one is there; the end waits for the record."""
    async with provided() as (w, upstream):
        first = chunk([{"index": 0, "delta": {"content": "H"}, "finish_reason": None}])
        upstream.script.append(sse([first, b"[DONE]"], hold_after=1))
        reader, _ = await w.raw({"model": "gpt-4o", "messages": USER, "stream": True})
        await asyncio.wait_for(reader.readuntil(first), WAIT)
        w.store.allow.clear()
        upstream.release.set()
        await asyncio.wait_for(w.store.finishing.wait(), WAIT)
        assert b"[DONE]" not in reader._buffer  # type: ignore[attr-defined]
        w.store.allow.set()
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), WAIT)


async def test_an_event_too_large_to_be_heard_reaches_the_client() -> None:
    async with provided(Limits(event_bytes=50)) as (w, upstream):
        long = chunk([{"index": 0, "delta": {"content": "H" * 100}, "finish_reason": "stop"}])
        upstream.script.append(sse([long, b"[DONE]"]))
        reply = await w.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": USER, "stream": True})
        assert reply.text.endswith("data: [DONE]\n\n")
        assert w.store.only.status is CallStatus.OK


async def test_the_user_s_netrc_goes_nowhere(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "netrc").write_text("default login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with provided() as (w, upstream), claude(w) as sdk:
        upstream.script.append(whole_message())
        await sdk.messages.create(model="claude-x", max_tokens=9, messages=USER)
        assert "authorization" not in upstream.asked[0].headers


def test_the_environment_s_proxy_is_used_but_not_for_whom_it_excludes(monkeypatch: Any) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert _proxy("https://api.openai.com") == "http://proxy:3128"
    assert _proxy("https://inside.example") is None
    assert _proxy("http://api.openai.com") is None


async def test_a_redirect_is_not_followed() -> None:
    async with provided() as (w, upstream):
        upstream.script.append(status(302, {}, location="http://169.254.169.254/"))
        reply = await w.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": USER})
        assert reply.status_code == 502
        assert "location" not in reply.headers


async def test_a_provider_that_breaks_off_or_is_away() -> None:
    async with provided() as (w, upstream):
        upstream.script.append(slam)
        with pytest.raises(openai.InternalServerError, match="provider open: it broke off"):
            await say(w.sdk(), model="gpt-4o")
        begun = chunk([{"index": 0, "delta": {"content": "H"}, "finish_reason": None}])
        upstream.script.append(sse([begun], cut=True))
        with pytest.raises((httpx2.RemoteProtocolError, openai.APIConnectionError)):
            await collect(await say(w.sdk(), model="gpt-4o", stream=True))
        assert [call.status for call in w.store.all] == [CallStatus.ERROR] * 2


async def test_a_provider_that_hangs_or_stalls_is_given_up() -> None:
    async with provided(Limits(first_byte_seconds=0.1, idle_seconds=0.1)) as (w, upstream):
        upstream.script.append(hang)
        reply = await w.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": USER})
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "provider_error")
        begun = chunk([{"index": 0, "delta": {"content": "H"}, "finish_reason": None}])
        upstream.script.append(sse([begun, b"[DONE]"], hold_after=1))
        with pytest.raises((httpx2.RemoteProtocolError, openai.APIConnectionError)):
            await collect(await say(w.sdk(), model="gpt-4o", stream=True))
        assert [(call.status, call.excluded) for call in w.store.all] == [(CallStatus.ERROR, "error")] * 2
        assert w.proxy.in_flight == 0


async def test_a_compressed_answer_reaches_the_app_and_the_record() -> None:
    async with provided() as (w, upstream):
        upstream.script.append(gives(gzip.compress(SPEAKERS[0].reply("Hi")), content_encoding="gzip"))
        assert (await say(w.sdk(), model="gpt-4o")).choices[0].message.content == "Hi"
        assert upstream.asked[0].headers["accept-encoding"] == "identity"
        assert w.store.only.choices[0].message["content"] == "Hi"


async def test_a_client_that_leaves_ends_the_provider_s_work() -> None:
    async with provided() as (w, upstream):
        upstream.script.append(hang)
        _, writer = await w.raw({"model": "gpt-4o", "messages": USER})
        await asyncio.wait_for(upstream.reached.wait(), WAIT)
        writer.transport.abort()
        await asyncio.wait_for(upstream.aborted.wait(), WAIT)
        await asyncio.wait_for(w.store.finishing.wait(), WAIT)
        assert w.store.only.status is CallStatus.CANCELLED


async def test_a_full_store_does_not_keep_an_answer_from_the_app() -> None:
    async with provided() as (w, _):
        w.store.full = True
        assert (await say(w.sdk(), model="gpt-4o")).choices[0].message.content == "Hi"
        assert w.context.capture_lost > 0


async def test_a_format_that_its_provider_does_not_speak_is_told() -> None:
    async with provided() as (w, upstream), claude(w) as sdk:
        w.policy.models = ["policy-model"]
        with pytest.raises(anthropic.NotFoundError, match="asked in openai's format only"):
            await sdk.messages.create(model="gpt-4o", max_tokens=9, messages=USER)
        with pytest.raises(openai.NotFoundError, match="no policy answers for it"):
            await say(w.sdk(), model="llama")
        assert not upstream.asked


# configuration


def test_settings() -> None:
    made = make_config({"providers": [{"name": "open", "url": "https://api.openai.com/v1", "key_env": "K"}]})
    assert made.providers[0].models == ["*"]
    assert TrainConfig().providers == []
    for wrong in (
        {"name": "x"},
        {"name": "x", "url": "file:///etc/passwd"},
        {"name": "x", "url": "http://user:secret@host"},
        {"name": "x", "url": "http://host?key=1"},
        {"name": "a b", "url": "http://host"},
        {"name": "x", "url": "http://host", "key": "sk-1"},
    ):
        with pytest.raises(ConfigError, match="providers"):
            make_config({"providers": [wrong]})


async def test_a_key_that_is_not_there_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="provider open: the environment has no OPENAI_KEY"):
        Providers([Provider(name="open", url="http://host", key_env="OPENAI_KEY")], {})
