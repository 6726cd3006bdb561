"""The control API: what it takes, what it refuses in which words, and 50 rollouts at once."""

import asyncio
from typing import Any

import pytest
from art_backends.errors import ControlError
from art_backends.trajectories import RolloutError

PREFIX = "/control/v1"


async def test_status(start: Any) -> None:
    async with start({"models": ["gpt-4o-mini"]}) as server:
        status = await server.client.status()
        policy = status["policies"][0]
        assert policy == {
            "name": "policy",
            "base_model": "fake",
            "digest": "digest-1",
            "version": 0,
            "pinned": None,
            "set_aside": [],
            "versions": [0],
            "models": ["gpt-4o-mini"],
            "capture": "tokens",
            "exact_prompts": True,
            "step": 0,
        }
        assert status["children"] == [
            {"name": "worker", "pid": server.worker.state()["pid"], "state": "up", "restarts": 0}
        ]
        assert status["rollouts"]["open"] == 0
        assert status["engine"]["busy_seconds"] == 0.5
        assert status["store"]["broken"] is None
        assert 0 < status["uptime"] < 100
        assert server.http.base_url.host == "127.0.0.1"


async def test_a_rollout_from_opening_to_reading(start: Any) -> None:
    async with start() as server:
        scenario = {"question": "2+2", "lone": "\ud800", "big": 10**25}
        rollout = await server.open(scenario_id="s1", scenario=scenario, sample=3)
        assert rollout.version == "policy@0"
        assert rollout.base_url == f"{server.url}/v1"
        assert rollout.token not in repr(rollout)
        await server.chat(rollout.token, "first", temperature=0)
        error = RolloutError(type="ValueError", message="x" * 10, traceback="…")
        closed = await server.client.close_rollout(
            rollout.id, output={"said": "\udfff"}, reward=0.25, metrics={"success": 0.0}, error=error
        )
        assert closed.calls == []
        found = await server.client.rollout(rollout.id)
        assert found.scenario == scenario
        assert (found.output, found.reward, found.error) == ({"said": "\udfff"}, 0.25, error)
        call = found.calls[0]
        assert call.request["temperature"] == 0
        assert (call.sampling.temperature, call.sampling.seed) == (1.0, None), "training samples at 1, without a seed"
        assert call.capture == "tokens"
        assert len(call.choices[0].token_ids) == len(call.choices[0].logprobs)


async def test_closing_again(start: Any) -> None:
    async with start() as server:
        rollout = await server.open()
        first = await server.client.close_rollout(rollout.id, reward=1.0, output="a")
        assert await server.client.close_rollout(rollout.id, reward=1.0, output="a") == first
        with pytest.raises(ControlError, match="closed already") as refused:
            await server.client.close_rollout(rollout.id, reward=0.0, output="a")
        assert (refused.value.status, refused.value.code) == (409, "conflict")
        with pytest.raises(ControlError, match="no rollout 'nobody'") as refused:
            await server.client.close_rollout("nobody", reward=0.0)
        assert (refused.value.status, refused.value.code) == (404, "not_found")


BAD = [
    ("POST", "/rollouts", b"{", "the request is no JSON"),
    ("POST", "/rollouts", b"[" * 100_000, "the request is no JSON"),
    ("POST", "/rollouts", b"[]", "request: Input should be"),
    ("POST", "/rollouts", b"{}", "policy: Field required"),
    ("POST", "/rollouts", b'{"policy": "policy", "evil": 1}', "evil: Extra inputs are not permitted"),
    (
        "POST",
        "/rollouts",
        b'{"policy": "policy", "purpose": "steal"}',
        "purpose: Input should be 'train', 'eval' or 'traffic'",
    ),
    ("POST", "/rollouts", b'{"policy": "policy", "step": 1e99}', "step: "),
    ("POST", "/rollouts/x/close", b'{"reward": NaN}', "reward: Input should be a finite number"),
    ("POST", "/rollouts/x/close", b'{"reward": "much"}', "reward: Input should be a valid number"),
    ("POST", "/steps", b'{"policy": "policy", "step": 0, "config": {}}', "step: "),
    ("POST", "/steps", b'{"policy": "policy", "step": 1, "config": {"rank": -1}}', "config.rank: "),
    ("GET", "/rollouts?id=1%20OR%201=1", None, "id: Extra inputs are not permitted"),
    ("GET", "/rollouts?limit=0", None, "limit: "),
    ("GET", "/rollouts?step=x", None, "step: "),
    ("GET", "/rollouts?prefix=", None, "prefix: String should have at least 1 character"),
    ("GET", "/rollouts?step=1&step=2", None, "a parameter is given twice"),
    ("GET", "/rollouts?closed=perhaps", None, "closed: "),
    ("GET", "/steps/1?policy=policy&wait=-1", None, "wait: "),
]


async def test_bad_requests_name_the_field(start: Any) -> None:
    async with start() as server:
        bearer = {"authorization": f"Bearer {server.admin}"}
        for method, path, content, said in BAD:
            reply = await server.http.request(method, PREFIX + path, content=content, headers=bearer)
            assert reply.status_code == 400, (path, reply.text)
            assert reply.json()["error"]["code"] == "invalid_request"
            assert said in reply.json()["error"]["message"]


