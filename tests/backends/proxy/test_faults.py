"""Faults of the engine, of clients and of the disk, over real HTTP: rows of the fault matrix by their names."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from art_backends.config import Limits
from art_backends.trajectories import CallStatus

from tests.backends.proxy.fake_engine import (
    USER,
    WAIT,
    FakeEngine,
    World,
    answer,
    chunks,
    collect,
    faked,
    hang,
    say,
    slam,
    sse,
    status,
    world,
)


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


@pytest.mark.parametrize("parts", range(1, 6))
async def test_r12_a_stream_that_is_cut_is_a_failure(w: World, parts: int) -> None:
    w.engine.script.append(sse(chunks("Hi", {})[:parts], cut=True))
    stream = await say(w.sdk(), stream=True)
    with pytest.raises((openai.APIError, httpx2.HTTPError)):
        await collect(stream)
    call = w.store.only
    assert (call.status, call.excluded, call.choices) == (CallStatus.ERROR, "error", [])


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


@pytest.mark.parametrize(
    "script",
    [
        [status(500, {"error": {"message": "x"}}, retry_after_ms="1"), answer("Hi")],
        [status(429, {"error": {"message": "x"}}, retry_after_ms="1")] * 2 + [answer("Hi")],
        [status(503, {"error": {"message": "x"}}, retry_after_ms="1")] * 3,
        [status(500, {"error": {"message": "x"}}, x_should_retry="false"), answer("Hi")],
        [
            status(409, {"error": {"message": "x", "code": "c"}}, x_should_retry="true", retry_after_ms="1"),
            answer("Hi"),
        ],
        [status(400, {"error": {"message": "x", "code": "c", "param": "p", "type": "t"}}), answer("Hi")],
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdk_tries_again_as_it_would_with_the_engine_alone(w: World, script: list[Any], stream: bool) -> None:
    async def outcome(straight: bool) -> tuple[Any, int]:
        w.engine.script.clear()
        w.engine.script.extend(script)
        before = len(w.engine.chats)
        try:
            said = await say(w.sdk(straight=straight, max_retries=2), stream=stream)
            if stream:
                parts = await collect(said)
                text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            else:
                text = said.choices[0].message.content
            found: Any = text
        except openai.APIStatusError as error:
            found = (type(error), error.status_code, error.code, error.param, error.type, error.message)
        return found, len(w.engine.chats) - before

    assert await outcome(straight=False) == await outcome(straight=True)


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


@pytest.mark.parametrize(
    ("path", "name", "more"),
    [
        ("/v1/chat/completions", "max_completion_tokens", {"messages": USER}),
        ("/v1/completions", "max_tokens", {"prompt": "x"}),
        ("/v1/responses", "max_output_tokens", {"input": "x"}),
        ("/v1/messages", "max_tokens", {"messages": USER}),
    ],
)
async def test_an_answer_s_tokens_are_bounded(path: str, name: str, more: dict[str, Any]) -> None:
    async with faked(Limits(answer_tokens=50)) as w:
        for asked, expected in ((20, 200), (50, 200), (51, 400)):
            reply = await w.http.post(path, json={"model": "m", name: asked, **more})
            assert reply.status_code == expected, (asked, reply.text)
        if path != "/v1/messages":  # which must say
            assert (await w.http.post(path, json={"model": "m", **more})).status_code == 200
            sent = w.engine.chats[-1].body
            assert sent.get("max_completion_tokens", sent.get("max_tokens")) == 50
