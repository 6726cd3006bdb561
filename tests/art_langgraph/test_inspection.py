"""What a graph is made of, found without running it: nothing here may call a model."""

import asyncio
import functools
import sys
import types

import anthropic
import ollama
import openai
import pytest
from google import genai
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain.chat_models import init_chat_model
from langchain_anthropic import ChatAnthropic
from langchain_core.caches import InMemoryCache
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tools import tool
from langchain_ollama import OllamaLLM
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from langchain_openai import OpenAI as TextOpenAI
from langgraph.cache.memory import InMemoryCache as GraphCache
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph
from langgraph.types import CachePolicy
from pydantic import BaseModel

from art_langgraph.graphs import run_graph
from art_langgraph.inspection import inspect_graph, inspection_lines, warnings_of

PROMPT = [SystemMessage("x" * 400)]
shared = ChatOpenAI(model="global", api_key="k")
raw = openai.AsyncOpenAI(api_key="k")
my_models = types.ModuleType("my_models")
other_sdk = anthropic.Anthropic(api_key="k")


def graph_of(**nodes):
    builder = StateGraph(MessagesState)
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(START, name)
    return builder.compile()


def models_of(graph, models=()):
    return {(model.kind, model.name, model.node, model.route) for model in inspect_graph(graph, models).models}


def by_global(state):
    return shared.invoke(PROMPT)


async def by_client(state):
    return await raw.chat.completions.create(model="gpt", messages=[])


def by_other_client(state):
    return other_sdk.messages.create()


def per_call(state):
    def deeper():
        return ChatOpenAI(model="late").invoke("x")

    return deeper()


def by_factory(state):
    return init_chat_model("gpt-4o").invoke("x")


def ask(model, state):
    return model.invoke("x")


def with_default(default):
    def node(state, *, model=default):
        return model.invoke("x")

    return node


class Holder:
    def __init__(self, model):
        self.held = {"models": [model]}

    def node(self, state):
        return self.held["models"][0].invoke("x")

    def __call__(self, state):
        return self.node(state)


class ByGlobal:
    def __call__(self, state):
        return self._ask(state)

    @staticmethod
    def _ask(state):
        return shared.invoke(PROMPT)


def named(name):
    return ChatOpenAI(model=name, api_key="k")


def in_closure():
    model = named("closure").bind_tools([lookup])
    return lambda state: model.invoke("x")


@tool
def lookup(key: str) -> str:
    """Look a key up, in a place that has a long description of what it is good for."""
    return shared.invoke(key).text


