"""What a graph is made of, without running it: chat models and where their calls would go, nodes, tools, prompt size.

Models are found by following what the graph's nodes hold: runnables and what they bind, closures, globals that a
function names, methods' objects, tools, middleware, subgraphs. What a function makes only when it is called (a model
class or a factory that it names) is told as such; what it is called with cannot be known.

It refuses to run the app (an attribute that is not there may be made on being asked for: only what is there is looked
at), to read its files, and to promise that nothing was overlooked: ``art-langgraph check`` runs one scenario and shows
what was captured.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from art_backends.trajectories import Node
from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.func import entrypoint
from langgraph.graph import StateGraph
from langgraph.pregel.protocol import PregelProtocol

from art_langgraph import caches
from art_langgraph.providers import is_delegated, model_name
from art_langgraph.reach import PLAIN, imports_late, imports_models_late, is_library, names_model, within

_MOST = 200_000  # objects looked at; one that several nodes hold counts for each
_AROUND = 4 * 5  # characters: what a template puts around a message, as ChatML does
# SDK clients that an app may call itself, by the module's root, and whether their calls are routed.
_CLIENTS = {
    "openai": ({"OpenAI", "AsyncOpenAI"}, True),
    "anthropic": ({"Anthropic", "AsyncAnthropic"}, False),
    "google": ({"Client"}, False),
    "ollama": ({"Client", "AsyncClient"}, False),
    "mistralai": ({"Mistral"}, False),
    "groq": ({"Groq", "AsyncGroq"}, False),
    "cohere": ({"Client", "AsyncClient", "ClientV2", "AsyncClientV2"}, False),
}


@dataclass(frozen=True)
class FoundModel:
    """A model, or what makes one. ``route``: "policy", "provider" or "unknown"; ``why`` says it in a sentence."""

    kind: str  # its class
    name: str  # what the app calls it; "?" where that is decided at the call
    node: str  # path of the node it was found in; "-" outside of nodes
    route: str
    why: str
    by_name: bool = False  # with its provider because the policy does not answer for its name
    trained: bool = True  # whether its node is among those to train; what other nodes say stays context


@dataclass
class Inspection:
    """What was found. What is fixed in prompts is estimated: 4 characters a token, 5 tokens around a message."""

    nodes: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)  # those of the nodes that would train
    agents: list[str] = field(default_factory=list)  # names of agents, where they have one
    models: list[FoundModel] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)  # what to tell the user of each
    prompt_tokens: int = 0  # the sum of
    message_tokens: int = 0
    tool_tokens: int = 0  # descriptions of tools
    late: bool = False  # a function makes graphs, or imports what may hold some, only when it runs
    chosen_late: bool = False  # a function chooses a model only when it runs
    complete: bool = True  # False: there was too much to look at

    @property
    def lost(self) -> list[FoundModel]:
        """Models whose calls would not reach the policy though they are meant to."""
        return [model for model in self.models if model.route == "provider" and not model.by_name]

    @property
    def sure(self) -> bool:
        """Whether the graph can have no other nodes than those found, as far as anybody can tell."""
        return self.complete and not self.late and bool(self.nodes)

    @property
    def sure_of_models(self) -> bool:
        """Whether it can call no other models than those found, as far as anybody can tell."""
        return self.sure and not self.chosen_late and all(model.name != "?" for model in self.models)


def inspect_graph(graph: Any, models: Iterable[str] = (), nodes: Iterable[str] = ()) -> Inspection:
    """Look at a compiled graph. ``models`` are those of the policy, ``nodes`` those that train (empty: all)."""
    return _Walk(frozenset(models), frozenset(nodes)).over(graph)


def warnings_of(found: Inspection) -> list[str]:
    """What to tell the user before a run: caches, and models that can't be captured."""
    lost = (f"calls of {model.kind} in {model.node} do not reach the policy: {model.why}" for model in found.lost)
    return [*found.caches, *lost]


def inspection_lines(found: Inspection) -> Iterator[str]:
    """The result as text."""
    yield f"nodes: {', '.join(found.nodes) or 'none'}"
    if found.trained != found.nodes:
        yield f"nodes that train: {', '.join(found.trained) or 'none'}"
    if found.agents:
        yield f"agents: {', '.join(found.agents)}"
    yield f"tools: {', '.join(found.tools) or 'none found'}"
    yield (
        f"fixed prompt: about {found.prompt_tokens} tokens: {found.message_tokens} of messages, {found.tool_tokens} of "
        "tools' descriptions"
    )
    yield "  (not counted: the scenario's messages, text that nodes put together, what the template says about tools)"
    yield "models:" if found.models else "models: none found; `art-langgraph check` shows what a run calls"
    for model in found.models:
        way = {"policy": "the policy", "provider": "its provider", "unknown": "decided at the call"}[model.route]
        context = "" if model.trained or model.route == "provider" else ", as context that does not train"
        yield f"  {model.kind} {model.name!r} in {model.node} → {way}{context}: {model.why}"
    yield from found.caches
    if not found.complete:
        yield "the graph holds more than was looked at: there may be others"


