"""A graph is looked at before it is trained: `inspect` runs nothing, `check` runs one scenario."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(200)


def test_inspect_runs_nothing(project: Any) -> None:
    done = project.call("art-langgraph", "inspect", "my_app:graph")
    assert (done.code, done.err) == (0, "")
    assert "nodes: agent, tools" in done.out
    assert "tools: stock, arrival" in done.out
    assert "ChatOpenAI 'gpt-4o-mini' in agent → the policy" in done.out
    found = json.loads(project.call("art-langgraph", "inspect", "my_app:graph", "--json", "--nodes", "agent").out)
    assert [(model["name"], model["route"]) for model in found["models"]] == [("gpt-4o-mini", "policy")]
    assert (found["nodes"], found["trained"]) == (["agent", "tools"], ["agent"])
    assert not project.run.exists()
    wrong = project.call("art-langgraph", "inspect", "my_app:stock")
    assert wrong.code == 2
    assert "not a graph" in wrong.err


def test_check_shows_what_would_train(project: Any) -> None:
    arguments = ["check", "my_app:graph", "--scenarios", "tasks.jsonl", "--base-model", str(project.model)]
    done = project.call("art-langgraph", *arguments, "--threads", "1", "--nodes", "agent")
    assert (done.code, done.err) == (0, f"loading {project.model}…\nrunning scenario t0…\n")
    assert re.search(r"^call 0  agent  gpt-4o-mini  begins a branch, \d+ prompt tokens$", done.out, re.MULTILINE)
    assert re.search(r"^  call 1  agent  gpt-4o-mini  continues call 0, \d+ prompt tokens$", done.out, re.MULTILINE)
    sampled = [int(count) for count in re.findall(r"(\d+) tokens sampled, \w+; trains", done.out)]
    assert f"{sum(sampled)} of {sum(sampled)} sampled tokens would train; 1 branch, 0 drifted calls" in done.out
    assert not project.run.exists()
    unknown = project.call("art-langgraph", *arguments, "--scenario", "nobody")
    assert unknown.code == 2
    assert "has no scenario of that id. There are 5: t0, t1, t2, t3, t4\n" in unknown.err


APP = """
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from langchain_openai import ChatOpenAI


def ask(state):
    said = interrupt("May I?")
    if said == "no":
        raise PermissionError("not allowed")
    return {"messages": [ChatOpenAI(model="gpt", max_completion_tokens=4).invoke(state["messages"])]}


builder = StateGraph(MessagesState).add_node("ask", ask)
graph = builder.add_edge(START, "ask").compile(checkpointer=InMemorySaver())
"""


@pytest.mark.parametrize(
    ("resume", "code", "said", "ended"),
    [
        (None, 2, "ended at an interrupt without an answer: give the scenario a `resume` list", "no token of this run"),
        (["no"], 2, "the agent failed: PermissionError: not allowed", "the agent failed on this scenario"),
        (["yes"], 0, "4 of 4 sampled tokens would train", ""),
    ],
)
@pytest.mark.slow
def test_a_run_that_would_teach_nothing_is_no_success(
    project: Any, resume: list[str] | None, code: int, said: str, ended: str
) -> None:
    (project.path / "my_app.py").write_text(APP)
    scenario = {"messages": [{"role": "user", "content": "x"}], **({} if resume is None else {"resume": resume})}
    (project.path / "tasks.jsonl").write_text(json.dumps(scenario) + "\n")
    arguments = ["check", "my_app:graph", "--scenarios", "tasks.jsonl", "--base-model", str(project.model)]
    done = project.call("art-langgraph", *arguments, "--threads", "1")
    assert done.code == code, done.err
    assert said in done.out
    assert ended in done.err


def test_a_scenario_that_makes_no_input_is_no_failure_of_the_agent(project: Any) -> None:
    (project.path / "tasks.jsonl").write_text('{"task": "x"}\n')
    arguments = ["check", "my_app:graph", "--scenarios", "tasks.jsonl", "--base-model", str(project.model)]
    done = project.call("art-langgraph", *arguments, "--threads", "1")
    assert (done.code, done.out) == (2, "")
    assert "art-langgraph: The graph takes messages, and the scenario has only 'task'." in done.err
