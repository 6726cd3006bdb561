"""Application shapes that LangGraph's documentation teaches, each captured and trained for a step, unmodified.

ReAct, supervisor, plan and execute, reflection, retrieval with grading, and a human in the loop; and histories that are
summed up, trimmed, or go on in parallel. The model is a random
one: what decides the way through a graph is sampled under a grammar (structured output, a forced tool), so that every
run goes the whole way. Asserted is the tree: which call begins with the tokens of which, from which node, trained or
why not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from art_backends.exclusion import exclusion
from art_backends.rewards.values import Run
from art_backends.store import Store
from art_backends.trajectories import Call, Rollout
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, trim_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

import art_langgraph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

ROLLOUTS = 6  # two groups of three


def make_model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **{"model": "gpt-4o-mini", "temperature": 0, "max_completion_tokens": 8, "api_key": "k", **options}
    )


def structured(schema: type[BaseModel]) -> Any:
    """Room enough: under the grammar a random model writes much white space."""
    return make_model(max_completion_tokens=300).with_structured_output(schema, method="json_schema")


def letters(run: Run) -> float:
    """Something that a random model varies on."""
    text = "".join(str(choice.message.get("content") or "") for call in run.calls for choice in call.choices)
    return sum(character.isascii() and character.isalpha() for character in text) / (len(text) or 1)


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Callable[..., list[Rollout]]:
    """Train a graph for a step; the rollouts of the step, with their calls."""

    def go(graph: Any, scenario: dict[str, Any], **settings: Any) -> list[Rollout]:
        report = art_langgraph.train(
            graph,
            scenarios=[{"id": f"t{number}", **scenario} for number in range(2)],
            reward=letters,
            base_model=str(model),
            folder=tmp_path / "run",
            steps=1,
            groups_per_step=2,
            group_size=3,
            rank=2,
            threads=1,
            **settings,
        )
        assert (report.steps, report.version, report.faults, report.drifted_calls) == (1, "policy@1", 0, 0)
        store = Store.open(tmp_path / "run/store.sqlite")
        try:
            found = [item for item in store.rollouts(with_calls=True, limit=100) if item.step == 1]
            trained = store.step("policy", 1)["metrics"]["tokens/trained"]
        finally:
            store.close()
        assert len(found) == ROLLOUTS
        assert trained > 0
        return found

    return go


def tree(calls: Iterable[Call], nodes: list[str] | None = None) -> list[tuple[str, int | None, str]]:
    """Of each call: its node, the number of the call whose tokens it begins with, and whether it trains or why not."""
    numbers = {call.id: call.sequence for call in calls}
    by_id = {call.id: call for call in calls}
    found = []
    for call in calls:
        if call.continues is not None:
            earlier = by_id[call.continues]
            before = earlier.prompt_token_ids + earlier.choices[0].token_ids
            assert call.prompt_token_ids[: len(before)] == before
        (choice,) = call.choices
        reason = exclusion(call, choice, nodes=nodes or ()) or "trains"
        found.append(("/".join(call.node.path), numbers.get(call.continues or ""), reason))
    return found


@tool
def look_up(key: str) -> str:
    """Look a key up."""
    return "forty-two"


def test_react(train: Any) -> None:
    """A tool is called (the first turn is forced), its result is read, and the answer follows."""
    forced, free = (make_model().bind_tools([look_up], tool_choice=choice) for choice in ("look_up", "none"))
    forced = forced.bind(max_completion_tokens=200)

    async def agent(state: MessagesState) -> dict[str, Any]:
        asked = free if isinstance(state["messages"][-1], AIMessage) or len(state["messages"]) > 1 else forced
        return {"messages": [await asked.ainvoke(state["messages"])]}

    def on(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState).add_node("agent", agent).add_node("tools", ToolNode([look_up]))
    graph.add_edge(START, "agent").add_conditional_edges("agent", on, ["tools", END]).add_edge("tools", "agent")
    found = train(graph, {"messages": [{"role": "user", "content": "What is it?"}]})
    whole = [item for item in found if len(item.calls) == 2]
    assert whole, "no rollout wrote a whole tool call within its tokens"
    for item in whole:
        assert tree(item.calls) == [("agent", None, "constrained"), ("agent", 0, "trains")]


def test_supervisor(train: Any) -> None:
    """A supervisor chooses a worker; workers are agents of their own, with histories of their own."""

    class Route(BaseModel):
        worker: Literal["writer", "critic"]

    chooser = structured(Route)
    writer = create_agent(make_model(), [], system_prompt="Write.", name="writer")
    critic = create_agent(make_model(), [], system_prompt="Criticise.", name="critic")

    class State(MessagesState):
        turns: Annotated[int, operator.add]

    async def supervisor(state: State) -> Command[Any]:
        if state.get("turns", 0) >= 2:
            return Command(goto=END)
        route = await chooser.ainvoke([SystemMessage("Who is next?"), *state["messages"]])
        return Command(goto=route.worker, update={"turns": 1})

    graph = StateGraph(State)
    graph.add_node("supervisor", supervisor, destinations=("writer", "critic", END))
    for name, agent in (("writer", writer), ("critic", critic)):
        graph.add_node(name, agent)
        graph.add_edge(name, "supervisor")
    graph.add_edge(START, "supervisor")
    found = train(graph, {"messages": [{"role": "user", "content": "A poem."}]}, nodes=["writer", "critic"])
    for item in found:
        nodes = [(path.partition("/")[0], reason) for path, _, reason in tree(item.calls, ["writer", "critic"])]
        assert [node for node, _ in nodes[::2]] == ["supervisor"] * (len(nodes[::2]))
        assert {reason for _, reason in nodes[::2]} == {"constrained"}
        assert {node for node, _ in nodes[1::2]} <= {"writer", "critic"}
        assert {reason for _, reason in nodes[1::2]} == {"trains"}
        assert all(call.node.agent == call.node.path[0] for call in item.calls[1::2])
    assert sum(len(item.calls) == 4 for item in found) >= 1


def test_plan_and_execute(train: Any) -> None:
    """A plan is made, its steps are executed one by one, and the results are joined."""

    class Plan(BaseModel):
        first: Literal["search", "think"]
        second: Literal["compute", "write"]

    class State(TypedDict, total=False):
        input: str
        steps: list[str]
        done: Annotated[list[str], operator.add]
        response: str

    model = make_model()
    planner = structured(Plan)

    async def plan(state: State) -> State:
        made = await planner.ainvoke(f"Plan: {state['input']}")
        return {"steps": [made.first, made.second]}

    async def execute(state: State) -> State:
        step, *rest = state["steps"]
        return {"steps": rest, "done": [(await model.ainvoke(f"Do {step}: {state['input']}")).text]}

    async def respond(state: State) -> State:
        return {"response": (await model.ainvoke(f"Sum up: {' '.join(state['done'])}")).text}

    graph = StateGraph(State).add_node("plan", plan).add_node("execute", execute).add_node("respond", respond)
    graph.add_edge(START, "plan").add_edge("plan", "execute").add_edge("respond", END)
    graph.add_conditional_edges("execute", lambda state: "execute" if state["steps"] else "respond")
    for item in train(graph, {"input": "tea for two"}):
        if item.error is None:
            assert tree(item.calls) == [
                ("plan", None, "constrained"),
                ("execute", None, "trains"),
                ("execute", None, "trains"),
                ("respond", None, "trains"),
            ]


def test_reflection(train: Any) -> None:
    """A draft, a critique of it in the other role, a second draft: one history that grows, and one beside it."""
    model = make_model()

    async def generate(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def reflect(state: MessagesState) -> MessagesState:
        roles = {"ai": HumanMessage, "human": AIMessage}
        turned = [state["messages"][0], *(roles[one.type](one.text) for one in state["messages"][1:])]
        critique = await model.ainvoke([SystemMessage("You are a critic."), *turned])
        return {"messages": [HumanMessage(critique.text or "Better, please.")]}

    graph = StateGraph(MessagesState).add_node("generate", generate).add_node("reflect", reflect)
    graph.add_edge(START, "generate").add_edge("reflect", "generate")
    graph.add_conditional_edges("generate", lambda state: END if len(state["messages"]) > 4 else "reflect")
    for item in train(graph, {"messages": [{"role": "user", "content": "An essay."}]}):
        assert tree(item.calls) == [
            ("generate", None, "trains"),
            ("reflect", None, "trains"),
            ("generate", 0, "trains"),
            ("reflect", 1, "trains"),  # the critic's own history, with the roles turned, grows too
            ("generate", 2, "trains"),
        ]


def test_retrieval_with_grading(train: Any) -> None:
    """Documents are fetched and graded; the question is rewritten, once, where none is good."""

    class Grade(BaseModel):
        relevant: Literal["yes", "no"]

    class State(TypedDict, total=False):
        question: str
        tries: int
        documents: list[Document]
        answer: str

    model = make_model()
    grader = structured(Grade)
    shelf = [Document("Tea is made of leaves."), Document("Coffee is made of beans.")]

    def retrieve(state: State) -> State:
        return {"documents": shelf, "tries": state.get("tries", 0) + 1}

    async def grade(state: State) -> State:
        asked = [f"Is this about {state['question']}? {document.page_content}" for document in state["documents"]]
        grades = await grader.abatch(asked)
        return {"documents": [one for one, mark in zip(shelf, grades, strict=True) if mark.relevant == "yes"]}

    async def rewrite(state: State) -> State:
        return {"question": (await model.ainvoke(f"Ask better: {state['question']}")).text}

    async def generate(state: State) -> State:
        text = " ".join(one.page_content for one in state["documents"])
        return {"answer": (await model.ainvoke(f"{text} {state['question']}")).text}

    graph = StateGraph(State)
    for node in (retrieve, grade, rewrite, generate):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "retrieve").add_edge("retrieve", "grade").add_edge("rewrite", "retrieve")
    graph.add_conditional_edges(
        "grade", lambda state: "generate" if state["documents"] or state["tries"] > 1 else "rewrite"
    )
    for item in train(graph, {"question": "tea"}):
        if item.error is None:
            found = tree(item.calls)
            grades = [("grade", None, "constrained")] * 2
            end = [("generate", None, "trains")]
            assert found in ([*grades, *end], [*grades, ("rewrite", None, "trains"), *grades, *end])


def test_human_in_the_loop(train: Any) -> None:
    """A draft waits for a human; the node that asks is run again when the answer is there."""
    model = make_model()

    async def draft(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def review(state: MessagesState) -> MessagesState:
        question = await model.ainvoke([*state["messages"], HumanMessage("What should I ask?")])
        answer = interrupt({"question": question.text})
        return {"messages": [HumanMessage(f"The human says {answer}.")]}

    async def finish(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    previous = START
    for node in (draft, review, finish):
        graph.add_node(node.__name__, node)
        graph.add_edge(previous, node.__name__)
        previous = node.__name__
    compiled = graph.compile(checkpointer=InMemorySaver())
    for item in train(compiled, {"messages": [{"role": "user", "content": "A letter."}], "resume": ["yes"]}):
        assert tree(item.calls) == [
            ("draft", None, "trains"),
            ("review", 0, "rerun"),
            ("review", 0, "trains"),
            ("finish", 0, "trains"),
        ]
        assert item.output["messages"][-2]["content"] == "The human says yes."


def test_a_history_that_is_summed_up(train: Any) -> None:
    """The history grows, is summed up and replaced by its summary: a tree of its own begins there."""
    model = make_model()

    async def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"]), HumanMessage("Go on.")]}

    async def sum_up(state: MessagesState) -> dict[str, Any]:
        summary = await model.ainvoke([*state["messages"], HumanMessage("Sum this up.")])
        return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), HumanMessage(f"Until now: {summary.text}")]}

    graph = StateGraph(MessagesState)
    steps = {"begin": talk, "go_on": talk, "sum_up": sum_up, "again": talk, "end": talk}
    previous = START
    for name, node in steps.items():
        graph.add_node(name, node).add_edge(previous, name)
        previous = name
    for item in train(graph, {"messages": [{"role": "user", "content": "A story."}]}):
        assert tree(item.calls) == [
            ("begin", None, "trains"),
            ("go_on", 0, "trains"),
            ("sum_up", 1, "trains"),
            ("again", None, "trains"),
            ("end", 3, "trains"),
        ]


def test_a_history_that_is_trimmed(train: Any) -> None:
    """Only the last messages are kept: what follows no earlier prompt begins a branch, what does goes on in it."""
    model = make_model()

    async def talk(state: MessagesState) -> dict[str, Any]:
        kept = trim_messages(state["messages"], strategy="last", token_counter=len, max_tokens=4, start_on="human")
        return {"messages": [await model.ainvoke(kept), HumanMessage("Go on.")]}

    graph = StateGraph(MessagesState).add_node("talk", talk).add_edge(START, "talk")
    graph.add_conditional_edges("talk", lambda state: "talk" if len(state["messages"]) < 9 else END)
    for item in train(graph, {"messages": [{"role": "user", "content": "A story."}]}):
        # Two messages more each time: 1 and 3 are kept whole; of 5 and 7 the last 3, which begin anew.
        assert tree(item.calls) == [
            ("talk", None, "trains"),
            ("talk", 0, "trains"),
            ("talk", None, "trains"),
            ("talk", None, "trains"),
        ]


def test_parallel_branches_that_join(train: Any) -> None:
    """Three workers go on from one plan at once; the end goes on from the plan and one of their drafts."""
    model = make_model()

    class State(MessagesState):
        drafts: Annotated[list[Any], operator.add]

    async def plan(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"]), HumanMessage("Draft it.")]}

    async def draft(state: State) -> dict[str, Any]:
        return {"drafts": [await model.ainvoke(state["messages"])]}

    async def join(state: State) -> dict[str, Any]:
        chosen = state["drafts"][1]
        return {"messages": [await model.ainvoke([*state["messages"], chosen, HumanMessage("Polish it.")])]}

    graph = StateGraph(State).add_node("plan", plan).add_node("draft", draft).add_node("join", join)
    graph.add_edge(START, "plan").add_edge("draft", "join")
    graph.add_conditional_edges("plan", lambda state: [Send("draft", state) for _ in range(3)], ["draft"])
    for item in train(graph, {"messages": [{"role": "user", "content": "A poem."}]}):
        *first, (node, follows, reason) = tree(item.calls)
        assert first == [("plan", None, "trains"), *[("draft", 0, "trains")] * 3]
        assert (node, follows in (1, 2, 3), reason) == ("join", True, "trains")