class _Walk:
    def __init__(self, names: frozenset[str], nodes: frozenset[str]) -> None:
        self._names = names
        self._nodes = nodes
        self._found = Inspection()
        self._once: dict[int, Any] = {}  # what is told or counted once; the objects, too: an id must not come again
        self._models: set[tuple[str, str, str]] = set()
        self._messages = self._tools = self._steps = 0

    def over(self, graph: Any) -> Inspection:
        if _is_graph(graph):
            self._graph(graph, Node(), frozenset())
        else:  # a chain around one, or an object of the app's that runs one
            self._look(graph, Node(), frozenset())
        found = self._found
        found.message_tokens, found.tool_tokens = round(self._messages / 4), round(self._tools / 4)
        found.prompt_tokens = found.message_tokens + found.tool_tokens
        found.complete = self._steps < _MOST
        return found

    def _graph(self, graph: Any, outer: Node, above: frozenset[int]) -> None:
        """``above``: the graphs that this one is within."""
        if id(graph) in above:
            return
        if self._first(graph):
            self._cache(caches.of_graph(graph, "/".join(outer.path)))
        agent = _agent(graph) or outer.agent
        if agent is not None and agent not in self._found.agents:
            self._found.agents.append(agent)
        here = Node(checkpoint_ns=outer.checkpoint_ns, agent=agent)
        routers = _routers(graph)
        for name, node in _nodes(graph).items():
            routes = list(routers.get(name, ()))
            if not name.startswith("__"):
                self._node(name, [getattr(node, "bound", node), routes], here, above | {id(graph)})
            else:  # a function that decides where the graph begins runs as the node __start__
                inner = _inner(here, name)
                self._look(routes, inner, above | {id(graph)})
                if any(model.node == "/".join(inner.path) for model in self._found.models):
                    self._name(inner)

    def _node(self, name: str, start: Any, outer: Node, above: frozenset[int]) -> None:
        node = _inner(outer, name)
        self._name(node)
        self._look(start, node, above)

    def _name(self, node: Node) -> None:
        path = "/".join(node.path)
        if path not in self._found.nodes:
            self._found.nodes.append(path)
            if node.within(self._nodes):
                self._found.trained.append(path)

    def _look(self, start: Any, node: Node, above: frozenset[int]) -> None:
        """Everything that can be reached from ``start``, as belonging to a node."""
        waiting, seen = [start], dict[int, Any]()
        while waiting and self._steps < _MOST:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, PLAIN):
                continue
            seen[id(value)] = value
            self._steps += 1
            if _is_graph(value):
                self._graph(value, node, above)
            elif type(value).__name__ == "_TaskFunction":  # a @task: a node within the one that calls it
                name = str(getattr(value, "__name__", "?"))
                if self._first(value):
                    self._cache(caches.of_task(value, name, [self._once[key] for key in above if key in self._once]))
                self._node(name, value.func, node, above)
            elif not self._note(value, node):
                waiting.extend(reversed(list(within(value))))

    def _note(self, value: Any, node: Node) -> bool:
        """Write down what a value is; True if there is nothing to follow in it."""
        cls = value if isinstance(value, type) else type(value)
        self._found.late = self._found.late or _makes_graphs(value)
        self._found.chosen_late = self._found.chosen_late or _chooses_model(value)
        if isinstance(value, PregelProtocol):
            self._elsewhere(value, node)
        elif _routed_client(cls) is not None:
            self._client(cls, node, made=cls is not value)
        elif isinstance(value, type):
            if issubclass(value, BaseLanguageModel):
                self._add(value, "?", node, made=False)
        elif isinstance(value, BaseLanguageModel):
            if self._first(value):
                self._cache(caches.of_model(value, "/".join(node.path) or "-"))
            self._add(cls, model_name(value), node, made=True)
        elif cls.__name__ == "_ConfigurableModel":
            self._factory(str(getattr(value, "_default_config", {}).get("model") or "?"), node)
        elif isinstance(value, types.FunctionType) and value.__name__ == "init_chat_model":
            self._factory("?", node)
        elif isinstance(value, BaseMessage):
            if self._first(value):
                self._messages += _AROUND + len(value.text) + sum(map(_written, getattr(value, "tool_calls", ())))
        else:
            self._count(value)
            return False
        return True

    def _first(self, value: Any) -> bool:
        """Whether a value, which several nodes may hold, comes for the first time."""
        first = id(value) not in self._once
        self._once[id(value)] = value
        return first

    def _cache(self, told: str | None) -> None:
        if told is not None:
            self._found.caches.append(told)

    def _count(self, value: Any) -> None:
        """What of a prompt stands in a value that is looked into."""
        if isinstance(value, BaseTool) and value.name not in self._found.tools:
            self._found.tools.append(value.name)
            self._tools += len(json.dumps(_described(value)))
        elif isinstance(value, BasePromptTemplate) and self._first(value):
            self._messages += len(str(getattr(value, "template", "")))

    def _add(self, cls: type, name: str, node: Node, *, made: bool) -> None:
        route, why = _route(cls)
        self._tell(cls.__name__, name, node, route, why if made else f"made when the node runs; {why}")

    def _client(self, cls: type, node: Node, *, made: bool) -> None:
        kind = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
        late = "" if made else "made when the node runs; "
        if _routed_client(cls):
            self._tell(kind, "?", node, "policy", f"{late}the openai SDK, called by the app itself")
        else:
            what = (
                "another SDK's client, called by the app itself: use a LangChain chat model or the openai SDK instead"
            )
            self._tell(kind, "?", node, "provider", late + what)

    def _elsewhere(self, graph: Any, node: Node) -> None:
        what = getattr(graph, "name", None) or "it"
        why = f"the nodes of {what} run in another process: load that graph here instead"
        self._tell(type(graph).__name__, "?", node, "provider", why)

    def _factory(self, name: str, node: Node) -> None:
        why = "made when the node runs; any of LangChain's providers is captured"
        self._tell("init_chat_model", name, node, "unknown", why)

    def _tell(self, kind: str, name: str, node: Node, route: str, why: str) -> None:
        path = "/".join(node.path) or "-"
        if (kind, name, path) in self._models:
            return
        self._models.add((kind, name, path))
        other = bool(self._names) and name != "?" and name not in self._names
        if other:
            route, why = "provider", f"its name is not among those of the policy ({', '.join(sorted(self._names))})"
        self._found.models.append(FoundModel(kind, name, path, route, why, other, node.within(self._nodes)))


