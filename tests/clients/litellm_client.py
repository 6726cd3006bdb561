"""litellm as a client: its own translation to OpenAI's and Anthropic's formats, streamed and not."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetch nothing

import litellm
from common import ANTHROPIC, CITIES, KEY, OPENAI, PARAMETERS, told

TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "How is the weather?"}

for name, model, base in (
    ("openai", "openai/gpt-4o", OPENAI),
    ("anthropic", "anthropic/claude-sonnet-4-5", ANTHROPIC),
):
    asked = {"model": model, "api_base": base, "api_key": KEY, "max_tokens": 2000, "num_retries": 0}
    for stream in (False, True):
        forced = {"type": "function", "function": {"name": "weather"}}
        reply = litellm.completion(messages=[USER], tools=[TOOL], tool_choice=forced, stream=stream, **asked)
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=[USER])
        message = reply.choices[0].message
        (call,) = message.tool_calls
        told(f"litellm {name} stream={stream}", json.loads(call.function.arguments) in CITIES, message)
        history = [USER, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        after = litellm.completion(messages=history, tools=[TOOL], **asked)
        told(f"litellm {name} goes on", after.choices[0].finish_reason is not None, after)
