"""Run a graph on a scenario: its input, a configuration of its own, its final state as plain JSON.

It refuses to share anything between rollouts: each run gets a fresh ``thread_id``, so that a checkpointer never mixes
two of them, and no node cache. It refuses to guess when a scenario has a better reading: a function of the user's
makes the input.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime
import enum
import inspect
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from art_backends.capture.scope import current_scope
from art_backends.errors import ScenarioError
from art_backends.failures import brief
from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import Command
from pydantic import BaseModel

from art_langgraph.caches import NODES_OFF
from art_langgraph.hook import ROLLOUT_KEY
from art_langgraph.loading import LoadedGraph, load_graph

__all__ = [
    "LoadedGraph",
    "MakeInput",
    "OnInterrupt",
    "load_graph",
    "make_input",
    "run_graph",
    "to_json",
]

MakeInput = Callable[[Any], Any | Awaitable[Any]]
OnInterrupt = Callable[[Any, list[Any]], Any | Awaitable[Any]]

INTERRUPT = "__interrupt__"  # key of a state at which the graph waits for an answer
_MOST_INTERRUPTS = 1000  # of one run
_DEEPEST = 64  # levels of nesting that an output keeps


async def run_graph(
    graph: LoadedGraph | Any,
    scenario: Any,
    *,
    to_input: MakeInput | None = None,
    on_interrupt: OnInterrupt | None = None,
    recursion_limit: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Run the graph on one scenario and return its final state, JSON-able.

    ``to_input`` makes the graph's input of a scenario (may be async; default: ``make_input``). Where the graph
    interrupts itself, it is resumed with what ``on_interrupt(scenario, values)`` returns (may be async; default: the
    next item of the scenario's ``resume`` list; of several interrupts at once, a list with an answer for each); without
    an answer the run ends there. ``config`` is merged beneath ours: its ``configurable``, callbacks, tags and metadata
    stay. Whatever the graph raises is raised; ScenarioError if there is no input, or no fitting answer, to be made of
    the scenario (that is no failure of the agent's).
    """
    loaded = graph if isinstance(graph, LoadedGraph) else load_graph(graph)
    await loaded.open()
    value = make_input(loaded.graph, scenario) if to_input is None else await _users(to_input, "input", scenario)
    settings = _config(config, recursion_limit)
    state = await _invoke(loaded.graph, value, settings)
    answers = _answers(scenario)
    for _ in range(_MOST_INTERRUPTS):
        asked = state.get(INTERRUPT) if isinstance(state, Mapping) else None
        if not asked or (on_interrupt is None and not answers):
            break
        values = [getattr(item, "value", item) for item in asked]
        answer = answers.pop(0) if on_interrupt is None else await _users(on_interrupt, "answer", scenario, values)
        if len(asked) > 1:
            if not isinstance(answer, list) or len(answer) != len(asked):
                raise ScenarioError(f"the graph waits for {len(asked)} answers at once: give a list of as many")
            answer = {item.id: one for item, one in zip(asked, answer, strict=True)}
        state = await _invoke(loaded.graph, Command(resume=answer), settings)
    return to_json(state)


async def _users(function: Callable[..., Any], what: str, scenario: Any, *more: Any) -> Any:
    """What a function of the user's makes of the scenario; its failure is none of the agent's."""
    try:
        value = function(scenario, *more)
        return await value if inspect.isawaitable(value) else value
    except Exception as error:  # boundary: the user's function
        name = getattr(function, "__qualname__", repr(function))
        which = scenario.get("id") if isinstance(scenario, Mapping) else None
        shown = str(scenario)[:200] if which is None else f"scenario {which}"
        raise ScenarioError(f"{name} could not make the graph's {what} of {shown}: {brief(error)}") from error


def _answers(scenario: Any) -> list[Any]:
    """The scenario's own answers to interrupts: a list, or the only one."""
    given = scenario.get("resume", []) if isinstance(scenario, Mapping) else []
    return list(given) if isinstance(given, list) else [given]


