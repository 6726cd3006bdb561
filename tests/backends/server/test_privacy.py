"""What of the traffic is kept: no secrets, of apps nothing unless asked for, nothing too old or forgotten."""

import asyncio
import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import pytest
from art_backends import cli
from art_backends.errors import ConfigError, ControlError, StoreError
from art_backends.server import retention, run, traffic
from art_backends.store import Store
from art_backends.trajectories import Rollout, RolloutError

CANARY = "sk-proj-" + "canary0123456789" * 3
WHO = "user-17@example.org"


def on_disk(folder: Path) -> bytes:
    """All that a run folder holds, what is compressed in the store as it reads."""
    found = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    connection = sqlite3.connect(f"file:{folder / 'store.sqlite'}?mode=ro", uri=True)
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for row in connection.execute(f"SELECT * FROM {table}"):
            for value in row:
                content = value if isinstance(value, bytes) else str(value).encode()
                try:
                    content = zlib.decompress(content)
                except zlib.error:
                    content = bytes(content[::4])  # ids: the fake engine's are bytes of the text
                found.append(content)
    connection.close()
    return b"\n".join(found)


async def test_no_secret_reaches_the_disk_and_the_engine_and_the_agent_see_all_of_it(start: Any) -> None:
    """S15: canaries in headers, messages, tool arguments and results, scenarios, outputs and exceptions."""
    async with start() as server:
        rollout = await server.open(scenario_id="s", scenario={"question": f"use {CANARY}"})
        messages = [
            {"role": "user", "content": "what is the key?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "t",
                        "type": "function",
                        "function": {"name": "read", "arguments": json.dumps({"key": CANARY})},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "t", "content": f"OPENAI_API_KEY={CANARY}"},
            {"role": "user", "content": CANARY},
        ]
        reply = await server.http.post(
            "/v1/chat/completions",
            json={"model": "gpt-4o-mini", "messages": messages},
            headers={"authorization": f"Bearer {rollout.token}", "x-secret": CANARY},
        )
        assert CANARY in reply.json()["choices"][0]["message"]["content"], (
            "the model was asked it, the agent is told it"
        )
        clean = await server.chat(rollout.token, "nothing here")
        assert clean.status_code == 200
        error = RolloutError(type="ValueError", message=f"bad key {CANARY}", traceback=f"key = {CANARY!r}")
        for _ in range(2):  # again with the same outcome is no conflict
            await server.client.close_rollout(rollout.id, output={"said": CANARY}, reward=1.0, error=error)
        found = await server.client.rollout(rollout.id)
        assert [(call.excluded, bool(call.prompt_token_ids)) for call in found.calls] == [
            ("redacted", False),
            (None, True),
        ]
        assert found.output == {"said": "[redacted openai]"}
        folder = server.folder
    content = on_disk(folder)
    assert b"[redacted openai]" in content
    assert CANARY.encode() not in content
    assert rollout.token.encode() not in content


async def test_further_patterns_and_none_at_all(start: Any, tmp_path: Path) -> None:
    async with start({"privacy": {"patterns": {"ticket": r"TCK-\d+"}}}) as server:
        rollout = await server.open(scenario={"q": "TCK-99"})
        await server.client.close_rollout(rollout.id, reward=0.0)
        assert (await server.client.rollout(rollout.id)).scenario == {"q": "[redacted ticket]"}
    async with start({"privacy": {"redact": False}}, folder=tmp_path / "other") as server:
        rollout = await server.open(scenario={"q": CANARY})
        await server.client.close_rollout(rollout.id, reward=0.0)
        assert (await server.client.rollout(rollout.id)).scenario == {"q": CANARY}
    with pytest.raises(ConfigError, match=r"privacy\.secrets_of: the environment has no NOT_THERE"):
        async with start({"privacy": {"secrets_of": ["NOT_THERE"]}}, folder=tmp_path / "third"):
            pass


