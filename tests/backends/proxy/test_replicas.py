"""Several engine servers as one: where calls go, what moves when one fails at any point, and how it comes back."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from art_backends.config import Limits
from art_backends.errors import ConfigError, EngineError
from art_backends.proxy import replicas as module
from art_backends.proxy.engine_client import EngineClient, EngineStream
from art_backends.proxy.identity import Identity, RolloutContext
from art_backends.proxy.replicas import Replicas
from art_backends.trajectories import CallStatus

from tests.backends.proxy.fake_engine import (
    WAIT,
    Behaviour,
    FakeEngine,
    after_release,
    answer,
    chunks,
    collect,
    hang,
    say,
    slam,
    sse,
    status,
    world,
)
from tests.backends.proxy.speakers import gives

CHAT = "/v1/chat/completions"
PLAIN = b'{"model": "m"}'
STREAM = b'{"model": "m", "stream": true}'
ERROR: dict[str, Any] = {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}
NEVER = 600.0


@dataclass
class Fleet:
    """Engines on ports of their own, and the replicas that they are to the proxy."""

    replicas: Replicas
    engines: list[FakeEngine]
    ports: list[int]
    listening: dict[int, asyncio.Server] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)  # addresses of those that got their adapters

    async def begin(self, number: int) -> None:
        server = await asyncio.start_server(self.engines[number].serve, "127.0.0.1", self.ports[number])
        self.listening[number] = server
        self.ports[number] = server.sockets[0].getsockname()[1]

    async def kill(self, number: int) -> None:
        """The process is gone: nothing listens, and what was open is reset."""
        self.listening.pop(number).close()
        tasks = list(self.engines[number].serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def states(self) -> list[str]:
        return [item["state"] for item in self.replicas.state()]

    def asked(self) -> list[int]:
        return [len(engine.chats) for engine in self.engines]


@asynccontextmanager
async def fleet(
    count: int = 2, *, up_seconds: float = NEVER, out_seconds: float = 0.01, health_seconds: float = WAIT
) -> AsyncIterator[Fleet]:
    engines = [FakeEngine() for _ in range(count)]
    made = Fleet(None, engines, [0] * count)  # type: ignore[arg-type]
    for number in range(count):
        await made.begin(number)
    clients = [EngineClient(url=f"http://127.0.0.1:{port}") for port in made.ports]
    replicas = made.replicas = Replicas(
        clients,
        names=[f"engine-{number}" for number in range(count)],
        up_seconds=up_seconds,
        out_seconds=out_seconds,
        health_seconds=health_seconds,
    )

    async def back(client: EngineClient) -> None:
        made.given.append(client.address)

    replicas.on_back = back
    await replicas.start()
    try:
        yield made
    finally:
        for engine in engines:
            engine.release.set()
        await replicas.aclose()
        for number in list(made.listening):
            await made.kill(number)
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110 - several things change, none of them tells
            await asyncio.sleep(0)


def unwell(code: int = 503) -> Behaviour:
    return status(code, {})


async def ask(replicas: Replicas, body: bytes = PLAIN, **options: Any) -> tuple[int, bytes]:
    async with replicas.open(CHAT, body, **options) as reply:
        return reply.status, await reply.read()


def text(content: bytes) -> str:
    return str(json.loads(content)["choices"][0]["message"]["content"])


# where calls go


async def test_calls_go_where_the_least_are_in_flight() -> None:
    async with fleet(3) as f, AsyncExitStack() as open_ones:
        for _ in range(7):
            await open_ones.enter_async_context(f.replicas.open(CHAT, PLAIN))
        assert sorted(f.asked()) == [2, 2, 3]
        assert sorted(item["in_flight"] for item in f.replicas.state()) == [2, 2, 3]
        await open_ones.aclose()
        assert [item["in_flight"] for item in f.replicas.state()] == [0, 0, 0]
        for _ in range(5):
            await ask(f.replicas)
        assert f.asked() == [4, 4, 4], "one at a time they take turns"


async def test_a_rollout_stays_at_its_server_unless_that_is_much_busier() -> None:
    async with fleet() as f, AsyncExitStack() as busy:
        for _ in range(5):
            await ask(f.replicas, affinity="r1")
        assert sorted(f.asked()) == [0, 5]
        home = f.asked().index(5)
        for number in range(module.SLACK - 1):
            f.engines[home].script.append(after_release("later"))
            opening = f.replicas.open(CHAT, PLAIN, affinity="r1")
            busy.push_async_callback(_ended, asyncio.create_task(_enter(opening)))
            await until(lambda number=number: f.replicas.state()[home]["in_flight"] == number + 1)
        await ask(f.replicas, affinity="r1")
        assert f.asked()[1 - home] == 0, f"{module.SLACK - 1} more are not too many"
        f.engines[home].script.append(after_release("later"))
        busy.push_async_callback(_ended, asyncio.create_task(_enter(f.replicas.open(CHAT, PLAIN, affinity="r1"))))
        await until(lambda: f.replicas.state()[home]["in_flight"] == module.SLACK)
        await ask(f.replicas, affinity="r1")
        assert f.asked()[1 - home] == 1
        f.engines[home].release.set()
        await until(lambda: f.replicas.state()[home]["in_flight"] == 0)
        await ask(f.replicas, affinity="r1")
        assert f.asked()[1 - home] == 2, "it goes where the last call went"


async def _enter(opening: Any) -> None:
    async with opening as reply:
        await reply.read()


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_few_rollouts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROLLOUTS", 2)
    async with fleet() as f:
        for rollout in "abcab":
            await ask(f.replicas, affinity=rollout)
        assert list(f.replicas._homes) == ["a", "b"]


async def test_the_proxy_sends_a_rollout_s_calls_to_one_server_and_tells_figures() -> None:
    async with fleet() as f, world("", f.engines[0], client=f.replicas) as w:
        for number in range(4):
            w.identities[f"t{number}"] = Identity("rollout", RolloutContext(f"rollout-{number}", "policy", "policy@3"))
        for _ in range(3):
            for number in range(4):
                await say(w.sdk(f"t{number}"))
        at = [Counter(item.headers["x-session-id"] for item in engine.chats) for engine in f.engines]
        assert sorted(at[0] + at[1]) == [f"rollout-{number}" for number in range(4)]
        assert not at[0].keys() & at[1].keys()
        assert [len(counts) for counts in at] == [2, 2]
        f.engines[0].script.append(slam)
        await say(w.sdk("agent"))
        told = w.proxy.metrics().decode()
        assert "art_proxy_moved_total 1.0" in told
        assert "art_replicas_up" in told
        assert w.proxy.snapshot()["moved"] == 1


# what moves


CUTS: dict[str, Behaviour] = {
    "slammed": slam,
    "headers, no event": sse([], cut=True),
    "a stream without events": sse([]),
    "half an event": sse([], raw=[b'data: {"choices": [{"delta'], cut=True),
    "the role alone": sse(chunks("Hi", {})[:1], cut=True),
    "an answer of no byte": gives(b"{}", cut_at=0),
}


@pytest.mark.parametrize("cut", CUTS)
async def test_a_call_that_broke_off_before_its_answer_goes_elsewhere(cut: str) -> None:
    async with fleet() as f:
        f.engines[0].script.append(CUTS[cut])
        f.engines[1].script.append(answer("from the other"))
        _, content = await ask(f.replicas)
        assert text(content) == "from the other"
        assert f.asked() == [1, 1]
        await until(lambda: f.states() == ["up", "up"])
        assert f.given == [f"http://127.0.0.1:{f.ports[0]}"], "it was out: it gets its adapters before it is back"
        assert f.replicas.figures() == {"replicas_up": 2, "moved": 1}


async def test_a_server_that_is_gone_is_asked_no_more() -> None:
    async with fleet() as f:
        await f.kill(0)
        for _ in range(3):
            assert (await ask(f.replicas))[0] == 200
        assert f.asked() == [0, 3]
        state = f.replicas.state()[0]
        assert (state["state"], state["moved"], state["in_flight"]) == ("out", 1, 0)
        assert "cannot be reached" in state["why"]
        assert f.replicas.figures() == {"replicas_up": 1, "moved": 1}


async def test_a_stream_that_has_told_a_token_fails_as_with_one_server() -> None:
    async with fleet() as f, world("", f.engines[0], client=f.replicas) as w:
        f.engines[0].script.append(sse(chunks("Hello", {})[:3], cut=True))
        said: list[str] = []

        async def listen() -> None:
            async for chunk in await say(w.sdk(), stream=True):
                said.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError):
            await listen()
        assert "".join(said) == "He"
        assert f.asked() == [1, 0]
        assert (w.store.only.status, f.replicas.figures()["moved"]) == (CallStatus.ERROR, 0)


async def test_a_call_that_moved_is_recorded_once_and_whole() -> None:
    async with fleet() as f, world("", f.engines[0], client=f.replicas) as w:
        f.engines[0].script.append(sse(chunks("Hello", {})[:1], cut=True))
        said = await collect(await say(w.sdk(), stream=True))
        assert "".join(item.choices[0].delta.content or "" for item in said) == "Hi"
        assert (w.store.only.status, len(w.store.log)) == (CallStatus.OK, 2)
        assert w.store.only.choices[0].token_ids == [1072, 1105, 2]


async def test_503_is_for_another_server_and_the_last_one_s_answer() -> None:
    async with fleet(3) as f:
        f.engines[0].script.append(status(503, ERROR))
        f.engines[1].script.append(status(503, ERROR))
        assert (await ask(f.replicas))[0] == 200
        assert (f.asked(), f.states()) == ([1, 1, 1], ["up"] * 3)
        for engine in f.engines:
            engine.script.append(status(503, ERROR, retry_after="7"))
        async with f.replicas.open(CHAT, PLAIN) as reply:
            assert (reply.status, dict(reply.headers)["retry-after"]) == (503, "7")
        assert f.asked() == [2, 2, 2], "once each"


@pytest.mark.parametrize("fault", ["500", "a stream that begins with an error"])
async def test_a_failure_is_an_answer_of_a_server_that_is_well(fault: str) -> None:
    failing = status(500, ERROR) if fault == "500" else sse([json.dumps(ERROR).encode(), b"[DONE]"])
    async with fleet() as f:
        f.engines[0].script.append(failing)
        code, content = await ask(f.replicas)
        assert (b'"no"' in content, f.asked(), f.states()) == (True, [1, 0], ["up", "up"])
        assert code in (200, 500)
        await ask(f.replicas)
        f.engines[0].script.append(failing)
        f.engines[0].health = unwell()
        assert b'"no"' not in (await ask(f.replicas))[1], "an engine that dies says so, and has told no token"
        assert f.asked() == [2, 2]
        assert "not well" in f.replicas.state()[0]["why"]


async def test_other_statuses_are_answers() -> None:
    async with fleet() as f:
        for code in (400, 404, 429):
            for engine in f.engines:
                engine.script.clear()
                engine.script.append(status(code, ERROR))
                engine.script.append(status(200, {"data": [{"id": "m"}]}))  # it does serve the model
            assert (await ask(f.replicas))[0] == code
        assert (sum(f.asked()), f.states()) == (3 + 1, ["up", "up"]), "and what is served"


async def test_a_server_that_has_lost_its_adapters_is_given_them() -> None:
    async with fleet() as f:
        f.engines[0].script.append(status(404, {"error": {"message": "The model `m` does not exist."}}))
        f.engines[0].script.append(status(200, {"data": [{"id": "base"}]}))
        f.engines[1].script.append(answer("from the other"))
        assert text((await ask(f.replicas))[1]) == "from the other"
        await until(lambda: f.states() == ["up", "up"])
        assert f.given == [f"http://127.0.0.1:{f.ports[0]}"]


@pytest.mark.parametrize("health", ["hangs", "says no", "is no more"])
async def test_what_a_server_that_is_not_well_has_not_answered_goes_elsewhere(health: str) -> None:
    async with fleet(up_seconds=0.02, health_seconds=0.05 if health == "hangs" else WAIT) as f, AsyncExitStack() as s:
        first = f.engines[0]
        first.script.append(sse(chunks("Hello", {}), hold_after=2))  # it has told a token
        stream: EngineStream = await s.enter_async_context(f.replicas.open(CHAT, STREAM))
        first.script.extend([hang, hang])
        f.engines[1].script.append(after_release("later"))
        waiting = [asyncio.create_task(ask(f.replicas)) for _ in range(3)]
        await until(lambda: sum(f.asked()) == 4)
        stuck = f.asked()[0] - 1
        assert stuck >= 1
        first.health = {"hangs": hang, "says no": unwell(), "is no more": slam}[health]
        await until(lambda: f.replicas.state()[0]["moved"] == stuck)
        assert f.states()[0] == "out"
        f.engines[1].release.set()
        done = await asyncio.gather(*waiting)
        assert [code for code, _ in done] == [200] * 3
        assert sum(f.asked()) == 4 + stuck, "once more each"
        first.release.set()
        assert b"[DONE]" in await stream.read(), "what has told a token goes on there"


async def test_the_deadline_is_one_for_all_servers() -> None:
    async with fleet() as f:
        f.engines[0].script.append(hang)
        with pytest.raises(TimeoutError):
            await ask(f.replicas, first_byte_seconds=0.05)
        assert (f.asked(), f.states()) == ([1, 0], ["up", "up"])
        await asyncio.wait_for(f.engines[0].aborted.wait(), WAIT)
        assert [item["in_flight"] for item in f.replicas.state()] == [0, 0]


async def test_a_client_that_leaves_leaves_no_place_taken() -> None:
    async with fleet() as f:
        f.engines[0].script.append(sse(chunks("Hello", {}), hold_after=0))
        task = asyncio.create_task(ask(f.replicas, STREAM))
        await asyncio.wait_for(f.engines[0].reached.wait(), WAIT)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(f.engines[0].aborted.wait(), WAIT)
        assert [item["in_flight"] for item in f.replicas.state()] == [0, 0]


async def test_if_none_is_left_the_call_is_refused() -> None:
    async with fleet() as f:
        f.engines[0].health = f.engines[1].health = unwell()
        f.engines[0].script.append(slam)
        f.engines[1].script.append(slam)
        with pytest.raises(EngineError, match=r"engine-0: .*engine-1: ") as refused:
            await ask(f.replicas)
        assert (refused.value.status, f.asked(), f.replicas.up) == (503, [1, 1], False)
        with pytest.raises(EngineError, match="no engine server takes calls"):
            await f.replicas.wait_ready(0.01)
        waiting = asyncio.create_task(f.replicas.wait_ready(WAIT))
        f.engines[1].health = None
        await waiting
        assert (await ask(f.replicas))[0] == 200


async def test_clients_are_told_to_try_again_if_none_is_left() -> None:
    async with fleet(1) as f, world("", f.engines[0], client=f.replicas) as w:
        f.engines[0].health = unwell()
        f.engines[0].script.append(slam)
        with pytest.raises(openai.InternalServerError) as refused:
            await say(w.sdk())
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")


# coming back


async def test_a_server_comes_back_with_its_adapters_and_not_before() -> None:
    async with fleet() as f:
        holding, allowed = asyncio.Event(), asyncio.Event()
        tries = 0

        async def back(client: EngineClient) -> None:
            nonlocal tries
            assert client is f.replicas._replicas[0].client
            tries += 1
            holding.set()
            await allowed.wait()
            if tries == 1:
                raise EngineError("rank 64 is too high", 400, "adapter_not_taken")

        f.replicas.on_back = back
        await f.kill(0)
        await ask(f.replicas)
        assert (f.states(), list(f.replicas.servers())) == (["out", "up"], ["engine-1"])
        await f.begin(0)
        await asyncio.wait_for(holding.wait(), WAIT)
        assert f.states() == ["coming back", "up"]
        for _ in range(3):
            await ask(f.replicas)
        assert f.asked() == [0, 4]
        allowed.set()
        await until(lambda: f.states() == ["up", "up"])
        assert tries == 2, "what fails is tried again"
        await ask(f.replicas)
        assert f.asked() == [1, 4]
        assert f.replicas.state()[0]["why"] is None


async def test_why_a_server_stays_out_is_told() -> None:
    async with fleet() as f:

        async def back(_: EngineClient) -> None:
            raise RuntimeError("the disk is gone")

        f.replicas.on_back = back
        f.replicas.take_out(f.replicas._replicas[1].client, "it was slow")
        await until(lambda: "the disk is gone" in str(f.replicas.state()[1]["why"]))
        assert f.states() == ["up", "out"]


# the rest of what an engine is asked


async def test_small_questions_go_to_any_that_is_up() -> None:
    async with fleet() as f:
        await f.kill(0)
        assert await f.replicas.tokenize({"prompt": "x"}) is None, "a 404 is an answer"
        assert f.states() == ["out", "up"]
        assert await f.replicas.detokenize([1]) is None
        assert await f.replicas.tokenizer_info() is None
        assert await f.replicas.metrics() is None
        assert (await f.replicas.chat({"model": "m"}))[0] == 200
        f.engines[1].script.append(status(200, {"data": [{"id": "m"}]}))
        assert await f.replicas.models() == [{"id": "m"}]
        assert await f.replicas.healthy()
        assert f.replicas.figures()["moved"] == 0, "of calls alone"


async def test_another_may_tell_of_the_tokenizer() -> None:
    class Files(EngineClient):
        asked = 0

        async def tokenizer_info(self) -> dict[str, Any]:
            self.asked += 1
            return {"special_tokens": ["<x>"]}

    files = Files(url="http://127.0.0.1:9")
    replicas = Replicas([EngineClient(url="http://127.0.0.1:9", tokenizer=files)])
    assert await replicas.tokenizer_info() == {"special_tokens": ["<x>"]}
    replicas.forget_tokenizer()
    assert (files.asked, replicas.state()[0]["name"]) == (1, "http://127.0.0.1:9")


def test_each_server_has_a_name_of_its_own() -> None:
    one, other = EngineClient(url="http://127.0.0.1:9/v1"), EngineClient(url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9 is given twice"):
        Replicas([one, other])
    with pytest.raises(ConfigError, match="0 servers"):
        Replicas([])


async def test_the_proxy_s_limits_hold() -> None:
    limits = Limits(first_byte_seconds=0.05)
    async with fleet() as f, world("", f.engines[0], limits, client=f.replicas) as w:
        f.engines[0].script.append(hang)
        with pytest.raises(openai.InternalServerError) as late:
            await say(w.sdk())
        assert (late.value.status_code, f.asked()) == (504, [1, 0])