def _config(config: Mapping[str, Any] | None, recursion_limit: int | None) -> dict[str, Any]:
    given: dict[str, Any] = dict(config or {})
    given["configurable"] = {**given.get("configurable", {}), **NODES_OFF, "thread_id": uuid.uuid4().hex}
    if recursion_limit is not None:
        given["recursion_limit"] = recursion_limit
    scope = current_scope()
    if scope is not None:
        # Tells code that lost the scope, but was handed the config, which rollout it works for.
        given["metadata"] = {**given.get("metadata", {}), ROLLOUT_KEY: scope.rollout_id}
    return given


async def _invoke(graph: Any, value: Any, config: dict[str, Any]) -> Any:
    saver = getattr(graph, "checkpointer", None)
    if isinstance(saver, BaseCheckpointSaver) and type(saver).aget_tuple is BaseCheckpointSaver.aget_tuple:
        # A checkpointer that knows no asyncio (SqliteSaver): such a graph can only be invoked, in a thread.
        return await asyncio.to_thread(graph.invoke, value, config)
    return await graph.ainvoke(value, config)


def make_input(graph: Any, scenario: Any) -> Any:
    """The graph's input for a scenario, by default.

    - a scenario with ``messages``: ``{"messages": …}``; nothing else of it, so that what the reward needs (the
      expected answer, say) does not reach the agent
    - one with ``input``: that value; a string becomes a user message if the graph takes messages
    - a plain string, or one with ``question`` where the graph takes messages and no question: a user message
    - else the scenario itself
    """
    keys = input_keys(graph)
    takes_messages = "messages" in keys

    def as_message(text: Any) -> Any:
        return {"messages": [{"role": "user", "content": text}]} if takes_messages and isinstance(text, str) else text

    if not isinstance(scenario, Mapping):
        return as_message(scenario)
    if "messages" in scenario:
        if keys and not takes_messages:
            raise ScenarioError(
                f"The scenario has 'messages', but the graph's input has {', '.join(sorted(keys))}. "
                "Give the scenario an 'input' key, or a function that makes the graph's input."
            )
        return {"messages": scenario["messages"]}
    if "input" in scenario and "input" not in keys:
        return as_message(scenario["input"])
    if takes_messages and "question" not in keys and isinstance(scenario.get("question"), str):
        return as_message(scenario["question"])
    if takes_messages and not keys & set(scenario):
        raise ScenarioError(
            f"The graph takes messages, and the scenario has only {', '.join(map(repr, scenario)) or 'nothing'}. Give "
            "it a 'messages', 'input' or 'question' key, or a function that makes the graph's input."
        )
    return {key: value for key, value in scenario.items() if key != "resume" or key in keys}


def input_keys(graph: Any) -> set[str]:
    """Names of the graph's input state; empty if its input is no state with names."""
    builder = getattr(graph, "builder", None)
    schemas = getattr(builder, "schemas", None)
    if isinstance(schemas, Mapping):
        return set(schemas.get(getattr(builder, "input_schema", None), ()))
    channels = getattr(graph, "input_channels", None)
    return set(channels) if isinstance(channels, (list, tuple)) else set()


def to_json(value: Any, depth: int = 0) -> Any:
    """The value as plain JSON: messages in OpenAI's form, other objects as well as can be, text for what cannot."""
    if depth > _DEEPEST:
        return repr(value)[:200]
    below = depth + 1
    if isinstance(value, Mapping):
        return {str(key): to_json(item, below) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, below) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json(item, below) for item in value), key=repr)
    if isinstance(value, (BaseMessage, BaseModel, enum.Enum)) or dataclasses.is_dataclass(value):
        return to_json(_opened(value), below)
    return _leaf(value)


def _opened(value: Any) -> Any:
    """What an object holds, one level deep."""
    if isinstance(value, BaseMessage):
        return _message(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, type):  # a dataclass itself, not one of its objects
        return value.__qualname__
    return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}


def _leaf(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return str(value)


def _message(message: BaseMessage) -> Any:
    try:
        return convert_to_openai_messages(message)
    except ValueError:  # content blocks that OpenAI's form does not know
        return {"role": message.type, "content": message.text}
