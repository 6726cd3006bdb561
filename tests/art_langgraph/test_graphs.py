"""Running a graph on a scenario: its input, its output, its configuration."""

import dataclasses
import datetime
import enum
import json
import operator
from typing import Annotated, Any, TypedDict

import pytest
from art_backends.capture import rollout_scope
from art_backends.errors import ScenarioError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import CachePolicy, interrupt
from pydantic import BaseModel

from art_langgraph.graphs import make_input, run_graph, to_json

USER = [{"role": "user", "content": "hi"}]


class Counting(TypedDict, total=False):
    n: int
    seen: Annotated[list, operator.add]


class Asking(TypedDict, total=False):
    question: str
    answer: str


def messages_graph():
    reply = lambda state: {"messages": [AIMessage(f"got {state['messages'][-1].content}")]}  # noqa: E731
    return StateGraph(MessagesState).add_node("a", reply).add_edge(START, "a").compile()


def graph_of(state, node, **options):
    return StateGraph(state).add_node("a", node).add_edge(START, "a").compile(**options)


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ({"messages": USER, "answer": "secret"}, {"messages": USER}),
        ({"input": "hi", "answer": "secret"}, {"messages": USER}),
        ({"input": {"messages": USER}}, {"messages": USER}),
        ({"question": "hi", "answer": "secret"}, {"messages": USER}),
        ("hi", {"messages": USER}),
    ],
)
def test_inputs_of_a_graph_that_takes_messages(scenario, expected):
    assert make_input(messages_graph(), scenario) == expected


def test_inputs_of_other_graphs():
    graph = graph_of(Asking, lambda state: {"answer": state["question"].upper()})
    assert make_input(graph, {"question": "q", "expected": "Q"}) == {"question": "q", "expected": "Q"}
    assert make_input(graph, {"input": {"question": "q"}}) == {"question": "q"}
    with pytest.raises(ScenarioError, match="has 'messages', but the graph's input has answer, question"):
        make_input(graph, {"messages": USER})
    with pytest.raises(ScenarioError, match="takes messages, and the scenario has only 'task'"):
        make_input(messages_graph(), {"task": 1})


async def test_the_final_state_is_plain_json():
    output = await run_graph(messages_graph(), {"question": "hi", "answer": "x"})
    assert output == {"messages": [*USER, {"role": "assistant", "content": "got hi"}]}
    json.dumps(output)


async def test_a_function_makes_the_input():
    async def later(scenario):
        return {"messages": [("user", scenario["task"])]}

    for function in (later, lambda scenario: {"messages": [("user", scenario["task"])]}):
        output = await run_graph(messages_graph(), {"task": "t"}, to_input=function)
        assert output["messages"][-1]["content"] == "got t"
    with pytest.raises(ScenarioError, match=r"could not make the graph's input of .*KeyError: 'nothing'"):
        await run_graph(messages_graph(), {"task": "t"}, to_input=lambda scenario: scenario["nothing"])


async def test_each_run_has_a_thread_of_its_own():
    graph = graph_of(Counting, lambda state: {"seen": [state["n"]]}, checkpointer=InMemorySaver())
    for n in range(3):
        assert await run_graph(graph, {"n": n}) == {"n": n, "seen": [n]}


async def test_a_checkpointer_without_asyncio():
    class Old(InMemorySaver):
        from langgraph.checkpoint.base import BaseCheckpointSaver

        aget_tuple = BaseCheckpointSaver.aget_tuple

    graph = graph_of(Counting, lambda state: {"seen": [state["n"]]}, checkpointer=Old())
    assert (await run_graph(graph, {"n": 1}))["seen"] == [1]


async def test_the_users_config_stays_and_the_rollout_is_named():
    def node(state, config: RunnableConfig) -> dict[str, Any]:
        return {
            "seen": [config["configurable"]["user"], config["metadata"].get("art_rollout"), config["recursion_limit"]]
        }

    graph = graph_of(Counting, node)
    config = {"configurable": {"user": "u", "thread_id": "fixed"}, "metadata": {"mine": 1}}
    with rollout_scope("http://proxy", "t", "r1"):
        output = await run_graph(graph, {"n": 1}, config=config, recursion_limit=7)
    assert output["seen"] == ["u", "r1", 7]
    assert config == {"configurable": {"user": "u", "thread_id": "fixed"}, "metadata": {"mine": 1}}


async def test_what_the_graph_raises_is_raised():
    def fails(state):
        raise LookupError("the agent's own")

    with pytest.raises(LookupError, match="the agent's own"):
        await run_graph(graph_of(Counting, fails), {"n": 1})
    endless = StateGraph(Counting).add_node("a", lambda state: {"n": 1}).add_edge(START, "a").add_edge("a", "a")
    with pytest.raises(GraphRecursionError):
        await run_graph(endless, {"n": 1}, recursion_limit=3)


