"""Real clients on a real engine: each SDK's own parser and validators, through a tool loop, streaming and not.

The model is a random one, so tools are called by being forced to; what is asserted is the form, and that the call
which follows the tool's result is answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx2
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from pydantic import BaseModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL: Any = {"type": "function", **FUNCTION}
MESSAGE_TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
USER: Any = {"role": "user", "content": "How is the weather?"}
CITIES = ({"city": "Rome"}, {"city": "Oslo"})


class Place(BaseModel):
    """What structured output is parsed to."""

    city: Literal["Rome", "Oslo"]


class Address:
    """Where the server is, and an app's key."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key


@pytest.fixture
def address(served: Any) -> Address:
    project, url = served
    return Address(url, (project.run / "agent.token").read_text().strip())


@pytest.fixture
def sdk(address: Address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(address: Address) -> Iterator[anthropic.Anthropic]:
    with (
        httpx2.Client(trust_env=False, timeout=60) as http,
        anthropic.Anthropic(base_url=address.url, api_key=address.key, max_retries=0, http_client=http) as client,
    ):
        yield client


# the openai SDK, chat completions


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat(sdk: openai.OpenAI, stream: bool) -> None:
    asked: Any = {"model": "gpt-4o-mini", "max_completion_tokens": 2000, "parallel_tool_calls": False}
    if stream:
        with sdk.chat.completions.stream(
            messages=[USER], tools=[CHAT_TOOL], tool_choice="required", **asked
        ) as streamed:
            message = streamed.get_final_completion().choices[0].message
    else:
        message = (
            sdk.chat.completions.create(messages=[USER], tools=[CHAT_TOOL], tool_choice="required", **asked)
            .choices[0]
            .message
        )
    assert message.tool_calls
    assert all(json.loads(call.function.arguments) in CITIES for call in message.tool_calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    history: Any = [USER, message, *results]
    after = sdk.chat.completions.create(messages=history, tools=[CHAT_TOOL], tool_choice="none", **asked)
    assert after.choices[0].finish_reason in ("stop", "length")


def test_openai_chat_parses(sdk: openai.OpenAI) -> None:
    got = sdk.chat.completions.parse(
        model="gpt-4o-mini", messages=[USER], response_format=Place, max_completion_tokens=2000, temperature=0
    )
    assert isinstance(got.choices[0].message.parsed, Place)


# the openai SDK, responses


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_openai_responses(sdk: openai.OpenAI, stream: bool, by_id: bool) -> None:
    asked: Any = {"model": "gpt-5", "tools": [RESPONSE_TOOL], "max_output_tokens": 2000, "parallel_tool_calls": False}
    if stream:
        with sdk.responses.stream(input=[USER], tool_choice="required", **asked) as streamed:
            first = streamed.get_final_response()
    else:
        first = sdk.responses.create(input=[USER], tool_choice="required", **asked)
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    assert all(json.loads(call.arguments) in CITIES for call in calls)
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    said = [item.to_dict() for item in first.output]
    after = (
        sdk.responses.create(previous_response_id=first.id, input=outputs, tool_choice="none", **asked)
        if by_id
        else sdk.responses.create(input=[USER, *said, *outputs], tool_choice="none", **asked)
    )
    assert after.status in ("completed", "incomplete")
    assert after.usage is not None
    assert after.usage.input_tokens > first.usage.input_tokens  # type: ignore[union-attr]


def test_openai_responses_async(address: Address) -> None:
    async def events() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0) as client:
            stream = await client.responses.create(model="gpt-5", input="Hi", max_output_tokens=8, stream=True)
            return [event.type async for event in stream]

    found = asyncio.run(events())
    assert found[:2] == ["response.created", "response.in_progress"]
    assert found[-1] in ("response.completed", "response.incomplete")


# the anthropic SDK


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(claude: anthropic.Anthropic, stream: bool) -> None:
    asked: Any = {"model": "claude", "max_tokens": 2000, "tools": [MESSAGE_TOOL], "system": "Be short."}
    forced: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    if stream:
        with claude.messages.stream(messages=[USER], tool_choice=forced, **asked) as streamed:
            events = list(streamed)
            first = streamed.get_final_message()
        assert events[0].type == "message_start"
        assert events[0].message.usage.input_tokens == first.usage.input_tokens > 0
    else:
        first = claude.messages.create(messages=[USER], tool_choice=forced, **asked)
    (call,) = first.content
    assert call.type == "tool_use"
    assert call.input in CITIES
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    history: Any = [USER, {"role": "assistant", "content": first.content}, result]
    after = claude.messages.create(messages=history, tool_choice={"type": "none"}, **asked)
    assert after.stop_reason in ("end_turn", "max_tokens")
    counted = claude.messages.count_tokens(model="claude", messages=history, tools=[MESSAGE_TOOL], system="Be short.")
    assert counted.input_tokens == after.usage.input_tokens


def test_anthropic_async(address: Address) -> None:
    async def answer() -> str | None:
        async with (
            httpx2.AsyncClient(trust_env=False, timeout=60) as http,
            anthropic.AsyncAnthropic(
                base_url=address.url, api_key=address.key, max_retries=0, http_client=http
            ) as client,
            client.messages.stream(model="claude", max_tokens=8, messages=[USER]) as stream,
        ):
            return (await stream.get_final_message()).stop_reason

    assert asyncio.run(answer()) in ("end_turn", "max_tokens")


# LangChain


def model(kind: str, address: Address) -> Any:
    url, key = address.url, address.key
    if kind == "anthropic":
        return ChatAnthropic(model="claude", base_url=url, api_key=key, max_tokens=2000)
    if kind == "azure":
        return AzureChatOpenAI(
            azure_endpoint=url, azure_deployment="gpt-4o", api_version="2024-10-21", api_key=key, max_tokens=2000
        )
    return ChatOpenAI(
        model="gpt-5",
        base_url=f"{url}/v1",
        api_key=key,
        use_responses_api=kind == "responses",
        max_completion_tokens=2000,
    )


@pytest.mark.parametrize("kind", ["chat", "responses", "azure", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_langchain(address: Address, kind: str, stream: bool) -> None:
    made = model(kind, address)
    forced = made.bind_tools([CHAT_TOOL], tool_choice="weather")
    question = HumanMessage("How is the weather?")
    if stream:
        chunks = list(forced.stream([question]))
        first = chunks[0]
        for chunk in chunks[1:]:
            first += chunk
    else:
        first = forced.invoke([question])
    assert isinstance(first, AIMessage)
    (call,) = first.tool_calls
    assert (call["name"], call["args"] in CITIES) == ("weather", True)
    after = made.bind_tools([CHAT_TOOL]).invoke([question, first, ToolMessage("sunny", tool_call_id=call["id"])])
    assert after.usage_metadata is not None
    if first.usage_metadata is not None:  # LangChain asks for none in a chat stream at another address than OpenAI's
        assert after.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
