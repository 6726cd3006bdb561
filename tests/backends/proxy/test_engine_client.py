"""The engine client over a real Unix socket and against broken engines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from art_backends.errors import EngineError
from art_backends.proxy.engine_client import EngineClient

Reply = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(status: int, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def engine(tmp_path: Path, *replies: Reply) -> AsyncIterator[tuple[EngineClient, list[bytes]]]:
    """Answers one request per reply, in order; gives the client and what it sent."""
    seen: list[bytes] = []
    left = list(replies)
    tasks: set[object] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [
                    int(row.split(b":")[1]) for row in head.lower().split(b"\r\n") if row.startswith(b"content-length")
                ]
                seen.append(head + await reader.readexactly(length[0] if length else 0))
                item = left.pop(0)
                if callable(item):
                    await item(reader, writer)
                    return
                writer.write(item)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    path = str(tmp_path / "e.sock")
    server = await asyncio.start_unix_server(serve, path)
    client = EngineClient(uds=path)
    try:
        yield client, seen
    finally:
        await client.aclose()
        server.close()
        await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[call-overload]
        await asyncio.sleep(0)


async def test_calls_over_a_unix_socket(tmp_path: Path) -> None:
    replies = [
        reply(200, b'{"tokens": [1, 2], "count": 2}'),
        reply(200, b'{"prompt": "ab"}'),
        reply(200, b'{"special_tokens": ["<x>"]}'),
        reply(200, b"ok", "text/plain"),
        reply(200, b"ok", "text/plain"),
        reply(200, b'{"data": [{"id": "base"}]}'),
        reply(200, b"{}"),
        reply(200, b'{"running": 0}'),
        reply(200, b'{"choices": [{"logprobs": NaN}]}'),
        reply(200, b'{"choices": []}'),
    ]
    async with engine(tmp_path, *replies) as (client, seen):
        assert await client.tokenize({"prompt": "x"}) == {"tokens": [1, 2], "count": 2}
        assert await client.detokenize([1, 2]) == "ab"
        assert await client.tokenizer_info() == await client.tokenizer_info() == {"special_tokens": ["<x>"]}
        await client.load_adapter("p@1", "/v/p@1")
        await client.unload_adapter("p@1")
        assert await client.models() == [{"id": "base"}]
        assert await client.health()
        assert await client.metrics() == {"running": 0}
        assert (await client.chat({"model": "base"}))[0] == 200  # NaN is read, too
        assert (await client.completions({"model": "base"}))[2] == {"choices": []}
    paths = [item.split()[1].decode() for item in seen]
    assert paths == [
        "/tokenize", "/detokenize", "/tokenizer_info", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
        "/v1/models", "/health", "/metrics.json", "/v1/chat/completions", "/v1/completions",
    ]  # fmt: skip
    assert b"accept-encoding: identity" in seen[0].lower()
    assert b"load_inplace" not in seen[3]


async def test_what_an_engine_lacks_is_none(tmp_path: Path) -> None:
    async with engine(tmp_path, *[reply(404, b"{}")] * 4) as (client, _):
        assert await client.tokenize({"prompt": "x"}) is None
        assert await client.detokenize([1]) is None
        assert await client.tokenizer_info() is None
        assert await client.metrics() is None


async def test_refusals_carry_status_code_and_words(tmp_path: Path) -> None:
    refusal = reply(400, b'{"error": {"message": "already loaded", "code": "duplicate"}}')
    missing = reply(404, b'{"error": {"message": "no such model", "code": "model_not_found"}}')
    async with engine(tmp_path, refusal, missing, reply(500, b"<html>")) as (client, _):
        with pytest.raises(EngineError, match="already loaded") as caught:
            await client.load_adapter("p@1", "/v")
        assert (caught.value.status, caught.value.code) == (400, "duplicate")
        with pytest.raises(EngineError, match="no such model"):
            await client.tokenize({"prompt": "x", "model": "p@9"})
        with pytest.raises(EngineError, match="<html>"):
            await client.models()


async def test_an_engine_that_is_away(tmp_path: Path) -> None:
    client = EngineClient(uds=str(tmp_path / "none.sock"))
    with pytest.raises(EngineError, match="cannot be reached") as caught:
        await client.models()
    assert caught.value.status == 503
    assert not await client.health()
    await client.aclose()


async def test_a_request_is_never_sent_twice(tmp_path: Path) -> None:
    async def slam(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        return

    async with engine(tmp_path, reply(200, b"{}"), slam, reply(200, b"{}")) as (client, seen):
        await client.chat({"n": 1})
        with pytest.raises(EngineError) as caught:
            await client.chat({"n": 2})  # on the connection that was kept: closed without a reply
        assert caught.value.status == 502
        assert len(seen) == 2


async def test_streams_and_their_end(tmp_path: Path) -> None:
    events = b'data: {"a": 1}\n\n: ping\n\ndata: [DONE]\n\n'
    async with engine(
        tmp_path, reply(200, events, "text/event-stream"), reply(400, b'{"error": {"message": "no"}}')
    ) as (client, _):
        assert [item async for item in client.chat_stream({})] == [b'{"a": 1}', b"[DONE]"]
        with pytest.raises(EngineError, match="no"):
            [item async for item in client.chat_stream({})]


async def test_leaving_early_hangs_up(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        await writer.drain()
        await reader.read()
        gone.set()

    async with engine(tmp_path, hold) as (client, _):
        async with client.open("/v1/chat/completions", b"{}") as stream:
            assert stream.is_events
            events = await stream.next_events(5)
            assert events is not None
            assert events[0].data == b"1"
        await asyncio.wait_for(gone.wait(), 5)


async def test_large_replies_are_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, reply(200, b"x" * 5000)) as (client, _):
        client._reply_bytes = 1000
        with pytest.raises(EngineError, match="exceeds"):
            await client.chat({})


def test_exactly_one_address() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        EngineClient()
    with pytest.raises(ValueError, match="exactly one"):
        EngineClient(uds="a", url="b")


async def test_a_loaded_name_stands_for_the_same_weights_for_ever(tmp_path: Path) -> None:
    loaded, refused = reply(200, b"ok", "text/plain"), reply(400, b'{"error": {"message": "no"}}')
    async with engine(tmp_path, refused, loaded, loaded, loaded) as (client, seen):
        with pytest.raises(EngineError, match="no"):
            await client.load_adapter("p@1", "/bad/p@1")
        await client.load_adapter("p@1", "/v/p@1")  # nothing of it was loaded
        await client.unload_adapter("p@1")
        with pytest.raises(EngineError, match=r"p@1 was loaded from /v/p@1.*not loaded from /w/p@1"):
            await client.load_adapter("p@1", "/w/p@1")
        assert len(seen) == 3, "it was not asked"
        await client.load_adapter("p@1", "/v/p@1")  # again, after the engine was restarted
        assert all(b"inplace" not in head for head in seen)


async def test_a_look_ahead_takes_nothing_away(tmp_path: Path) -> None:
    async with engine(tmp_path, reply(200, b"abc", "text/event-stream"), reply(200, b"")) as (client, _):
        async with client.open("/x", b"{}") as stream:
            assert await stream.peek() == b"abc"
            assert await stream.peek(lambda seen: len(seen) > 9) == b"abc", "to the end"
            assert await stream.next_read() == b"abc"
            assert await stream.next_read() == b""
        async with client.open("/x", b"{}", affinity="r1") as stream:
            assert await stream.peek() == b""
            assert await stream.read() == b""
