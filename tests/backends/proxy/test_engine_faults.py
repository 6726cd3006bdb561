"""Faults of the engine in every dialect, whole and streamed: what the client sees, what is kept, that no place leaks.

A client must see a failure as one: an error, and never the end that an answer has. The fault matrix names the rows.
"""

import asyncio
import gzip
import json
import random
from typing import Any

import pytest
from art_backends.config import Limits
from art_backends.proxy.app import _read
from art_backends.proxy.dialect import Dialect
from art_backends.proxy.engine_client import parse_json
from art_backends.proxy.exchange import _MalformedError, _shape_expected
from art_backends.proxy.outcome import Assembler
from art_backends.proxy.sse import DONE
from art_backends.trajectories import CallStatus, CaptureLevel

from tests.backends.proxy.fake_engine import WAIT, World, chunk, faked, hang, slam, sse, status
from tests.backends.proxy.speakers import CHATTING, Heard, Speaker, every, gives


def failed(heard: Heard, w: World) -> None:
    """The answer broke off: an error is told, there is no end, the connection is cut, and nothing of it trains."""
    assert heard.errors
    assert not heard.ended
    assert not heard.whole
    call = w.store.all[-1]
    assert (call.status, call.excluded, call.choices) == (CallStatus.ERROR, "error", [])
    assert w.proxy.in_flight == 0


def no_crash(caplog: pytest.LogCaptureFixture) -> None:
    assert not [record for record in caplog.records if record.exc_info], "the proxy failed"


@every()
async def test_r10_a_status_is_relayed_and_the_engine_asked_once(w: World, speaker: Speaker) -> None:
    error = {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}
    codes = (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 502, 503, 529)
    for code in codes:
        for stream in (False, True):
            w.engine.script.append(status(code, error, retry_after="7", x_should_retry="false", x_request_id="q"))
            heard = await speaker.ask(w, stream=stream)
            assert (heard.status, heard.errors) == (code, ["no"])
            assert (heard.headers["retry-after"], heard.headers["x-should-retry"]) == ("7", "false")
            assert heard.headers["x-request-id"] == "q"
    assert len(w.engine.chats) == 2 * len(codes), "once for each call"
    assert {(call.status, call.excluded) for call in w.store.all} == {(CallStatus.ERROR, "error")}


@every()
@pytest.mark.parametrize("stream", [False, True])
async def test_r11_an_engine_that_hangs_is_given_up_and_leaves_no_place_taken(speaker: Speaker, stream: bool) -> None:
    async with faked(Limits(first_byte_seconds=0.1)) as w:
        w.engine.script.append(hang)
        heard = await speaker.ask(w, stream=stream)
        assert (heard.status, heard.errors) == (504, ["the engine did not answer in time"])
        await asyncio.wait_for(w.engine.aborted.wait(), WAIT)
        await w.idle()
        assert (w.proxy.in_flight, w.store.only.status) == (0, CallStatus.ERROR)


@every()
async def test_r11_a_stream_that_stalls_is_given_up(speaker: Speaker) -> None:
    async with faked(Limits(idle_seconds=0.1)) as w:
        w.engine.script.append(sse(speaker.stream(), hold_after=2))
        failed(await speaker.ask(w, stream=True), w)
        await asyncio.wait_for(w.engine.aborted.wait(), WAIT)


@every()
async def test_r12_a_stream_cut_anywhere_before_its_end_is_a_failure(w: World, speaker: Speaker) -> None:
    """Reset after the first byte, in the middle, and at the last: when only [DONE] is missing."""
    events = speaker.stream()
    for parts in range(len(events)):
        for cut in (True, False):  # the connection breaks; or HTTP ends, but the stream does not
            w.engine.script.append(sse(events[:parts], cut=cut))
            heard = await speaker.ask(w, stream=True)
            failed(heard, w)
            assert b'"finish_reason":"stop"' not in heard.body
            assert "Hi".startswith(heard.said)
    w.engine.script.append(sse(events, cut=True))  # the stream has ended, if HTTP has not
    heard = await speaker.ask(w, stream=True)
    assert (heard.said, heard.ended, heard.whole) == ("Hi", True, True)
    assert w.store.all[-1].capture is CaptureLevel.TOKENS


