"""Faults of clients and too many of them, in every dialect: who leaves, who does not read, who asks again, who floods.

What one client does must cost the engine nothing and the others nothing. The fault matrix names the rows.
"""

import asyncio
import json
import time
from collections import Counter
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from art_backends.config import Limits
from art_backends.trajectories import CallStatus

from tests.backends.proxy.fake_engine import WAIT, FakeEngine, World, answer, chunk, faked, hang, sse, status
from tests.backends.proxy.speakers import SPEAKERS, Heard, Speaker, every, gives

LEAVING = ["before an answer", "before the first token", "in the middle"]


async def leave(w: World, speaker: Speaker, when: str) -> float:
    """A client closes its connection while the engine works; seconds until the engine's request was aborted."""
    w.engine.reached.clear()
    w.engine.aborted.clear()
    stream = when != "before an answer"
    w.engine.script.append(sse(speaker.stream(), hold_after=0 if when == LEAVING[1] else 3) if stream else hang)
    reader, writer = await speaker.send(w, stream=stream)
    await asyncio.wait_for(w.engine.reached.wait(), WAIT)
    if when == "in the middle":
        await asyncio.wait_for(reader.readuntil(b'"H"'), WAIT)
    began = time.monotonic()
    writer.transport.abort()
    await asyncio.wait_for(w.engine.aborted.wait(), WAIT)
    took = time.monotonic() - began
    await w.idle()
    return took


@every()
@pytest.mark.parametrize("when", LEAVING)
async def test_r14_the_engine_stops_when_the_client_goes(w: World, speaker: Speaker, when: str) -> None:
    took = [await leave(w, speaker, when) for _ in range(10)]
    assert max(took) < 1.0, f"seconds to abort: {sorted(took)}"
    assert {(call.status, call.excluded, len(call.choices)) for call in w.store.all} == {
        (CallStatus.CANCELLED, "cancelled", 0)
    }
    assert (w.proxy.counters.cancelled, w.proxy.in_flight) == (10, 0)
    w.engine.script.append(speaker.answers())
    assert (await speaker.ask(w)).said == "Hi"


@every()
async def test_r14_who_leaves_while_the_rollout_is_read_has_begun_no_call(w: World, speaker: Speaker) -> None:
    w.store.allow_read.clear()
    _, writer = await speaker.send(w)
    await asyncio.wait_for(w.store.reading.wait(), WAIT)
    writer.transport.abort()
    await w.idle()
    w.store.allow_read.set()
    assert not w.store.all
    assert not w.engine.chats
    assert w.proxy.counters.cancelled == 1


@every()
async def test_r14_who_leaves_the_queue_is_never_asked_of_the_engine(speaker: Speaker) -> None:
    async with faked(Limits(concurrency=1)) as w:
        w.engine.script.append(hang)
        _, first = await speaker.send(w)
        await asyncio.wait_for(w.engine.reached.wait(), WAIT)
        _, second = await speaker.send(w)
        await until(w, waiting=1)
        second.transport.abort()
        await until(w, waiting=0)
        first.transport.abort()
        await w.idle()
        assert len(w.engine.chats) == 1


async def until(w: World, **expected: int) -> None:
    """The gate has no event for its queue."""
    async with asyncio.timeout(WAIT):
        while any(w.proxy.snapshot()[name] != value for name, value in expected.items()):  # noqa: ASYNC110
            await asyncio.sleep(0)


class Counted:
    """An engine that streams many large chunks, as fast as they are taken from it."""

    def __init__(self, speaker: Speaker, size: int, parts: int) -> None:
        part = chunk([{"index": 0, "delta": {"content": "x" * size}, "finish_reason": None}])
        self.part = b"data: " + speaker.as_asked(part) + b"\n\n"
        self.tail = b"".join(b"data: " + event + b"\n\n" for event in speaker.stream("")[-3:])
        self.parts, self.sent = parts, 0
        self.begun = asyncio.Event()

    async def __call__(self, engine: FakeEngine, _b: Any, _r: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(self.parts):
            writer.write(b"%x\r\n%s\r\n" % (len(self.part), self.part))
            self.sent += len(self.part)
            self.begun.set()
            await writer.drain()
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(self.tail), self.tail))
        await writer.drain()


