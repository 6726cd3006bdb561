"""A graph with two models: one is trained, the other keeps going where it went, with its own key.

The other provider is a real one: a server of a run that was trained before, which answers only its own key.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from art_backends.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

APP = '''
"""A writer, and a critic of another provider whose words the writer goes on from."""
import os

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

writer = ChatOpenAI(model="gpt-4o-mini", temperature=0, max_completion_tokens=8)
critic = ChatOpenAI(
    model="critic-large", temperature=0, max_completion_tokens=6,
    base_url=os.environ["CRITIC_URL"], api_key=os.environ["CRITIC_KEY"],
)


async def write(state):
    return {"messages": [await writer.ainvoke(state["messages"])]}


async def criticise(state):
    said = await critic.ainvoke(state["messages"])
    return {"messages": [HumanMessage("Critic: " + said.text)]}


builder = StateGraph(MessagesState)
for name, node in (("draft", write), ("critic", criticise), ("final", write)):
    builder.add_node(name, node)
builder.add_edge(START, "draft").add_edge("draft", "critic").add_edge("critic", "final")
graph = builder.compile()
'''


def test_one_becomes_the_policy_and_the_other_keeps_its_provider_and_its_key(served: Any, project: Any) -> None:
    other, url = served
    key = (other.run / "agent.token").read_text().strip()
    (project.path / "my_app.py").write_text(APP)
    before = answered(other, url)
    done = project.call(
        "art-langgraph",
        *project.training("--steps", "1", "--models", "gpt-4o-mini"),
        CRITIC_URL=f"{url}/v1",
        CRITIC_KEY=key,
    )
    assert done.code == 0, done.err
    assert answered(other, url) == before + 6  # one for each rollout, by its own key
    store = Store.open(project.run / "store.sqlite")
    try:
        rollouts = [store.rollout(rollout.id) for rollout in store.rollouts()]
    finally:
        store.close()
    assert len(rollouts) == 6
    for rollout in rollouts:
        assert rollout is not None
        assert [(call.node.name, call.model) for call in rollout.calls] == [
            ("draft", "gpt-4o-mini"), ("final", "gpt-4o-mini"),
        ]  # fmt: skip
        first, second = rollout.calls
        assert second.continues == first.id
        assert second.request["messages"][-1]["content"].startswith("Critic: ")  # what the other said is context
    for file in project.run.rglob("*"):  # its key is nowhere in what is kept
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
    assert project.report()["drifted_calls"] == 0


def answered(project: Any, url: str) -> int:
    token = (project.run / "admin.token").read_text().strip()
    with httpx.Client(trust_env=False) as client:
        status = client.get(f"{url}/control/v1/status", headers={"authorization": f"Bearer {token}"}).json()
    return int(status["proxy"]["apps"])
