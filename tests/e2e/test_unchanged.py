"""What the app gets is what the engine said: the same calls straight to the engine, and captured on the way.

The engine is deterministic at temperature 0, so both must be equal: text, tool calls, parsed objects, chunks of a
stream, log-probabilities, usage, finish reasons and errors. The rollout is one of an evaluation, where the app's own
sampling counts.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx2
import openai
import pytest
from art_backends import capture
from art_backends.capture.scope import rollout_scope
from art_backends.client import Client
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

pytestmark = pytest.mark.timeout(200)

ASK = "What do you say?"


class Answer(BaseModel):
    """An answer."""

    good: bool
    size: int


@tool
def stock(product: Literal["pen", "cup"]) -> str:
    """Pieces in stock."""
    return "7"


class World:
    """Two ways to one engine: straight to its socket, and through the proxy as an evaluation's rollout."""

    def __init__(self, project: Any, url: str) -> None:
        (self._socket,) = {
            match[1] for command in project.processes().values() if (match := re.search(r"--uds (\S+)", command))
        }
        self._url = url
        self._admin = (project.run / "admin.token").read_text().strip()

    async def both(self, run: Callable[[Callable[..., ChatOpenAI]], Any]) -> tuple[Any, Any]:
        """What ``run(make_model)`` gives straight from the engine, and captured."""
        transport = httpx2.AsyncHTTPTransport(uds=self._socket)
        async with httpx2.AsyncClient(transport=transport) as http:

            def straight(**options: Any) -> ChatOpenAI:
                return _model(model="policy@3", base_url="http://engine/v1", http_async_client=http, **options)

            one = await _caught(run, straight)
        async with self._rollout() as (client, rollout_id):
            other = await _caught(run, lambda **options: _model(base_url="http://127.0.0.1:9/v1", **options))
            await client.close_rollout(rollout_id, reward=0.0)
            self.calls = (await client.rollout(rollout_id)).calls
        return one, other

    async def after(self, prompt: list[int], max_tokens: int) -> str:
        """What the engine says straight after these tokens."""
        transport = httpx2.AsyncHTTPTransport(uds=self._socket)
        async with httpx2.AsyncClient(transport=transport) as http:
            body = {"model": "policy@3", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            reply = await http.post("http://engine/v1/completions", json=body)
            return str(reply.raise_for_status().json()["choices"][0]["text"])

    @asynccontextmanager
    async def _rollout(self) -> AsyncIterator[tuple[Client, str]]:
        async with Client(self._url, self._admin) as client:
            opened = await client.open_rollout(policy="policy", purpose="eval")
            with capture.installed(), rollout_scope(opened.base_url, opened.token, opened.id):
                yield client, opened.id


def _model(**options: Any) -> ChatOpenAI:
    defaults = {"model": "gpt-4o-mini", "api_key": "k", "temperature": 0, "max_completion_tokens": 12, "max_retries": 0}
    return ChatOpenAI(**{**defaults, **options})


async def _caught(run: Callable[..., Any], make: Callable[..., ChatOpenAI]) -> Any:
    try:
        return await run(make)
    except openai.OpenAIError as error:
        return error


@pytest.fixture
def world(served: Any) -> World:
    return World(*served)


def plain(message: Any) -> dict[str, Any]:
    """A message without what is new each time: ids, times and the name that the model goes by."""
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    invalid = [(call["name"], call["args"]) for call in message.invalid_tool_calls]
    told = {
        key: value for key, value in message.response_metadata.items() if key not in ("id", "model_name", "created")
    }
    kept = {key: value for key, value in message.additional_kwargs.items() if key != "tool_calls"}
    return {
        "text": message.text,
        "calls": calls,
        "invalid": invalid,
        "told": told,
        "usage": message.usage_metadata,
        "more": kept,
    }


async def test_a_plain_answer_with_its_usage(world: World) -> None:
    one, other = await world.both(lambda make: make().ainvoke(ASK))
    assert plain(one) == plain(other)
    assert other.usage_metadata["output_tokens"] > 0
    assert other.response_metadata["model_name"] == "gpt-4o-mini"  # as the app named it
    assert not {"token_ids", "prompt_token_ids"} & other.additional_kwargs.keys()
    assert len(world.calls) == 1
    assert world.calls[0].choices[0].token_ids


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_comes_token_by_token_and_usage_only_if_asked_for(world: World, usage: bool) -> None:
    async def run(make: Callable[..., ChatOpenAI]) -> list[Any]:
        return [
            (chunk.text, chunk.usage_metadata, chunk.response_metadata.get("finish_reason"))
            async for chunk in make(stream_usage=usage).astream(ASK)
        ]

    one, other = await world.both(run)
    for at in range(3):  # an empty chunk more or less is no difference
        assert [chunk[at] for chunk in one if chunk[at]] == [chunk[at] for chunk in other if chunk[at]]
    assert len([text for text, *_ in other if text]) > 3
    assert any(told is not None for _, told, _ in other) == usage


async def test_logprobs_that_the_app_asked_for(world: World) -> None:
    one, other = await world.both(lambda make: make(logprobs=True, top_logprobs=3).ainvoke(ASK))
    mine, theirs = (message.response_metadata.pop("logprobs")["content"] for message in (one, other))
    assert plain(one) == plain(other)
    assert [item["token"] for item in mine] == [item["token"] for item in theirs]
    assert [item["logprob"] for item in mine] == pytest.approx([item["logprob"] for item in theirs], abs=1e-4)
    assert [len(item["top_logprobs"]) for item in theirs] == [3] * len(theirs)


async def test_no_logprobs_unless_asked_for(world: World) -> None:
    _, other = await world.both(lambda make: make().ainvoke(ASK))
    assert other.response_metadata.get("logprobs") is None


@pytest.mark.parametrize("options", [{}, {"parallel_tool_calls": False}, {"strict": True}])
async def test_a_tool_that_is_forced(world: World, options: dict[str, Any]) -> None:
    async def run(make: Callable[..., ChatOpenAI]) -> Any:
        bound = make(max_completion_tokens=200).bind_tools([stock], tool_choice="stock", **options)
        return await bound.ainvoke(ASK)

    one, other = await world.both(run)
    assert plain(one) == plain(other)
    assert other.tool_calls or not options.get("strict")  # without it a random model may make up arguments for ever
    assert all(call["id"] for call in other.tool_calls)


async def test_a_tool_call_that_is_streamed(world: World) -> None:
    async def run(make: Callable[..., ChatOpenAI]) -> Any:
        bound = make(max_completion_tokens=200).bind_tools([stock], tool_choice="stock", strict=True)
        chunks = [chunk async for chunk in bound.astream(ASK)]
        pieces = [piece["args"] for chunk in chunks for piece in chunk.tool_call_chunks if piece["args"]]
        return plain(functools.reduce(operator.add, chunks)), pieces

    (one, straight), (other, captured) = await world.both(run)
    assert one == other
    assert [name for name, _ in other["calls"]] == ["stock"]
    assert straight == captured  # in the engine's own pieces


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the openai SDK's own parsed chunks
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output_that_is_streamed(world: World, method: str) -> None:
    async def run(make: Callable[..., ChatOpenAI]) -> Any:
        model = make(max_completion_tokens=200).with_structured_output(Answer, method=method, include_raw=True)
        return [found.get("parsed") async for found in model.astream(ASK) if found.get("parsed")][-1:]

    one, other = await world.both(run)
    if isinstance(other, Exception):
        assert (type(one), _message(one)) == (type(other), _message(other))
    else:
        assert one == other


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output(world: World, method: str) -> None:
    async def run(make: Callable[..., ChatOpenAI]) -> Any:
        model = make(max_completion_tokens=200).with_structured_output(Answer, method=method, include_raw=True)
        found = await model.ainvoke(ASK)
        return found["parsed"], type(found["parsing_error"]), plain(found["raw"])

    one, other = await world.both(run)
    if isinstance(other, Exception):
        assert (type(one), _message(one)) == (type(other), _message(other))
    else:
        assert one == other
    assert world.calls[0].sampling.constrained


async def test_stop_words_and_several_answers(world: World) -> None:
    one, _ = await world.both(lambda make: make().ainvoke(ASK))
    stop = one.text[len(one.text) // 2 :][:2]
    one, other = await world.both(lambda make: make(stop=[stop]).ainvoke(ASK))
    assert plain(one) == plain(other)
    assert other.response_metadata["finish_reason"] == "stop"

    async def several(make: Callable[..., ChatOpenAI]) -> list[str]:
        result = await make(n=3, temperature=0).agenerate([[HumanMessage(ASK)]])
        return [generation.text for generation in result.generations[0]]

    one, other = await world.both(several)
    assert one == other
    assert len(other) == 3


def _message(error: Any) -> str:
    """What an error says, without the model's name."""
    return re.sub(r"policy@\d+|gpt-4o-mini", "MODEL", str(getattr(error, "message", error)))


@pytest.mark.parametrize(
    "options",
    [
        {"messages": "word " * 5000},
        {"extra_body": {"response_format": {"type": "no such"}}},
        {"top_p": -1},
    ],
    ids=["too long", "format", "top_p"],
)
async def test_errors_are_the_engines(world: World, options: dict[str, Any]) -> None:
    ask = options.pop("messages", ASK) if "messages" in options else ASK
    one, other = await world.both(lambda make: make(**options).ainvoke(ask))
    assert isinstance(one, openai.BadRequestError)
    assert (type(one), one.status_code, _message(one)) == (type(other), other.status_code, _message(other))
    assert (one.code, one.type, one.param) == (other.code, other.type, other.param)


async def test_the_final_state_of_a_graph(world: World) -> None:
    async def run(make: Callable[..., ChatOpenAI]) -> list[Any]:
        forced = make(max_completion_tokens=200).bind_tools([stock], tool_choice="stock", strict=True)
        free = make().bind_tools([stock], tool_choice="none")

        async def agent(state: MessagesState) -> dict[str, Any]:
            model = free if len(state["messages"]) > 1 else forced
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState).add_node("agent", agent).add_node("tools", ToolNode([stock]))
        graph.add_edge(START, "agent").add_conditional_edges("agent", tools_condition).add_edge("tools", "agent")
        state = await graph.compile().ainvoke({"messages": [("user", ASK)]})
        return [(message.type, message.text) for message in state["messages"]]

    one, other = await world.both(run)
    assert [kind for kind, _ in other] == ["human", "ai", "tool", "ai"]
    assert one[:3] == other[:3]
    # The last prompt keeps the tokens of the first answer, where the engine alone would get them as its text spells
    # them. A random model's tokens seldom are that, so ask the engine for what follows exactly these tokens.
    again = await world.after(world.calls[1].prompt_token_ids, max_tokens=12)
    assert other[3][1] == again