def _makes_graphs(value: Any) -> bool:
    """Whether a value makes graphs when it is called: their nodes cannot be looked at."""
    if isinstance(value, type):
        return issubclass(value, (StateGraph, PregelProtocol, entrypoint))
    if not isinstance(value, types.FunctionType):
        return isinstance(value, DynamicRunnable)
    # create_agent and its like
    return imports_late(value) or (value.__name__.startswith("create_") and is_library(value.__module__))


def _chooses_model(value: Any) -> bool:
    """Whether a value chooses a model when it is called: its name cannot be known."""
    if isinstance(value, RunnableBindingBase):
        return "model" in value.kwargs
    return isinstance(value, types.FunctionType) and (names_model(value) or imports_models_late(value))


def _route(cls: type) -> tuple[str, str]:
    """Where calls of a model class go, its name aside, and why."""
    if any(kind.__name__ in ("BaseChatOpenAI", "BaseOpenAI") for kind in cls.__mro__):
        return "policy", "its requests go through the openai SDK"
    if is_delegated(cls):
        return "policy", "its calls are handed to the policy in OpenAI's form"
    if cls.__module__.partition(".")[0] == "langchain_core":
        return "provider", "it is a stand-in that asks no model"
    if not issubclass(cls, BaseChatModel):
        return "provider", "it completes text; of other providers only chat models are captured: use one of these"
    return (
        "provider",
        f"{cls.__name__} is not known: if it calls no openai client, name it with art_langgraph.delegate(…)",
    )


def _is_graph(value: Any) -> bool:
    return isinstance(value, PregelProtocol) and isinstance(getattr(value, "nodes", None), Mapping)


def _nodes(graph: Any) -> Mapping[str, Any]:
    nodes = getattr(graph, "nodes", None)
    return nodes if isinstance(nodes, Mapping) else {}


def _inner(outer: Node, name: str) -> Node:
    return Node(checkpoint_ns="|".join([*outer.path, name]), agent=outer.agent)


def _routers(graph: Any) -> Mapping[str, Iterable[Any]]:
    """By node, the functions that choose what follows it; their calls are the node's."""
    branches = getattr(getattr(graph, "builder", None), "branches", None)
    if not isinstance(branches, Mapping):
        return {}
    return {name: [branch.path for branch in of_node.values()] for name, of_node in branches.items()}


def _agent(graph: Any) -> str | None:
    """The name that ``create_agent`` gave a graph: its calls tell it."""
    config = getattr(graph, "config", None)
    metadata = config.get("metadata") if isinstance(config, Mapping) else None
    name = metadata.get("lc_agent_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None


def _routed_client(cls: type) -> bool | None:
    """Whether calls of this SDK client are routed; None for what is no such client."""
    for kind in cls.__mro__:
        names, routed = _CLIENTS.get(kind.__module__.partition(".")[0], (frozenset(), False))
        if kind.__name__ in names:
            return routed
    return None


def _written(call: Mapping[str, Any]) -> int:
    """Characters of a tool call, its id aside."""
    return len(json.dumps({"name": call.get("name"), "arguments": call.get("args")}, default=str))


def _described(tool: BaseTool) -> Any:
    try:
        return convert_to_openai_tool(tool)
    except (ValueError, TypeError):  # a tool whose arguments have no schema
        return {"name": tool.name, "description": tool.description}