async def test_a_body_beyond_the_limit(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_backends.server.control.BODY_BYTES", 1000)
    async with start() as server:
        with pytest.raises(ControlError, match="larger than 1000 bytes") as refused:
            await server.open(scenario="x" * 2000)
        assert refused.value.status == 413


async def test_filters(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1, 3)
        other = await server.open(step=2, purpose="eval", group="it's; DROP TABLE rollouts")
        listed = await server.client.rollouts(step=1, closed=True, purpose="train", policy="policy", limit=2)
        assert [rollout.id for rollout in listed] == ids[:2]
        assert [r.id for r in await server.client.rollouts(after=ids[1])] == [ids[2], other.id]
        assert [r.id for r in await server.client.rollouts(group="it's; DROP TABLE rollouts")] == [other.id]
        assert [r.id for r in await server.client.rollouts(closed=False)] == [other.id]
        assert [r.id for r in await server.client.rollouts(prefix=ids[1][:31])] == [ids[1]]
        assert await server.client.rollouts(prefix="%") == []
        assert [r.id for r in await server.client.rollouts(limit=2, newest=True)] == [ids[2], other.id]


async def test_registering_settings(start: Any) -> None:
    async with start() as server:
        config = server.config.model_copy(update={"temperature": 0.7, "models": ["m"]})
        assert (await server.client.register(config))["models"] == ["m"]
        rollout = await server.open()
        assert (await server.chat(rollout.token)).status_code == 404, "gpt-4o-mini is no longer this policy's"
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        headers = {"authorization": f"Bearer {rollout.token}"}
        assert (await server.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        assert (await server.client.rollout(rollout.id)).calls[0].sampling.temperature == 0.7
        with pytest.raises(ControlError, match=r"rank: .* was made with 8, now asked for 16") as refused:
            await server.client.register(config.model_copy(update={"rank": 16}))
        assert refused.value.status == 409
        with pytest.raises(ControlError, match="name: "):
            await server.client.register(config.model_copy(update={"name": "other"}))


async def test_fifty_rollouts_at_once(start: Any) -> None:
    async with start() as server:

        async def one(number: int) -> tuple[str, int]:
            rollout = await server.open(sample=number)
            for turn in range(3):
                reply = await server.chat(rollout.token, f"{number}.{turn}")
                assert reply.json()["choices"][0]["message"]["content"].endswith(f"says {number}.{turn}")
            await server.client.close_rollout(rollout.id, reward=float(number))
            return rollout.id, number

        made = await asyncio.gather(*(one(number) for number in range(50)))
        for rollout_id, number in made:
            found = await server.client.rollout(rollout_id)
            said = [call.request["messages"][0]["content"] for call in found.calls]
            assert said == [f"{number}.{turn}" for turn in range(3)]
            assert [call.sequence for call in found.calls] == [0, 1, 2]
        counts = (await server.client.status())["rollouts"]
        assert (counts["closed"], counts["calls"], counts["unfinished"]) == (50, 150, 0)


async def test_a_rollout_that_is_never_closed_expires(start: Any) -> None:
    async with start(rollout_ttl=0.0) as server:
        rollout = await server.open()
        async with asyncio.timeout(30):
            while not (found := await server.client.rollout(rollout.id)).closed:
                await server.http.get("/health")
        assert found.fault == "expired"
        assert (await server.chat(rollout.token)).status_code == 200


async def test_an_engine_that_gives_text_only_serves_but_does_not_train(start: Any, tmp_path: Any) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "text_only").touch()
    async with start() as server:
        assert (await server.policy())["capture"] == "text"
        rollout = await server.open()
        assert (await server.chat(rollout.token)).status_code == 200
        assert (await server.client.rollout(rollout.id)).calls[0].capture == "text"


async def test_data_come_back_as_they_were(start: Any) -> None:
    """Row S13, through the real store: what would be an object, a statement or an end elsewhere is text here."""
    hostile = [
        '{"lc": 1, "type": "secret", "id": ["OPENAI_API_KEY"]}',
        "half of a pair as text: \\ud83d; whole: \U0001f600; nul: \x00; end of line: \u2028",
        "'); DROP TABLE calls; --",
    ]
    async with start() as server:
        rollout = await server.open(scenario={"lc": 1, "type": "secret", "id": ["HOME"]})
        headers = {"authorization": f"Bearer {rollout.token}", "x-art-node": "%7B%22lc%22%3A1%7D%ED%A0%80"}
        for text in hostile:
            body = {"model": "m", "messages": [{"role": "user", "content": text}], "metadata": {"lc": 1, "x": text}}
            reply = await server.http.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.json()["choices"][0]["message"]["content"].endswith(f"says {text}")
        closed = await server.client.close_rollout(rollout.id, reward=1.0, output={"lc": 1, "type": "constructor"})
        found = await server.client.rollout(rollout.id)
        assert [call.request["messages"][0]["content"] for call in found.calls] == hostile
        assert [call.request["metadata"]["x"] for call in found.calls] == hostile
        assert all(
            call.choices[0].message["content"].endswith(text) for call, text in zip(found.calls, hostile, strict=True)
        )
        assert (found.calls[0].node.name or "").startswith('{"lc":1}')
        assert (found.scenario, found.output) == ({"lc": 1, "type": "secret", "id": ["HOME"]}, closed.output)
        assert found.output == {"lc": 1, "type": "constructor"}