async def test_node_caches_are_off_in_a_rollout():
    made = []

    def node(state):
        made.append(1)
        return {"n": 1}

    def cached():
        builder = StateGraph(Counting).add_node("a", node, cache_policy=CachePolicy()).add_edge(START, "a")
        return builder.compile(cache=InMemoryCache())

    outer = StateGraph(Counting).add_node("b", cached()).add_edge(START, "b").compile()
    for graph in (cached(), outer):
        made.clear()
        await run_graph(graph, {"n": 1})
        await run_graph(graph, {"n": 1})
        assert len(made) == 2
        await graph.ainvoke({"n": 1})
        await graph.ainvoke({"n": 1})
        assert len(made) == 3  # the user's own runs still have it


class Colour(enum.Enum):
    RED = "red"


class Point(BaseModel):
    x: float
    note: Any = None


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


def test_anything_becomes_json():
    call = {"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
    value = {
        "messages": [HumanMessage("q"), AIMessage("", tool_calls=[call]), ToolMessage("3", tool_call_id="c1")],
        "set": {3, 1},
        "pair": Pair(Point(x=1.5, note=HumanMessage("n")), (1, 2)),
        "enum": Colour.RED,
        "when": datetime.date(2024, 5, 1),
        "bytes": b"\x00",
        "nan": float("nan"),
        1: object,
    }
    plain = to_json(value)
    json.dumps(plain, allow_nan=False)
    assert [message["role"] for message in plain["messages"]] == ["user", "assistant", "tool"]
    assert json.loads(plain["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert plain["set"] == [1, 3]
    assert plain["pair"] == {"left": {"x": 1.5, "note": {"role": "user", "content": "n"}}, "right": [1, 2]}
    assert (plain["enum"], plain["when"], plain["bytes"], plain["nan"]) == ("red", "2024-05-01", "AA==", "nan")


def test_what_holds_itself_ends():
    endless: list = []
    endless.append(endless)
    json.dumps(to_json(endless))


class Approval(TypedDict, total=False):
    seen: Annotated[list, operator.add]
    resume: str


def asks(*questions):
    """A graph that asks these one after the other and keeps the answers."""

    def node(state):
        return {"seen": [interrupt({"question": question}) for question in questions]}

    return graph_of(Approval, node, checkpointer=InMemorySaver())


async def test_interrupts_are_answered_by_the_scenario():
    assert (await run_graph(asks("one?", "two?"), {"resume": ["yes", "no"]}))["seen"] == ["yes", "no"]
    assert (await run_graph(asks("one?"), {"resume": "yes"}))["seen"] == ["yes"]
    state = await run_graph(asks("one?", "two?"), {"resume": ["yes"]})
    assert state["__interrupt__"][0]["value"] == {"question": "two?"}
    json.dumps(state)


async def test_interrupts_are_answered_by_a_function():
    told = []

    async def answer(scenario, values):
        told.append((scenario, values))
        return scenario["name"] + values[0]["question"]

    state = await run_graph(asks("one?", "two?"), {"name": "Ann: "}, on_interrupt=answer)
    assert state["seen"] == ["Ann: one?", "Ann: two?"]
    assert told[0] == ({"name": "Ann: "}, [{"question": "one?"}])

    def fails(scenario, values):
        raise LookupError("nobody there")

    with pytest.raises(ScenarioError, match=r"fails could not make the graph's answer .* LookupError: nobody there"):
        await run_graph(asks("one?"), {"name": "Ann"}, on_interrupt=fails)


async def test_several_interrupts_at_once_want_as_many_answers():
    builder = StateGraph(Approval)
    for name in ("a", "b"):
        builder.add_node(name, lambda state, name=name: {"seen": [name + interrupt(f"{name}?")]})
        builder.add_edge(START, name)
    graph = builder.compile(checkpointer=InMemorySaver())
    assert (await run_graph(graph, {"resume": [["1", "2"]]}))["seen"] == ["a1", "b2"]
    with pytest.raises(ScenarioError, match="waits for 2 answers at once"):
        await run_graph(graph, {"resume": ["1"]})


async def test_a_graph_that_never_stops_asking_ends(monkeypatch):
    monkeypatch.setattr("art_langgraph.graphs._MOST_INTERRUPTS", 3)
    state = await run_graph(asks(*"abcdefgh"), {}, on_interrupt=lambda scenario, values: "on")
    assert state["__interrupt__"][0]["value"] == {"question": "d"}


def test_the_resume_key_reaches_a_graph_that_has_one():
    graph = graph_of(Approval, lambda state: {})
    assert make_input(graph, {"seen": [], "resume": "x"}) == {"seen": [], "resume": "x"}
    assert make_input(graph_of(Counting, lambda state: {}), {"n": 1, "resume": ["x"]}) == {"n": 1}
