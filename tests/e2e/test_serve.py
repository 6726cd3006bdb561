"""After a run its result is served: the unmodified app is pointed at it, and the commands show what there is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.timeout(300)


def test_the_unmodified_app_answers_through_it(served: Any) -> None:
    project, url = served
    token = (project.run / "agent.token").read_text().strip()
    before = project.ask("/status")
    said = project.call(
        "python", "my_app.py", "Hello?", OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY=token, LANGSMITH_TRACING="false"
    )
    assert said.code == 0, said.err
    assert said.out.startswith("'")
    after = project.ask("/status")
    assert after["rollouts"] == before["rollouts"]  # served, of no rollout
    assert after["proxy"]["unattributed"] == before["proxy"]["unattributed"] + 2


def test_the_newest_version_answers(served: Any) -> None:
    project, _ = served
    (policy,) = project.ask("/status")["policies"]
    assert (policy["name"], policy["version"], policy["step"], policy["capture"]) == ("policy", 3, 3, "tokens")
    assert policy["base_model"] == str(project.model)


def test_a_wrong_token_is_refused(served: Any) -> None:
    _, url = served
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hi"}]}
    with httpx.Client(trust_env=False) as client:
        for headers in ({}, {"authorization": "Bearer sk-of-somebody"}):
            reply = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] in ("no_token", "unknown_token")


def test_status_and_rollouts(served: Any) -> None:
    project, _ = served
    status = project.call("art-backends", "status", "--folder", "run")
    assert status.code == 0, status.err
    for words in ("policy@3", "worker", "up", "tokens", str(project.model)[:20]):
        assert words in status.out, status.out
    listed = project.call("art-backends", "rollouts", "list", "--folder", "run", "--step", "2", "--json")
    items = json.loads(listed.out)
    assert {(item["purpose"], item["version"], item["closed"]) for item in items} == {("train", "policy@1", True)}
    assert len(items) == 6
    shown = project.call("art-backends", "rollouts", "show", items[0]["id"], "--folder", "run")
    assert shown.code == 0, shown.err
    for words in (items[0]["id"], "node agent", "user: Say", "tokens sampled", "(exact)", "trained with advantage"):
        assert words in shown.out, shown.out
    unknown = project.call("art-backends", "rollouts", "show", "0" * 32, "--folder", "run")
    assert (unknown.code, unknown.out) == (2, "")
    assert unknown.err.startswith("art-backends: ")
    assert unknown.err.count("\n") == 1


def test_stacks_on_request(served: Any, waiting: Callable[..., Any]) -> None:
    project, _ = served
    asked = project.call("art-backends", "stacks", "--folder", "run")
    assert asked.code == 0, asked.err
    worker = project.run / "logs" / "worker.log"
    waiting(lambda: "asyncio tasks" in worker.read_text(), 60)
    assert "most recent call first" in worker.read_text()
    (child,) = project.ask("/status")["children"]
    assert f"worker ({child['pid']})" in asked.out
    assert (child["state"], child["restarts"]) == ("up", 0)


def test_a_second_server_on_the_folder_is_refused(served: Any) -> None:
    project, url = served
    second = project.call("art-backends", "serve", "--folder", "run", "--port", "0")
    assert second.code == 2
    for words in ("art-backends: ", "is in use by process", url):
        assert words in second.err
    assert second.err.count("\n") == 1
    run = project.call("art-langgraph", *project.training())
    assert run.code == 2
    assert "is in use by process" in run.err
    assert url in run.err
    assert run.err.count("\n") == 1


def test_a_port_that_is_taken(served: Any) -> None:
    project, url = served
    port = url.rsplit(":", 1)[1]
    taken = project.call("art-backends", "serve", "--folder", "other", "--port", port)
    assert taken.code == 2
    assert f"port {port} on 127.0.0.1 is taken" in taken.err
    assert taken.err.count("\n") == 1


async def test_what_outlived_its_scope_is_no_part_of_the_rollout(served: Any) -> None:
    """A thread of the agent goes on after its run; its call is answered, and recorded nowhere."""
    import openai
    from art_backends import capture
    from art_backends.capture.scope import rollout_scope
    from art_backends.client import Client

    project, url = served
    ask = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    admin = (project.run / "admin.token").read_text().strip()
    app = openai.AsyncOpenAI(api_key="a-fake-key", base_url="http://127.0.0.1:9")  # nobody is there
    async with Client(url, admin) as client, app:
        opened = await client.open_rollout(policy="policy", purpose="eval")
        asked, ended = asyncio.Event(), asyncio.Event()

        async def agent() -> Any:
            await app.chat.completions.create(**ask)
            asked.set()
            await ended.wait()
            return await app.chat.completions.create(**ask)

        with capture.installed():
            with rollout_scope(opened.base_url, opened.token, opened.id):
                task = asyncio.create_task(agent())
                async with asyncio.timeout(60):
                    await asked.wait()
            ended.set()
            late = await task
        assert late.choices[0].message.role == "assistant"
        await client.close_rollout(opened.id, reward=0.0)
        assert len((await client.rollout(opened.id)).calls) == 1