KINDS = {
    "global": (lambda: by_global, ("ChatOpenAI", "global", "policy")),
    "client": (lambda: by_client, ("openai.AsyncOpenAI", "?", "policy")),
    "other sdk": (lambda: by_other_client, ("anthropic.Anthropic", "?", "provider")),
    "per call": (lambda: per_call, ("ChatOpenAI", "?", "policy")),
    "factory": (lambda: by_factory, ("init_chat_model", "?", "unknown")),
    "method": (lambda: Holder(named("m")).node, ("ChatOpenAI", "m", "policy")),
    "object with methods": (ByGlobal, ("ChatOpenAI", "global", "policy")),
    "object": (lambda: Holder(named("m")), ("ChatOpenAI", "m", "policy")),
    "partial": (lambda: functools.partial(ask, named("m")), ("ChatOpenAI", "m", "policy")),
    "default": (lambda: with_default(named("m")), ("ChatOpenAI", "m", "policy")),
    "chain": (lambda: ChatPromptTemplate.from_messages([("user", "{x}")]) | named("m"), ("ChatOpenAI", "m", "policy")),
    "lambda": (lambda: RunnableLambda(Holder(named("m")).node), ("ChatOpenAI", "m", "policy")),
    "binding": (lambda: named("m").with_config(tags=["t"]).with_retry(), ("ChatOpenAI", "m", "policy")),
    "anthropic": (lambda: ChatAnthropic(model="c", api_key="k"), ("ChatAnthropic", "c", "policy")),
    "configurable": (
        lambda: functools.partial(ask, init_chat_model("m", model_provider="openai", configurable_fields=("model",))),
        ("init_chat_model", "m", "unknown"),
    ),
    "stand-in": (lambda: FakeListChatModel(responses=["x"]), ("FakeListChatModel", "FakeListChatModel", "provider")),
    "azure": (
        lambda: AzureChatOpenAI(
            azure_deployment="d", model="m", azure_endpoint="https://a", api_version="1", api_key="k"
        ),
        ("AzureChatOpenAI", "d", "policy"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_found_wherever_a_node_keeps_them(kind, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    make, (cls, name, route) = KINDS[kind]
    assert (cls, name, "ask", route) in models_of(graph_of(ask=make()))


def test_closures_tools_subgraphs_agents_and_middleware():
    summary = SummarizationMiddleware(model=named("summary"), trigger=("tokens", 100))
    agent = create_agent(named("inner"), [lookup], middleware=[summary])
    graph = graph_of(plain=in_closure(), team=graph_of(writer=named("writer")), agent=agent)
    assert models_of(graph) == {
        ("ChatOpenAI", "closure", "plain", "policy"),
        ("ChatOpenAI", "writer", "team/writer", "policy"),
        ("ChatOpenAI", "inner", "agent/model", "policy"),
        ("ChatOpenAI", "summary", "agent/SummarizationMiddleware.before_model", "policy"),
        ("ChatOpenAI", "global", "agent/model", "policy"),  # the tool's
        ("ChatOpenAI", "global", "agent/tools", "policy"),
    }
    found = inspect_graph(graph)
    assert found.tools == ["lookup"]
    assert {"plain", "team", "team/writer", "agent/tools"} <= set(found.nodes)
    assert 15 < found.prompt_tokens < 200
    assert 15 < found.tool_tokens == found.prompt_tokens - found.message_tokens


def test_other_names_stay_with_their_provider():
    graph = graph_of(a=named("mine"), b=named("theirs"))
    assert models_of(graph, ["mine"]) == {
        ("ChatOpenAI", "mine", "a", "policy"),
        ("ChatOpenAI", "theirs", "b", "provider"),
    }
    assert inspect_graph(graph, ["mine"]).lost == []
    assert warnings_of(inspect_graph(graph, ["mine"])) == []


def test_what_cannot_be_captured_is_told_by_name():
    class Own(FakeListChatModel):
        pass

    Own.__module__ = "my_app"
    found = inspect_graph(graph_of(own=Own(responses=["x"]), sdk=by_other_client))
    own, sdk = warnings_of(found)
    assert "Own in own" in own
    assert "art_langgraph.delegate" in own
    assert "anthropic.Anthropic in sdk" in sdk
    text = "\n".join(inspection_lines(found))
    assert "Own 'Own' in own → its provider" in text
    assert "nodes: own, sdk" in text


def test_a_graph_without_models_says_where_to_look_next():
    found = inspect_graph(graph_of(ask=lambda state: {}))
    assert found.models == []
    assert "art-langgraph check" in "\n".join(inspection_lines(found))
    assert warnings_of(found) == []


def test_odd_objects_do_no_harm():
    class Odd:
        __slots__ = ("empty", "model")

        def __init__(self):
            self.model = named("slot")

        def __getattr__(self, name):
            raise RuntimeError("not to be asked")

        def __call__(self, state):
            return self.model.invoke("x")

    class Settings(BaseModel):
        model_config = {"arbitrary_types_allowed": True}
        model: object

    loop = {"model": named("loop")}
    loop["self"] = loop
    module = types.ModuleType("my_module")
    module.model = named("module")
    sys.modules["my_module"] = module
    try:
        nodes = {"a": functools.partial(ask, Odd()), "b": lambda state: loop, "c": Settings(model=named("pydantic"))}
        graph = graph_of(a=nodes["a"], b=nodes["b"], c=functools.partial(lambda settings, state: {}, nodes["c"]))
        assert {name for _, name, *_ in models_of(graph)} == {"slot", "loop", "pydantic"}
    finally:
        del sys.modules["my_module"]


def test_caches_are_told():
    cached = ChatOpenAI(model="m", api_key="k", cache=InMemoryCache())
    inner = StateGraph(MessagesState).add_node("ask", cached, cache_policy=CachePolicy()).add_edge(START, "ask")
    found = inspect_graph(graph_of(team=inner.compile(cache=GraphCache()), plain=by_global))
    node, model = warnings_of(found)
    assert "the node cache of team (InMemoryCache, on ask) is off" in node
    assert "ChatOpenAI in team/ask has a cache of its own (InMemoryCache)" in model
    assert node in inspection_lines(found)
    assert inspect_graph(graph_of(team=inner.compile())).caches == [model]


def test_caches_of_tasks_are_told_and_off():
    made = []

    @task(cache_policy=CachePolicy())
    def look(value):
        made.append(value)
        return value

    def work(value):
        return look(value["n"]).result()

    graph = entrypoint(cache=GraphCache())(work)
    assert warnings_of(inspect_graph(graph)) == ["the cache of the task look (InMemoryCache) is off while rollouts run"]
    assert warnings_of(inspect_graph(entrypoint()(work))) == []
    for _ in range(2):
        asyncio.run(run_graph(graph, {"n": 1}))
    assert made == [1, 1]


def test_a_model_that_several_nodes_hold_is_found_in_each():
    graph = graph_of(a=by_global, b=by_global, team=graph_of(c=by_global))
    assert {node for *_, node, _ in models_of(graph)} == {"a", "b", "team/c"}
    found = inspect_graph(graph)
    assert found.message_tokens == 105  # its prompt is counted once


def test_what_is_fixed_in_a_prompt_is_counted_with_the_calls_in_it():
    call = {"name": "lookup", "args": {"key": "x" * 400}, "id": "1"}
    messages = [HumanMessage("x" * 40), AIMessage("", tool_calls=[call])]
    found = inspect_graph(graph_of(ask=functools.partial(ask, messages)))
    assert found.message_tokens == pytest.approx(15 + 5 + 110, abs=5)
    (line,) = [line for line in inspection_lines(found) if line.startswith("fixed prompt")]
    count = found.message_tokens
    assert line == f"fixed prompt: about {count} tokens: {count} of messages, 0 of tools' descriptions"


def test_what_would_train_is_shown():
    agent = create_agent(named("inner"), [], name="researcher")
    graph = graph_of(plain=named("outer"), team=graph_of(agent=agent), other=by_other_client)
    found = inspect_graph(graph)
    assert found.agents == ["researcher"]
    assert found.trained == found.nodes == ["plain", "team", "team/agent", "team/agent/model", "other"]
    assert "train" not in "\n".join(inspection_lines(found))
    for nodes, trained in (
        (["plain"], ["plain"]),
        (["researcher"], ["team/agent/model"]),
        (["team/agent"], ["team/agent", "team/agent/model"]),
        (["agent/model", "plain"], ["plain", "team/agent/model"]),
    ):
        found = inspect_graph(graph, nodes=nodes)
        assert found.trained == trained
        assert {model.node for model in found.models if model.trained} == set(trained) - {"team/agent"}
    lines = list(inspection_lines(inspect_graph(graph, nodes=["plain"])))
    assert "nodes that train: plain" in lines
    assert "  ChatOpenAI 'outer' in plain → the policy: its requests go through the openai SDK" in lines
    assert any(
        "'inner' in team/agent/model → the policy, as context that does not train: its" in line for line in lines
    )


def test_tasks_of_the_functional_api_are_nodes_within_the_one_that_calls_them():
    model = named("inner")

    @task
    def look(text):
        return model.invoke(text)

    @entrypoint()
    def work(value):
        return look(value).result()

    found = inspect_graph(work, nodes=["look"])
    assert (found.nodes, found.trained) == (["work", "work/look"], ["work/look"])
    assert [(model.node, model.trained) for model in found.models] == [("work/look", True)]


def test_graphs_that_hold_themselves_end():
    graphs = []
    graph = graph_of(ask=lambda state: (graphs, shared))
    graphs.append(graph)
    assert inspect_graph(graph).nodes == ["ask"]


def by_module(state):
    return my_models.inner.held.model.invoke("x")


def test_models_in_a_module_of_the_apps_are_found(monkeypatch):
    inner = types.ModuleType("my_models.inner")
    inner.held = types.SimpleNamespace(model=named("in a module"))
    monkeypatch.setattr(my_models, "inner", inner, raising=False)
    assert models_of(graph_of(ask=by_module)) == {("ChatOpenAI", "in a module", "ask", "policy")}


def late_import(state):
    import a_module_of_the_app

    return a_module_of_the_app


def late_library(state):
    import json

    return shared.invoke(json.dumps(PROMPT))


def late_model(state):
    from langchain_openai import ChatOpenAI as Late

    return Late(model=state["name"]).invoke(PROMPT)


def late_agent(state):
    return create_agent("openai:gpt-4o-mini", []).invoke(state)


def late_graph(state):
    return StateGraph(MessagesState).compile()


def late_name(state):
    return shared.invoke(PROMPT, model=state["name"])


def by_module_of_an_sdk(state):
    anthropic.Anthropic().messages.create()
    genai.Client().models.generate_content()
    return openai.OpenAI().responses.create()


def by_function_of_an_sdk(state):
    return ollama.chat("m")


def test_sdk_clients_that_a_node_makes_by_their_modules_are_found():
    assert models_of(graph_of(ask=by_module_of_an_sdk)) == {
        ("anthropic.Anthropic", "?", "ask", "provider"),
        ("google.Client", "?", "ask", "provider"),
        ("openai.OpenAI", "?", "ask", "policy"),
    }
    assert models_of(graph_of(ask=by_function_of_an_sdk)) == {("ollama.Client", "?", "ask", "provider")}


def by_the_sdks_own_client(state):
    return openai.chat.completions.create(model="gpt", messages=[])


def test_the_client_that_the_openai_module_makes_is_found_and_not_made(monkeypatch):
    monkeypatch.setattr(openai, "api_key", "k")
    graph = graph_of(ask=by_the_sdks_own_client)  # LangGraph asks it for its attributes, which makes the client
    monkeypatch.setattr("openai._module_client._load_client", lambda: pytest.fail("a client was made"))
    assert models_of(graph) == {("openai.OpenAI", "?", "ask", "policy")}


@pytest.mark.parametrize(
    ("node", "of_nodes", "of_models"),
    [
        (by_global, True, True),
        (late_import, False, False),
        (late_agent, False, False),
        (late_graph, False, False),
        (late_library, True, True),
        (late_model, True, False),
        (late_name, True, False),
        (shared.bind_tools([]), True, True),
        (shared.bind(model="another"), True, False),
        (shared.configurable_fields(model_name=ConfigurableField("name")), False, False),
    ],
)
def test_whether_all_was_seen_is_known(node, of_nodes, of_models):
    found = inspect_graph(graph_of(team=graph_of(ask=node)))
    assert (found.sure, found.sure_of_models) == (of_nodes, of_models)


def test_models_that_a_node_imports_when_it_runs_are_found():
    assert models_of(graph_of(ask=late_model)) == {("ChatOpenAI", "?", "ask", "policy")}


def by_router(state):
    return by_global(state) and "work"


def test_models_of_functions_that_choose_the_way_are_their_nodes():
    builder = StateGraph(MessagesState).add_node("work", lambda state: {})
    begins = builder.add_conditional_edges(START, by_router, ["work"]).compile()
    assert inspect_graph(begins).nodes == ["__start__", "work"]
    assert models_of(begins) == {("ChatOpenAI", "global", "__start__", "policy")}
    builder = StateGraph(MessagesState).add_node("work", lambda state: {}).add_node("more", lambda state: {})
    builder.add_conditional_edges(START, lambda state: "work", ["work"]).add_edge("work", "more")
    goes_on = builder.add_conditional_edges("more", by_router, ["work"]).compile()
    assert inspect_graph(goes_on).nodes == ["work", "more"]
    assert models_of(graph_of(team=goes_on)) == {("ChatOpenAI", "global", "team/more", "policy")}


class Around:
    """An object of the app's that runs a graph."""

    def __init__(self, graph):
        self.graph = graph

    async def ainvoke(self, value, config=None):
        return await self.graph.ainvoke(value, config)


@pytest.mark.parametrize(
    "around", [Around, lambda graph: graph.with_retry(), lambda graph: RunnableLambda(ask) | graph]
)
def test_a_graph_within_something_else_is_found(around):
    found = inspect_graph(around(graph_of(ask=named("inner"))))
    assert (found.nodes, found.sure) == (["ask"], True)
    assert [(model.name, model.node) for model in found.models] == [("inner", "ask")]


def test_models_outside_of_every_node_are_found():
    chain = named("first") | RunnableLambda(ask)
    assert models_of(chain) == {("ChatOpenAI", "first", "-", "policy")}


def test_what_runs_in_another_process_is_told_by_name():
    far = RemoteGraph("assistant", url="http://127.0.0.1:9")
    for graph, node in ((graph_of(far=far), "far"), (far, "-")):
        (warning,) = warnings_of(inspect_graph(graph))
        assert f"calls of RemoteGraph in {node} do not reach the policy: the nodes of assistant run in" in warning


def by_completion(state):
    return TextOpenAI(model="gpt-3.5-turbo-instruct").invoke("x")


def test_models_that_complete_text():
    assert models_of(graph_of(ask=by_completion)) == {("OpenAI", "?", "ask", "policy")}
    (warning,) = warnings_of(inspect_graph(graph_of(ask=OllamaLLM(model="m"))))
    assert "OllamaLLM in ask do not reach the policy: it completes text" in warning


def test_of_an_agent_all_is_seen_and_of_any_other_object_nothing():
    assert inspect_graph(create_agent(named("m"), [lookup], system_prompt="x", name="n")).sure
    assert not inspect_graph(object()).sure