@every()
async def test_r15_who_does_not_read_is_bounded_and_given_up_and_the_others_are_served(speaker: Speaker) -> None:
    async with faked(Limits(write_seconds=0.3)) as w:
        flood = Counted(speaker, 100_000, 1000)  # 100 MB
        w.engine.script += [flood, *[speaker.answers() for _ in range(20)]]
        _, writer = await speaker.send(w, stream=True)
        await asyncio.wait_for(flood.begun.wait(), WAIT)
        for _ in range(20):
            assert (await speaker.ask(w, token="eval")).said == "Hi"
        await asyncio.wait_for(w.store.finishing.wait(), WAIT)
        await w.idle()
        assert flood.sent < 20_000_000, "what lies in buffers, those of the sockets included"
        assert [call.status for call in w.store.all if call.rollout_id == "r1"] == [CallStatus.CANCELLED]
        assert w.proxy.in_flight == 0
        writer.transport.abort()


@every()
async def test_r15_who_does_not_read_a_whole_answer_is_given_up(speaker: Speaker) -> None:
    async with faked(Limits(write_seconds=0.2)) as w:
        w.engine.script.append(gives(speaker.reply("x!").replace(b"x!", b"x" * 12_000_000)))
        _, writer = await speaker.send(w)
        await asyncio.wait_for(w.store.finishing.wait(), WAIT)
        await w.idle()
        assert (w.store.only.status, w.store.only.excluded) == (CallStatus.CANCELLED, "cancelled")
        assert w.proxy.in_flight == 0
        writer.transport.abort()


@every()
async def test_r15_who_reads_late_gets_everything(w: World, speaker: Speaker) -> None:
    flood = Counted(speaker, 50_000, 100)
    w.engine.script += [flood, *[speaker.answers() for _ in range(5)]]
    reader, writer = await speaker.send(w, stream=True)
    await asyncio.wait_for(flood.begun.wait(), WAIT)
    for _ in range(5):
        assert (await speaker.ask(w, token="eval")).said == "Hi"
    heard = await speaker.hear(reader)
    assert (len(heard.said), heard.ended, heard.whole) == (5_000_000, True, True)
    writer.close()


