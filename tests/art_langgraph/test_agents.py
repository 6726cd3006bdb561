"""Prebuilt agents, their middleware, the functional API, and models made in every way: each call carries its rollout.

As in ``test_attribution``: the prompt is the witness, and the provider must see nothing.
"""

import asyncio
import inspect
import re
from collections import Counter

import pytest
from art_backends.capture import rollout_scope
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, SummarizationMiddleware
from langchain.chat_models import init_chat_model
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph

pytestmark = [pytest.mark.usefixtures("hooked"), pytest.mark.timeout(300)]

ROLLOUTS = 20
KEY = "sk-user-secret"


def make(provider, **options):
    return ChatOpenAI(model="gpt-4o-mini", base_url=provider.url + "/v1", api_key=KEY, **options)


def scope(proxy, number):
    return rollout_scope(proxy.url, f"token-{number}", f"rollout-{number}")


def number_in(messages):
    return re.search(r"witness-(\d+)", str(messages))[1]


def check(proxy, provider, nodes):
    """Every request has its own rollout's token; each rollout made as many calls from each node as ``nodes`` says."""
    assert provider.seen == []
    for seen in proxy.seen:
        assert seen.token == f"token-{number_in(seen.body['messages'])}"
        assert KEY not in repr(seen)
        assert seen.headers["x-art-node-run-id"]
    counted = Counter((seen.token, seen.headers["x-art-node"]) for seen in proxy.seen)
    assert counted == {(f"token-{number}", node): calls for number in range(ROLLOUTS) for node, calls in nodes.items()}
    assert len({seen.headers["x-art-run-id"] for seen in proxy.seen}) == len(proxy.seen)


async def all_at_once(proxy, run):
    """Every rollout at once: an async ``run`` in tasks, any other in threads."""

    async def one(number):
        with scope(proxy, number):
            value = {"messages": [HumanMessage(f"witness-{number}")]}
            await (run(value) if inspect.iscoroutinefunction(run) else asyncio.to_thread(run, value))

    await asyncio.gather(*(one(number) for number in range(ROLLOUTS)))


both = pytest.mark.parametrize("way", ["invoke", "ainvoke"])


