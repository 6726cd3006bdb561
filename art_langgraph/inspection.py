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

from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.pregel.protocol import PregelProtocol

from art_langgraph import caches
from art_langgraph.providers import is_delegated, model_name
from art_langgraph.reach import PLAIN, within

_MOST = 50_000  # objects looked at
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


@dataclass
class Inspection:
    """What was found. ``prompt_tokens`` estimates fixed messages and tool descriptions, at 4 characters a token."""

    nodes: list[str] = field(default_factory=list)
    models: list[FoundModel] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)  # what to tell the user of each
    prompt_tokens: int = 0
    complete: bool = True  # False: there was too much to look at

    @property
    def lost(self) -> list[FoundModel]:
        """Models whose calls would not reach the policy though they are meant to."""
        return [model for model in self.models if model.route == "provider" and not model.by_name]


def inspect_graph(graph: Any, models: Iterable[str] = ()) -> Inspection:
    """Look at a compiled graph. ``models``: the names that the policy answers for (empty: all)."""
    return _Walk(frozenset(models)).over(graph)


def warnings_of(found: Inspection, models: Iterable[str] = ()) -> list[str]:
    """What to tell the user before a run: caches, models that can't be captured, names that no model has."""
    told = list(found.caches)
    told += [f"calls of {model.kind} in {model.node} do not reach the policy: {model.why}" for model in found.lost]
    names = {model.name for model in found.models}
    missing = sorted(set(models) - names)
    if missing and "?" not in names and found.models and found.complete:
        told.append(
            f"no model of the graph was found by the name {', '.join(missing)} (models); found: "
            f"{', '.join(sorted(names))}"
        )
    return told


def inspection_lines(found: Inspection) -> Iterator[str]:
    """The result as text."""
    yield f"nodes: {', '.join(found.nodes) or 'none'}"
    yield f"tools: {', '.join(found.tools) or 'none found'}"
    yield f"fixed prompt (messages and tools that were found): about {found.prompt_tokens} tokens"
    yield "models:" if found.models else "models: none found; `art-langgraph check` shows what a run calls"
    for model in found.models:
        way = {"policy": "the policy", "provider": "its provider", "unknown": "decided at the call"}[model.route]
        yield f"  {model.kind} {model.name!r} in {model.node} → {way}: {model.why}"
    yield from found.caches
    if not found.complete:
        yield "the graph holds more than was looked at: there may be others"


