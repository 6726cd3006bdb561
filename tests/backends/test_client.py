"""The client against real sockets: deadlines, repeats, and words for what a server may do wrong."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from art_backends.client import Client
from art_backends.config import TrainConfig
from art_backends.errors import ControlError, NothingToLearnError, ServerError, TrainingError

Answer = Callable[[str, bytes], Awaitable[bytes | None]]


def reply(content: object, status: int = 200) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """Answers each request with bytes of its own choosing; None: the connection is cut."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await exchange(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
        body = await reader.readexactly(length)
        answered = await answer(head, body)
        if answered is not None:
            writer.write(answered)
            await writer.drain()

    handlers: set[asyncio.Task[object]] = set()
    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def test_a_server_that_is_not_there() -> None:
    async with server(lambda *_: asyncio.sleep(0, None)) as url:
        pass
    async with Client(url, "t") as client:
        with pytest.raises(
            ServerError, match=r"the server cannot be reached .*start it with `art-backends serve`"
        ) as error:
            await client.status()
    assert not isinstance(error.value, ControlError)


async def test_what_may_be_repeated_is_and_opening_is_not() -> None:
    asked: list[str] = []

    async def answer(head: str, _: bytes) -> bytes | None:
        asked.append(head.split(" ", 2)[1])
        return None if len(asked) < 3 else reply({"ok": True})

    async with server(answer) as url, Client(url, "t") as client:
        assert await client.status() == {"ok": True}
        assert asked == ["/control/v1/status"] * 3
        asked.clear()
        with pytest.raises(ServerError):
            await client.open_rollout(policy="p")
        assert asked == ["/control/v1/rollouts"], "a rollout whose opener got no answer must not be opened twice"


async def test_the_token_is_sent_and_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    heads = []

    async def answer(head: str, _: bytes) -> bytes:
        heads.append(head)
        return reply({})

    async with server(answer) as url, Client(url + "/", "secret") as client:
        await client.status()
    assert "authorization: Bearer secret" in heads[0].replace("Authorization", "authorization")
    assert "secret" not in repr(client)


async def test_deadlines() -> None:
    async def answer(head: str, _: bytes) -> bytes | None:
        if "POST" in head:
            return reply({"state": "running"}, 202)
        await asyncio.Event().wait()
        return None

    async with server(answer) as url, Client(url, "t", request_seconds=0.2) as client:
        with pytest.raises(ServerError, match=r"no answer to GET /status \(ReadTimeout\)"):
            await client.status()
        with pytest.raises(TrainingError, match=r"not done within 0.2 s"):
            await client.train_step(1, TrainConfig(), rollout_ids=[], deadline=0.2)


@pytest.mark.parametrize(
    ("content", "status", "said", "code"),
    [
        ({"error": {"code": "conflict", "message": "no"}}, 409, "no", "conflict"),
        (b"<html>nginx</html>", 502, "not the control API's answer (HTTP 502)", "bad_reply"),
        (b"<html>hello</html>", 200, "does another program listen there?", "bad_reply"),
        ([1], 200, "is not an object", "bad_reply"),
    ],
)
async def test_refusals_and_strangers(content: object, status: int, said: str, code: str) -> None:
    async def answer(*_: object) -> bytes:
        return reply(content, status)

    async with server(answer) as url, Client(url, "t") as client:
        with pytest.raises(ControlError) as error:
            await client.status()
    assert said in str(error.value)
    assert error.value.code == code


async def test_a_step_s_progress_and_its_error() -> None:
    reports = [
        {"state": "running", "progress": {"packs_done": 0, "packs": 2}},
        {"state": "running", "progress": {"packs_done": 1, "packs": 2}},
        {"state": "failed", "error": {"type": "NothingToLearnError", "message": "no spread"}, "news": "ignored"},
    ]
    waiting = iter(reports)

    async def answer(*_: object) -> bytes:
        return reply(next(waiting))

    seen = []
    async with server(answer) as url, Client(url, "t") as client:
        with pytest.raises(NothingToLearnError, match="no spread"):
            await client.train_step(
                1, TrainConfig(), rollout_ids=["a"], progress=lambda said: seen.append((said.packs_done, said.packs))
            )
    assert seen == [(0, 2), (1, 2), (0, 0)]


async def test_what_is_not_json_is_not_sent() -> None:
    async with Client("http://127.0.0.1:9", "t") as client:
        with pytest.raises(ControlError, match="is not JSON"):
            await client.close_rollout("r", output=object())
        with pytest.raises(ControlError, match="is not JSON"):
            await client.close_rollout("r", reward=float("nan"))
        for bad in ("../steps", "", "a b", "a/b", "a?b"):
            with pytest.raises(ControlError, match="no rollout id"):
                await client.rollout(bad)