async def ask(server: Any, content: str, **more: Any) -> None:
    headers = {"authorization": f"Bearer {server.agent}", **more.pop("headers", {})}
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": content}], **more}
    assert (await server.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200


async def kept(server: Any) -> list[Rollout]:
    listed = await server.client.rollouts(purpose="traffic")
    return [await server.client.rollout(rollout.id) for rollout in listed]


async def test_calls_of_apps_are_not_kept_by_default(start: Any) -> None:
    async with start() as server:
        await ask(server, "private matter", metadata={"session_id": "a"})
        assert await kept(server) == []
        folder = server.folder
    assert b"private matter" not in on_disk(folder)


async def test_a_session_is_a_rollout_and_a_call_without_one_is_alone(start: Any) -> None:
    async with start({"privacy": {"traffic": "full"}}) as server:
        await asyncio.gather(*(ask(server, f"a{n}", headers={"x-art-session": "A"}) for n in range(5)))
        await ask(server, "b", metadata={"thread_id": "B"}, user=WHO, temperature=0)
        await ask(server, "alone")
        body = {"model": "gpt-4o-mini", "max_tokens": 20, "messages": [{"role": "user", "content": "in Messages"}]}
        headers = {"x-api-key": server.agent, "x-art-session": "A"}
        assert (await server.http.post("/v1/messages", json=body, headers=headers)).status_code == 200
        found = await kept(server)
        assert [(len(rollout.calls), rollout.group, rollout.closed) for rollout in found] == [
            (6, "A", False),
            (1, "B", False),
            (1, "", False),
        ]
        assert found[1].subject is not None
        assert WHO not in found[1].model_dump_json(exclude={"calls"})
        call = found[1].calls[0]
        assert call.sampling.temperature == 0
        assert call.capture == "tokens"
        assert call.version == "policy@0"
        status = await server.client.status()
        assert status["policies"][0]["step"] == 0
        folder = server.folder
    async with start(folder=folder) as server:
        found = await kept(server)
        assert [(rollout.closed, rollout.fault, rollout.reward) for rollout in found] == [(True, None, None)] * 3


async def test_some_sessions_are_kept_whole_and_the_others_not_at_all(start: Any) -> None:
    async with start({"privacy": {"traffic": "sampled", "traffic_share": 0.5}}) as server:
        for number in range(20):
            for turn in range(2):
                await ask(server, f"{number}.{turn}", headers={"x-art-session": f"session {number}"})
        found = await kept(server)
        assert 3 < len(found) < 17
        assert {len(rollout.calls) for rollout in found} == {2}


async def test_a_session_ends_when_nobody_calls_and_when_there_are_too_many(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(traffic, "SESSIONS", 2)
    monkeypatch.setattr(run, "HOUSEKEEPING_SECONDS", 0.05)
    async with start({"privacy": {"traffic": "full", "session_seconds": 1e6}}) as server:
        for name in "ABC":
            await ask(server, name, headers={"x-art-session": name})
        ended = []
        while not ended:  # housekeeping comes by
            ended = [rollout.group for rollout in await server.client.rollouts(purpose="traffic", closed=True)]
        assert ended == ["A"]


async def test_without_a_store_apps_are_served_and_not_kept(start: Any, monkeypatch: Any) -> None:
    async with start({"privacy": {"traffic": "full"}}) as server:

        def broken(*_: Any, **__: Any) -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(Store, "open_rollout", broken)
            await ask(server, "served", headers={"x-art-session": "A"})
        assert await kept(server) == []
        await ask(server, "kept again", headers={"x-art-session": "A"})
        assert len(await kept(server)) == 1


async def test_all_about_somebody_is_forgotten(start: Any, capsys: Any) -> None:
    """S16: rollouts, calls, what was trained of them, examples of the report; the versions that learned are named."""
    async with start({"privacy": {"traffic": "full"}}) as server:
        ids = await server.collect(1)
        about = await server.open(step=2, scenario_id="s9", scenario={"subject": WHO, "question": "my secret illness"})
        await server.chat(about.token, "my secret illness")
        await server.client.close_rollout(about.id, output="my secret illness", reward=1.0)
        other = await server.open(step=2, sample=1)
        await server.chat(other.token, "of somebody else")
        await server.client.close_rollout(other.id, reward=0.0)
        await server.client.train_step(2, server.config)
        still_open = await server.open(scenario={"subject": WHO, "question": "my secret illness"})
        await server.chat(still_open.token, "my secret illness")
        await ask(server, "my secret illness", safety_identifier=WHO, headers={"x-art-session": "A"})
        examples = [
            {"scenario": {"id": "s9", "question": "my secret illness"}, "before": "my secret illness"},
            {"scenario": {"id": "s10", "subject": WHO}, "after": "my secret illness"},
            {"scenario": {"id": "s11", "question": "another"}},
        ]
        report = server.folder / "report.json"
        report.write_text(json.dumps({"policy": "policy", "examples": examples}))
        assert b"my secret illness" in on_disk(server.folder)

        forgotten = await server.client.forget(WHO)
        assert (forgotten.rollouts, forgotten.calls, forgotten.examples) == (3, 3, 2)
        assert forgotten.versions == ["policy@1"]
        assert json.loads(report.read_text())["examples"] == [examples[2]]
        assert b"my secret illness" not in on_disk(server.folder), "nor in the log beside the store's file"
        left = {rollout.id for rollout in await server.client.rollouts()}
        assert left == {*ids, other.id}
        assert (await server.chat(still_open.token, "late")).status_code == 401
        again = await server.client.forget(WHO)
        assert (again.rollouts, again.calls, again.examples, again.versions) == (0, 0, 0, [])
        folder = server.folder

    # the same without a server
    async with start(folder=folder) as server:
        rollout = await server.open(scenario={"subject": WHO, "question": "my other illness"})
        await server.chat(rollout.token, "my other illness")
    assert await asyncio.to_thread(cli.main, ["forget", "--subject", WHO, "--folder", str(folder)]) == 0
    assert "deleted: 1 rollouts with 1 calls, 0 examples" in capsys.readouterr().out
    assert b"my other illness" not in on_disk(folder)


async def test_a_report_that_cannot_be_read_is_told(start: Any) -> None:
    async with start() as server:
        (server.folder / "report.json").write_text("{")
        with pytest.raises(ControlError, match=r"report\.json: its examples cannot be looked through: .*by hand"):
            await server.client.forget(WHO)


async def test_what_is_too_old_is_deleted(start: Any, monkeypatch: Any) -> None:
    async with start() as server:
        old = await server.open(scenario={"question": "an old matter"})
        await server.chat(old.token, "an old matter")
        await server.client.close_rollout(old.id, reward=1.0)
        folder = server.folder
    monkeypatch.setattr(retention, "DAY", 1e-6)
    monkeypatch.setattr(run, "HOUSEKEEPING_SECONDS", 0.05)
    async with start({"privacy": {"keep_days": 1.0}}, folder=folder) as server:
        await server.open(step=9)  # open ones stay
        while len(await server.client.rollouts()) > 1:
            pass
        assert [rollout.step for rollout in await server.client.rollouts()] == [9]