async def test_r16_of_500_at_once_those_beyond_the_limits_are_refused_at_once() -> None:
    """Clients of all dialects together: 8 are asked of the engine, 16 wait, the others get a 429."""
    async with faked(Limits(concurrency=8, queue=16)) as w:
        at_once = 0

        async def slow(engine: FakeEngine, body: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
            nonlocal at_once
            at_once = max(at_once, w.proxy.in_flight)
            await engine.release.wait()
            speaker = SPEAKERS[1] if "prompt" in body else SPEAKERS[0]
            await speaker.answers()(engine, body, reader, writer)

        w.engine.script += [slow] * 24
        w.engine.release.clear()

        async def one(number: int) -> Heard:
            return await SPEAKERS[number % 4].ask(w, token="agent")

        tasks = [asyncio.create_task(one(number)) for number in range(500)]
        async with asyncio.timeout(WAIT * 3):
            while w.proxy.counters.refused_queue < 476:  # noqa: ASYNC110 - the queue has no event to wait for
                await asyncio.sleep(0)
        assert (w.proxy.snapshot()["in_flight"], w.proxy.snapshot()["waiting"]) == (8, 16)
        w.engine.release.set()
        heard = await asyncio.gather(*tasks)
        assert Counter(item.status for item in heard) == {429: 476, 200: 24}
        assert at_once == 8
        assert {item.headers["retry-after"] for item in heard if item.status == 429} == {"1"}
        assert all(item.errors for item in heard if item.status == 429), "in the words of its dialect"
        assert (len(w.engine.chats), w.proxy.in_flight) == (24, 0)


@every()
async def test_r16_who_waits_too_long_gets_a_503(speaker: Speaker) -> None:
    async with faked(Limits(concurrency=1, queue_seconds=0.05)) as w:
        w.engine.script.append(hang)
        _, writer = await speaker.send(w)
        await asyncio.wait_for(w.engine.reached.wait(), WAIT)
        heard = await speaker.ask(w)
        assert (heard.status, heard.headers["retry-after"]) == (503, "5")
        assert heard.errors == ["no place within 0.05 seconds"]
        writer.transport.abort()


@every()
async def test_r17_what_is_in_flight_ends_and_nothing_new_begins(w: World, speaker: Speaker) -> None:
    w.engine.script += [sse(speaker.stream(), hold_after=3)] * 32
    sent = [await speaker.send(w, stream=True) for _ in range(32)]
    for reader, _ in sent:
        await asyncio.wait_for(reader.readuntil(b'"H"'), WAIT)
    drained = asyncio.create_task(w.proxy.drain(WAIT))
    await asyncio.sleep(0)
    refused = await speaker.ask(w)
    assert (refused.status, refused.headers["retry-after"], refused.errors) == (503, "5", ["the server is stopping"])
    w.engine.release.set()
    for reader, writer in sent:
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), WAIT)
        assert any(end in rest for end in (b"[DONE]", b"message_stop", b"response.completed"))
        writer.close()
    assert await drained
    assert Counter(call.status for call in w.store.all) == {CallStatus.OK: 32}


# asked again


async def by_sdk(w: World, speaker: Speaker, *, stream: bool) -> str:
    """The text that the dialect's own SDK gives, which asks again as often as it usually does."""
    if speaker.name == "messages":
        async with (
            httpx2.AsyncClient(trust_env=False, verify=False) as http,
            anthropic.AsyncAnthropic(base_url=w.url, api_key="train", http_client=http, timeout=WAIT) as claude,
        ):
            asked: Any = {**speaker.body()}
            if not stream:
                return (await claude.messages.create(**asked)).content[0].text
            async with claude.messages.stream(**asked) as streamed:
                return await streamed.get_final_text()
    async with (
        httpx2.AsyncClient(trust_env=False, verify=False) as http,
        openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="train", http_client=http, timeout=WAIT) as sdk,
    ):
        asked = {**speaker.body(stream=stream)}
        make: Any = {
            "chat": sdk.chat.completions.create,
            "completions": sdk.completions.create,
            "responses": sdk.responses.create,
        }[speaker.name]
        if not stream:
            return speaker.text((await make(**asked)).to_dict())
        return "".join([speaker.part(item.to_dict()) async for item in await make(**asked)])


@every()
@pytest.mark.parametrize("stream", [False, True])
async def test_r18_an_sdk_that_asks_again_makes_one_turn(w: World, speaker: Speaker, stream: bool) -> None:
    """After a refusal, and after an answer that was lost on its way: one call of the record trains."""
    again = {"retry_after_ms": "1", "retry_after": "0.001"}
    w.engine.script += [status(500, {"error": {"message": "x"}}, **again), speaker.answers(stream=stream)]
    assert await by_sdk(w, speaker, stream=stream) == "Hi"
    assert [(call.retry, call.excluded) for call in w.store.all] == [(0, "error"), (1, None)]
    w.engine.script += [speaker.answers(stream=stream)] * 2
    body = speaker.body("again", stream=stream)
    await speaker.ask(w, body)
    assert (await speaker.ask(w, body, headers="x-stainless-retry-count: 1\r\n")).said == "Hi"
    assert [call.excluded for call in w.store.all[2:]] == ["retry", None]
    assert len([call for call in w.store.all if call.excluded is None]) == 2