@every()
async def test_an_answer_cut_anywhere_is_a_502(w: World, speaker: Speaker) -> None:
    content = speaker.reply()
    cuts = [None, 0, 1, len(content) // 2, len(content) - 1]
    for cut in cuts:  # None: reset before the status line
        for stream in (False, True):
            w.engine.script.append(slam if cut is None else gives(content, cut_at=cut))
            heard = await speaker.ask(w, stream=stream)
            assert (heard.status, heard.ended) == (502, False)
            assert "broke off" in heard.errors[0]
    assert len(w.engine.chats) == 2 * len(cuts), "nothing is sent twice"
    assert {(call.status, tuple(call.choices)) for call in w.store.all} == {(CallStatus.ERROR, ())}


MALFORMED: list[bytes] = [
    b"{",
    b"[1]",
    b'"x"',
    b"\xff\xfe",
    b'{"choices": 7}',
    b'{"choices": [3]}',
    b'{"choices": [{"index": 0, "delta": 5, "text": 5, "message": 5}]}',
    b'{"choices": [{"index": 0, "delta": {"content": 5}, "text": [5], "message": {"content": 5}}]}',
    b'{"choices": [{"index": 0, "delta": {"tool_calls": [5]}, "text": {}, "message": {"tool_calls": [5]}}]}',
    b'{"choices": [{"index": 0, "delta": {"content": "\\ud800"}, "text": "\\ud800"}]}',
    b'{"choices": [{"index": 0, "message": {"content": "\\ud800"}}]}',
]


@every()
async def test_r13_what_cannot_be_read_is_a_failure_told_as_one(
    w: World, speaker: Speaker, caplog: pytest.LogCaptureFixture
) -> None:
    for bad in MALFORMED:
        w.engine.script.append(sse([*speaker.stream()[:2], bad, DONE]))
        heard = await speaker.ask(w, stream=True)
        assert heard.ended != bool(heard.errors)  # chat's clients get a chunk as it is, if it is one at all
        assert w.store.all[-1].excluded in ("error", "unreadable"), bad
        w.engine.script.append(gives(bad))
        heard = await speaker.ask(w)
        assert heard.status in (200, 502)
        assert w.store.all[-1].capture is not CaptureLevel.TOKENS, bad
    for odd in (b"<html>", b"", b"[]", b'{"choices": 5}', b"{}", b'{"choices": []}'):
        w.engine.script.append(gives(odd))
        heard = await speaker.ask(w)
        assert heard.status == 502 or speaker.name in ("chat", "completions"), (odd, heard.body)
        assert w.store.all[-1].status is CallStatus.ERROR, odd
    no_crash(caplog)
    assert (await speaker.ask(w, stream=False)).status in (200, 502)


@every()
async def test_r13_of_10000_events_that_are_bent_none_is_a_crash(w: World, speaker: Speaker) -> None:
    dialect = next(door.dialect for door in w.proxy.doors.all if door.path == speaker.path)
    dice = random.Random(13)
    events = [event for event in speaker.stream() if event != DONE]
    for number in range(2500):  # in each of four dialects
        _bent(dialect, speaker, dice, events if number % 2 else None)


JUNK: list[Any] = [None, True, -1, 10**30, 1.5, "", "x", "\ud800", [], [[]], {}, {"a": 1}, [None]]


def _bent(dialect: Dialect, speaker: Speaker, dice: random.Random, events: list[bytes] | None) -> None:
    """Some events go the way that a stream's go, or an answer an answer's; each was bent in one place."""
    body, writer = _read(dialect, speaker.body(stream=events is not None), "me")
    asked, assembler = dialect.endpoint.asked(body), Assembler()
    for given in [speaker.reply()] if events is None else dice.choices(events, k=4):
        try:
            data = parse_json(_bend(given, dice))
        except ValueError:
            return
        if not isinstance(data, dict) or data.get("error"):
            return
        try:
            assembler.add(data)
        except Exception:  # noqa: BLE001 - as where it is used: the agent gets its answer, read by us or not
            assembler = Assembler()
        try:
            assembler.outcome()
        except (TypeError, ValueError):
            assembler = Assembler()
        try:
            with _shape_expected():
                if events is None:
                    writer.whole(dialect.endpoint.reply(data, asked))
                elif (kept := dialect.endpoint.chunk(data, asked)) is not None:
                    writer.chunk(kept, b"")
        except _MalformedError:
            writer.broken(b'{"error": {"message": "malformed"}}', b"")
            return


def _bend(given: bytes, dice: random.Random) -> bytes:
    where = data = json.loads(given)
    while True:
        key = dice.choice(list(where) if isinstance(where, dict) else range(len(where)))
        if dice.random() < 0.4 or not isinstance(where[key], dict | list) or not where[key]:
            where[key] = dice.choice(JUNK)
            break
        where = where[key]
    written = json.dumps(data).encode()
    if dice.random() < 0.2:
        place = dice.randrange(len(written))
        written = written[:place] + bytes([dice.randrange(256)]) + written[place + 1 :]
    return written


@every()
async def test_a_stream_that_does_not_say_why_it_ended_is_no_answer(w: World, speaker: Speaker) -> None:
    """Chat's clients see that the reason is missing; the other formats' end always has one, so that there is none."""
    for finish in (None, "abort", "error"):
        w.engine.script.append(sse(speaker.stream(finish=finish)))
        heard = await speaker.ask(w, stream=True)
        if speaker in CHATTING[1:]:
            assert not heard.ended
            assert heard.errors
        else:
            assert '"finish_reason":"stop"' not in heard.body.decode()
        call = w.store.all[-1]
        assert call.excluded in ("error", "abort")
        w.engine.script.append(gives(speaker.reply(finish_reason=finish)))
        whole = await speaker.ask(w)
        assert whole.status == (502 if speaker in CHATTING[1:] else 200)
        assert w.store.all[-1].excluded in ("error", "abort")


@every()
async def test_an_error_inside_a_stream_is_told_once_and_has_no_end(w: World, speaker: Speaker) -> None:
    error = b'{"error": {"message": "out of memory", "type": "x", "code": 500}}'
    for after in ([DONE], []):  # some engines end the stream, some hang up
        for begun in range(len(speaker.stream()) - 1):
            w.engine.script.append(sse([*speaker.stream()[:begun], error, *after]))
            heard = await speaker.ask(w, stream=True)
            assert heard.errors == ["out of memory"]
            assert b'"finish_reason":"stop"' not in heard.body or speaker.name in ("chat", "completions")
            if speaker in CHATTING[1:]:
                assert not heard.ended
            call = w.store.all[-1]
            assert (call.status, call.choices) == (CallStatus.ERROR, [])
            assert "out of memory" in (call.error or "")


# what is no fault, though it looks odd


@every()
async def test_bytes_may_come_in_any_pieces(w: World, speaker: Speaker) -> None:
    """CRLF, comments, pings, a byte at a time: characters, line ends and events are split between reads."""
    *events, done = [
        event if event == DONE else json.dumps(json.loads(event), ensure_ascii=False).encode()
        for event in speaker.stream("é😀")
    ]
    text = b": ping\r\n\r\n" + b"".join(b"data: " + e + b"\r\n\r\n: ping\r\n\r\n" for e in events)
    text += b"data: " + done + b"\r\n\r\n"
    for size in (1, 7):
        w.engine.script.append(sse([], raw=[text[i : i + size] for i in range(0, len(text), size)]))
        heard = await speaker.ask(w, stream=True)
        assert (heard.said, heard.ended, heard.errors) == ("é😀", True, [])
        call = w.store.all[-1]
        assert (call.capture, call.choices[0].message["content"]) == (CaptureLevel.TOKENS, "é😀")


@every()
async def test_a_compressed_answer_is_read_and_a_broken_one_is_a_failure(w: World, speaker: Speaker) -> None:
    events = b"".join(b"data: " + event + b"\n\n" for event in speaker.stream())
    squeezed = gzip.compress(events)
    header = "content-encoding: gzip\r\n"
    w.engine.script += [
        gives(gzip.compress(speaker.reply()), content_encoding="gzip"),
        sse([], raw=[squeezed[i : i + 9] for i in range(0, len(squeezed), 9)], headers=header),
        gives(b"no gzip at all", content_encoding="gzip"),
    ]
    for stream in (False, True):
        heard = await speaker.ask(w, stream=stream)
        assert (heard.said, heard.ended) == ("Hi", True)
        assert "content-encoding" not in heard.headers
        assert w.engine.chats[-1].headers["accept-encoding"] == "identity", "it was not asked for"
        assert w.store.all[-1].capture is CaptureLevel.TOKENS
    assert (await speaker.ask(w)).status == 502
    w.engine.script.append(sse([], raw=[squeezed[:20], b"noise"], headers=header))
    failed(await speaker.ask(w, stream=True), w)


@every()
async def test_an_engine_that_hangs_up_between_calls_costs_none_of_them(w: World, speaker: Speaker) -> None:
    """The race of a kept connection: it is closed while idle (20 times), and once as a request arrives."""

    def and_closes(stream: bool) -> Any:
        async def behave(engine: Any, body: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
            await speaker.answers(stream=stream)(engine, body, reader, writer)
            writer.close()

        return behave

    for number in range(20):
        stream = number % 2 == 1
        w.engine.script.append(and_closes(stream))
        assert (await speaker.ask(w, stream=stream)).said == "Hi"
    w.engine.script += [speaker.answers(), slam]
    assert (await speaker.ask(w)).status == 200
    assert (await speaker.ask(w)).status == 502
    assert len(w.engine.chats) == 22, "what may have been begun is not sent again"


@every()
async def test_nothing_that_the_engine_adds_reaches_a_client(w: World, speaker: Speaker) -> None:
    secret = ["token_ids", "prompt_token_ids", "kv_transfer", "routed_experts", "metrics", "token_logprobs", "-0.25"]
    secret += [] if speaker.name == "messages" else ["stop_reason"]
    for stream in (False, True):
        w.engine.script.append(speaker.answers(stream=stream, **({} if stream else {"prompt_logprobs": [1]})))
        heard = await speaker.ask(w, stream=stream)
        assert heard.said == "Hi"
        assert not [word for word in secret if word in heard.body.decode()]
        assert w.engine.chats[-1].body["return_token_ids"] is True
        assert w.store.all[-1].capture is CaptureLevel.TOKENS
        assert "p@3" not in heard.body.decode(), "the app's name for the model"


@every()
async def test_headers_and_fields_that_nobody_knows_pass(w: World, speaker: Speaker) -> None:
    for stream in (False, True):
        w.engine.script.append(
            sse(speaker.stream(), headers="x-new: 1\r\n") if stream else gives(speaker.reply(), x_new="1")
        )
        heard = await speaker.ask(w, speaker.body(stream=stream, a_new_field={"x": 1}), headers="x-mine: 2\r\n")
        assert heard.headers["x-new"] == "1"
        assert w.engine.chats[-1].headers["x-mine"] == "2"
        assert w.engine.chats[-1].body["a_new_field"] == {"x": 1}


@every()
async def test_counts_are_told_where_the_format_has_them_and_in_chunks_only_if_asked(
    w: World, speaker: Speaker
) -> None:
    for asked in (False, True):
        w.engine.script.append(sse(speaker.stream()))
        more = {"stream_options": {"include_usage": True}} if asked else {}
        heard = await speaker.ask(w, speaker.body(stream=True, **(more if speaker.name != "messages" else {})))
        assert w.engine.chats[-1].body["stream_options"]["include_usage"] is True, "the record wants it"
        told = heard.body.decode().count("_tokens")
        if speaker.name in ("chat", "completions"):
            assert bool(told) == asked
            assert len([item for item in heard.items if not item["choices"]]) == asked
        else:
            assert told


@every()
async def test_huge_prompts_and_answers(w: World, speaker: Speaker) -> None:
    prompt, said = "é" * 600_000, "x" * 2_000_000
    parts = [chunk([{"index": 0, "delta": {"content": said[:50_000]}, "finish_reason": None}])] * 40
    w.engine.script += [
        gives(speaker.reply()[:-1] + b" " * 2_000_000 + b"}"),
        sse([*[speaker.as_asked(part) for part in parts], *speaker.stream("")[-3:]]),
    ]
    heard = await speaker.ask(w, text=prompt)
    assert heard.said == "Hi"
    heard = await speaker.ask(w, text=prompt, stream=True)
    assert heard.said == said
    sent = w.engine.chats[1].body
    assert prompt in (sent.get("prompt"), (sent.get("messages") or [{}])[0].get("content"))
    assert w.store.all[1].choices[0].message["content"] == said
    w.engine.script.append(gives(speaker.reply("y" * 20_000)))
    assert (await speaker.ask(w)).said == "y" * 20_000