class Asking(AgentMiddleware):
    """Calls a model in every hook."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def before_agent(self, state, runtime):
        self.ask(state["messages"], "before_agent")

    def before_model(self, state, runtime):
        self.ask(state["messages"], "before_model")

    def wrap_model_call(self, request, handler):
        self.ask(request.messages, "wrapped")
        return handler(request)

    def wrap_tool_call(self, request, handler):
        self.ask(request.state["messages"], "wrapped tool")
        return handler(request)

    def after_model(self, state, runtime):
        self.ask(state["messages"], "after_model")

    def after_agent(self, state, runtime):
        self.ask(state["messages"], "after_agent")

    def ask(self, messages, hook):
        self.model.invoke(f"witness-{number_in(messages)} {hook}")

    async def abefore_agent(self, state, runtime):
        await self.aask(state["messages"], "before_agent")

    async def abefore_model(self, state, runtime):
        await self.aask(state["messages"], "before_model")

    async def awrap_model_call(self, request, handler):
        await self.aask(request.messages, "wrapped")
        return await handler(request)

    async def awrap_tool_call(self, request, handler):
        await self.aask(request.state["messages"], "wrapped tool")
        return await handler(request)

    async def aafter_model(self, state, runtime):
        await self.aask(state["messages"], "after_model")

    async def aafter_agent(self, state, runtime):
        await self.aask(state["messages"], "after_agent")

    async def aask(self, messages, hook):
        await self.model.ainvoke(f"witness-{number_in(messages)} {hook}")


HOOKS = {f"Asking.{hook}": 1 for hook in ("before_agent", "before_model", "after_model", "after_agent")}


def calls_once(body):
    """A model that calls the first of its tools with the rollout's number, once."""
    if not body.get("tools") or body["messages"][-1]["role"] == "tool":
        return None
    number = number_in(body["messages"])
    function = {"name": body["tools"][0]["function"]["name"], "arguments": f'{{"n": {number}}}'}
    call = {"id": f"call-{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@both
async def test_an_agent_with_middleware_in_every_hook(way, proxy, provider):
    model = make(provider)

    @tool
    def ask(n: int) -> str:
        """Ask."""
        return model.invoke(f"witness-{n} in a tool").text

    proxy.reply = calls_once
    agent = create_agent(model, [ask], middleware=[Asking(model)])
    await all_at_once(proxy, getattr(agent, way))
    # What a wrapping hook asks is asked in the node that it wraps: twice two in the model's, two in the tools'.
    turns = {"Asking.before_model": 2, "Asking.after_model": 2}
    check(proxy, provider, {**HOOKS, **turns, "model": 4, "tools": 2})


@both
async def test_a_graph_that_a_tool_runs(way, proxy, provider):
    model = make(provider)
    inner = create_agent(model, [], name="inner")

    @tool
    def ask(n: int) -> str:
        """Ask."""
        return inner.invoke({"messages": [("user", f"witness-{n} in a tool")]})["messages"][-1].text

    proxy.reply = calls_once
    await all_at_once(proxy, getattr(create_agent(model, [ask], name="outer"), way))
    check(proxy, provider, {"model": 3})
    assert Counter(seen.headers["x-art-agent"] for seen in proxy.seen) == {"outer": 2 * ROLLOUTS, "inner": ROLLOUTS}
    for seen in proxy.seen:
        assert seen.headers["x-art-checkpoint-ns"].startswith("tools%3A") == (seen.headers["x-art-agent"] == "inner")


@both
async def test_functions_that_choose_the_way(way, proxy, provider):
    """Their calls are of the node that they follow; at the beginning that is ``__start__``."""
    model = make(provider)

    def choose(state):
        model.invoke(state["messages"])
        return "work"

    builder = StateGraph(MessagesState).add_node("work", lambda state: {}).add_node("last", lambda state: {})
    builder.add_conditional_edges(START, choose, ["work"])
    graph = builder.add_conditional_edges("work", choose, {"work": "last"}).compile()
    await all_at_once(proxy, getattr(graph, way))
    check(proxy, provider, {"__start__": 1, "work": 1})


@both
async def test_an_agent_as_a_node_and_within_another_graph(way, proxy, provider):
    model = make(provider)
    agent = create_agent(model, [], middleware=[Asking(model)], name="researcher")
    inner = StateGraph(MessagesState).add_node("team", agent).add_edge(START, "team").compile()
    outer = StateGraph(MessagesState).add_node("company", inner).add_edge(START, "company").compile()
    await all_at_once(proxy, getattr(outer, way))
    check(proxy, provider, {**HOOKS, "model": 2})
    assert {seen.headers["x-art-agent"] for seen in proxy.seen} == {"researcher"}
    for seen in proxy.seen:
        company, team, node = seen.headers["x-art-checkpoint-ns"].split("%7C")
        assert (company.partition("%3A")[0], team.partition("%3A")[0]) == ("company", "team")
        assert node.partition("%3A")[0] == seen.headers["x-art-node"]


@both
async def test_a_history_that_is_summarised(way, proxy, provider):
    model = make(provider)
    summary = SummarizationMiddleware(model=model, trigger=("messages", 3), keep=("messages", 1))
    agent = create_agent(model, [], middleware=[summary])

    def long(value):
        (first,) = value["messages"]
        return {"messages": [first, HumanMessage(f"{first.text} again"), HumanMessage(f"{first.text} more")]}

    async def arun(value):
        await agent.ainvoke(long(value))

    await all_at_once(proxy, arun if way == "ainvoke" else lambda value: agent.invoke(long(value)))
    check(proxy, provider, {"SummarizationMiddleware.before_model": 1, "model": 1})


async def test_the_functional_api(proxy, provider):
    model = make(provider)

    @task
    async def look(text: str) -> str:
        return (await model.ainvoke(f"{text} looked at")).text

    @entrypoint()
    async def work(value: dict) -> str:
        text = value["messages"][0].text
        await asyncio.gather(*(look(text) for _ in range(3)))
        return (await model.ainvoke(text)).text

    await all_at_once(proxy, work.ainvoke)
    check(proxy, provider, {"look": 3, "work": 1})


async def test_the_functional_api_in_threads(proxy, provider):
    model = make(provider)

    @task
    def look(text: str) -> str:
        return model.invoke(f"{text} looked at").text

    @entrypoint()
    def work(value: dict) -> str:
        text = value["messages"][0].text
        for future in [look(text) for _ in range(3)]:
            future.result()
        return model.invoke(text).text

    await all_at_once(proxy, work.invoke)
    check(proxy, provider, {"look": 3, "work": 1})


@pytest.mark.parametrize("kind", ["at import", "per call", "init_chat_model", "configurable", "azure"])
@both
async def test_models_made_in_every_way(kind, way, proxy, provider):
    options = {"base_url": provider.url + "/v1", "api_key": KEY}
    ready = make(provider)
    by_factory = init_chat_model("gpt-4o-mini", model_provider="openai", **options)
    configurable = init_chat_model(
        "gpt-4o-mini", model_provider="openai", configurable_fields=("model", "temperature"), **options
    )
    azure = AzureChatOpenAI(
        azure_deployment="gpt-4o-mini", azure_endpoint=provider.url, api_version="2025-01-01", api_key=KEY
    )
    models = {
        "at import": lambda: ready,
        "per call": lambda: make(provider),
        "init_chat_model": lambda: by_factory,
        "configurable": lambda: configurable.with_config(configurable={"model": "gpt-4o-mini"}),
        "azure": lambda: azure,
    }

    def ask(state):
        return {"messages": [models[kind]().invoke(state["messages"])]}

    async def aask(state):
        return {"messages": [await models[kind]().ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("ask", ask if way == "invoke" else aask).add_edge(START, "ask").compile()
    await all_at_once(proxy, getattr(graph, way))
    check(proxy, provider, {"ask": 1})
    assert {seen.path for seen in proxy.seen} == {"/v1/chat/completions"}
    assert {seen.body["model"] for seen in proxy.seen} == {"gpt-4o-mini"}