# what is sent


@every()
async def test_bodies_that_are_refused_are_refused_in_the_dialect_s_words(speaker: Speaker) -> None:
    async with faked(Limits(body_bytes=2000, body_seconds=0.05)) as w:
        kind = "request_too_large" if speaker.name == "messages" else "invalid_request_error"
        heard = await speaker.ask(w, b"x" * 3000)
        assert (heard.status, heard.json["error"]["type"]) == (413, kind)
        heard = await speaker.ask(w, b"x", headers="content-encoding: gzip\r\n")
        assert (heard.status, heard.errors) == (415, ["compressed requests are not accepted"])
        heard = await speaker.ask(w, b"{")
        assert heard.status == 400
        assert "not valid JSON" in heard.errors[0]
        # a body that is announced and never comes, and one without an end
        reader, writer = await w.connect()
        head = f"POST {speaker.path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer train\r\n"
        writer.write(f"{head}content-length: 9\r\n\r\n".encode())
        heard = await speaker.hear(reader)
        assert (heard.status, heard.errors) == (408, ["the request did not arrive in time"])
        writer.transport.abort()
        reader, writer = await w.connect()
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + b"200\r\n" + b"x" * 512 + b"\r\n")
        writer.write((b"200\r\n" + b"x" * 512 + b"\r\n") * 4)
        assert (await speaker.hear(reader)).status == 413
        writer.transport.abort()
        assert not w.engine.chats
        assert w.proxy.in_flight == 0


@every()
async def test_a_kept_connection_is_right_after_a_refusal_and_after_an_answer(w: World, speaker: Speaker) -> None:
    """Requests sent one behind the other, without waiting: each gets its own answer, in order."""
    w.engine.script += [speaker.answers("one"), speaker.answers("two", stream=True), speaker.answers("three")]
    bodies = [speaker.body(), b"{", speaker.body(stream=True), {"model": 5}, speaker.body()]
    reader, writer = await w.connect()
    for body in bodies:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {speaker.path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer train\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    heard = [await speaker.hear(reader) for _ in bodies]
    assert [item.status for item in heard] == [200, 400, 200, 400, 200]
    assert [item.said for item in heard[::2]] == ["one", "two", "three"]
    writer.close()


@every()
async def test_one_client_s_end_is_not_another_s(w: World, speaker: Speaker) -> None:
    """Fifty streams at once, every other one left in the middle: the rest are whole, and each is its own."""
    w.engine.script += [sse(speaker.stream("Hi" * 10), hold_after=6)] * 50
    sent = [await speaker.send(w, stream=True) for _ in range(50)]
    for number, (reader, writer) in enumerate(sent):
        await asyncio.wait_for(reader.readuntil(b'"H"'), WAIT)
        if number % 2:
            writer.transport.abort()
    w.engine.release.set()
    for reader, writer in sent[::2]:
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), WAIT)
        assert any(end in rest for end in (b"[DONE]", b"message_stop", b"response.completed"))
        writer.close()
    await w.idle()
    found = Counter(call.status for call in w.store.all)
    assert found[CallStatus.OK] >= 25
    assert found[CallStatus.OK] + found[CallStatus.CANCELLED] == 50
    assert all(call.choices[0].message["content"] == "Hi" * 10 for call in w.store.all if call.status is CallStatus.OK)


async def test_an_answer_to_a_client_that_left_is_not_another_client_s(w: World) -> None:
    """The engine's connection of a call that was given up is not used again."""
    w.engine.script += [sse(SPEAKERS[0].stream("old"), hold_after=2), answer("new")]
    _, writer = await SPEAKERS[0].send(w, stream=True)
    await asyncio.wait_for(w.engine.reached.wait(), WAIT)
    writer.transport.abort()
    await asyncio.wait_for(w.engine.aborted.wait(), WAIT)
    assert (await SPEAKERS[0].ask(w)).said == "new"