class _Walk:
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._found = Inspection()
        self._seen: dict[int, Any] = {}  # the objects, too: an id must not be used again meanwhile
        self._models: set[tuple[str, str, str]] = set()
        self._characters = 0

    def over(self, graph: Any) -> Inspection:
        self._graph(graph, ())
        self._found.prompt_tokens = round(self._characters / 4)
        self._found.complete = len(self._seen) < _MOST
        return self._found

    def _graph(self, graph: Any, path: tuple[str, ...]) -> None:
        self._seen[id(graph)] = graph
        self._cache(caches.of_graph(graph, "/".join(path)))
        for name, node in getattr(graph, "nodes", {}).items():
            if name.startswith("__"):
                continue
            self._found.nodes.append("/".join((*path, name)))
            self._look(getattr(node, "bound", node), (*path, name))

    def _look(self, start: Any, path: tuple[str, ...]) -> None:
        """Everything that can be reached from ``start`` and was not seen before, as belonging to a node."""
        waiting = [start]
        while waiting and len(self._seen) < _MOST:
            value = waiting.pop()
            if id(value) in self._seen or isinstance(value, PLAIN):
                continue
            self._seen[id(value)] = value
            if _is_graph(value):
                self._graph(value, path)
            elif not self._note(value, path):
                waiting.extend(reversed(list(within(value))))

    def _note(self, value: Any, path: tuple[str, ...]) -> bool:
        """Write down what a value is; True if there is nothing to follow in it."""
        cls = value if isinstance(value, type) else type(value)
        if _routed_client(cls) is not None:
            self._client(cls, path, made=cls is not value)
        elif isinstance(value, type):
            if issubclass(value, BaseChatModel):
                self._add(value, "?", path, made=False)
        elif isinstance(value, BaseLanguageModel):
            self._cache(caches.of_model(value, "/".join(path)))
            self._add(cls, model_name(value) if isinstance(value, BaseChatModel) else "?", path, made=True)
        elif cls.__name__ == "_ConfigurableModel":
            self._factory(str(getattr(value, "_default_config", {}).get("model") or "?"), path)
        elif isinstance(value, types.FunctionType) and value.__name__ == "init_chat_model":
            self._factory("?", path)
        elif isinstance(value, BaseMessage):
            self._characters += len(value.text)
        else:
            self._count(value)
            return False
        return True

    def _cache(self, told: str | None) -> None:
        if told is not None:
            self._found.caches.append(told)

    def _count(self, value: Any) -> None:
        """What of a prompt stands in a value that is looked into."""
        if isinstance(value, BaseTool) and value.name not in self._found.tools:
            self._found.tools.append(value.name)
            self._characters += len(json.dumps(_described(value)))
        elif isinstance(value, BasePromptTemplate):
            self._characters += len(str(getattr(value, "template", "")))

    def _add(self, cls: type, name: str, path: tuple[str, ...], *, made: bool) -> None:
        route, why = _route(cls)
        self._tell(cls.__name__, name, path, route, why if made else f"made when the node runs; {why}")

    def _client(self, cls: type, path: tuple[str, ...], *, made: bool) -> None:
        kind = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
        late = "" if made else "made when the node runs; "
        if _routed_client(cls):
            self._tell(kind, "?", path, "policy", f"{late}the openai SDK, called by the app itself")
        else:
            what = (
                "another SDK's client, called by the app itself: use a LangChain chat model or the openai SDK instead"
            )
            self._tell(kind, "?", path, "provider", late + what)

    def _factory(self, name: str, path: tuple[str, ...]) -> None:
        why = "made when the node runs; any of LangChain's providers is captured"
        self._tell("init_chat_model", name, path, "unknown", why)

    def _tell(self, kind: str, name: str, path: tuple[str, ...], route: str, why: str) -> None:
        node = "/".join(path) or "-"
        if (kind, name, node) in self._models:
            return
        self._models.add((kind, name, node))
        other = bool(self._names) and name != "?" and name not in self._names
        if other:
            route, why = "provider", f"its name is not among those of the policy ({', '.join(sorted(self._names))})"
        self._found.models.append(FoundModel(kind, name, node, route, why, other))


def _route(cls: type) -> tuple[str, str]:
    """Where calls of a model class go, its name aside, and why."""
    if any(kind.__name__ in ("BaseChatOpenAI", "BaseOpenAI") for kind in cls.__mro__):
        return "policy", "its requests go through the openai SDK"
    if is_delegated(cls):
        return "policy", "its calls are handed to the policy in OpenAI's form"
    if cls.__module__.partition(".")[0] == "langchain_core":
        return "provider", "it is a stand-in that asks no model"
    return (
        "provider",
        f"{cls.__name__} is not known: if it calls no openai client, name it with art_langgraph.delegate(…)",
    )


def _is_graph(value: Any) -> bool:
    return isinstance(value, PregelProtocol) and isinstance(getattr(value, "nodes", None), Mapping)


def _routed_client(cls: type) -> bool | None:
    """Whether calls of this SDK client are routed; None for what is no such client."""
    for kind in cls.__mro__:
        names, routed = _CLIENTS.get(kind.__module__.partition(".")[0], (frozenset(), False))
        if kind.__name__ in names:
            return routed
    return None


def _described(tool: BaseTool) -> Any:
    try:
        return convert_to_openai_tool(tool)
    except (ValueError, TypeError):  # a tool whose arguments have no schema
        return {"name": tool.name, "description": tool.description}
