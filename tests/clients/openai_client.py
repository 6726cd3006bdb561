"""The openai SDK of whatever version is found first: sync, async, the stream helper, parse; chat and Responses."""

import asyncio
import json
import sys
from typing import Literal

import openai
from common import CITIES, KEY, OPENAI, PARAMETERS, told
from pydantic import BaseModel

FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "How is the weather?"}
ASKED = {"model": "gpt-4o-mini", "max_completion_tokens": 2000}


class Place(BaseModel):
    """What structured output is parsed to."""

    city: Literal["Rome", "Oslo"]


def right(message: object) -> bool:
    return bool(message.tool_calls) and json.loads(message.tool_calls[0].function.arguments) in CITIES


def after(message: object) -> list:
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    return [USER, message, *results]


def sync(client: openai.OpenAI) -> None:
    message = (
        client.chat.completions.create(messages=[USER], tools=[TOOL], tool_choice="required", **ASKED)
        .choices[0]
        .message
    )
    told("chat", right(message), message)
    reply = client.chat.completions.create(messages=after(message), tools=[TOOL], tool_choice="none", **ASKED)
    told("chat goes on", reply.choices[0].finish_reason in ("stop", "length"), reply)
    with client.chat.completions.stream(messages=[USER], tools=[TOOL], tool_choice="required", **ASKED) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    told("stream helper", right(message) and "tool_calls.function.arguments.done" in kinds, (message, kinds))
    chunks = list(
        client.chat.completions.create(
            messages=after(message), tools=[TOOL], stream=True, stream_options={"include_usage": True}, **ASKED
        )
    )
    told("raw stream", chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens > 0, chunks[-1])
    parsed = client.chat.completions.parse(messages=[USER], response_format=Place, temperature=0, **ASKED)
    told("parse", isinstance(parsed.choices[0].message.parsed, Place), parsed)
    response = client.responses.create(
        model="gpt-4o-mini",
        input=[USER],
        tools=[{"type": "function", **FUNCTION}],
        tool_choice="required",
        max_output_tokens=2000,
    )
    (call, *_) = [item for item in response.output if item.type == "function_call"]
    told("responses", json.loads(call.arguments) in CITIES, response)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    with client.responses.stream(
        model="gpt-4o-mini", input=[USER, *response.output, result], max_output_tokens=2000
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    told("responses stream", kinds[-1] in ("response.completed", "response.incomplete") and bool(final.output), kinds)


async def not_blocking(client: openai.AsyncOpenAI) -> None:
    async with client:
        asked = {"tools": [TOOL], "tool_choice": "required", **ASKED}
        both = await asyncio.gather(*(client.chat.completions.create(messages=[USER], **asked) for _ in range(2)))
        told("async", all(right(reply.choices[0].message) for reply in both), both)
        async with client.chat.completions.stream(messages=[USER], **asked) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        told("async stream helper", right(message), message)
        models = [model.id async for model in client.models.list()]
        told("models", bool(models), models)


sys.stderr.write(f"openai {openai.__version__}\n")
with openai.OpenAI(base_url=OPENAI, api_key=KEY, max_retries=0) as blocking:
    sync(blocking)
asyncio.run(not_blocking(openai.AsyncOpenAI(base_url=OPENAI, api_key=KEY, max_retries=0)))
told(f"openai {openai.__version__}", True)
