"""openai-agents: its loop over Responses and over Chat Completions, streamed and not."""

import asyncio
from contextlib import suppress

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import told
from openai import AsyncOpenAI

called: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: Rome or Oslo.
    """
    called.append(city)
    return "sunny"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        for stream in (False, True):
            agent = Agent(
                name="forecaster",
                model=kind("gpt-5", client),
                tools=[weather],
                model_settings=ModelSettings(tool_choice="required", max_tokens=400),
            )
            called.clear()
            with suppress(MaxTurnsExceeded):  # a random model may go on calling
                if stream:
                    result = Runner.run_streamed(agent, "How is the weather?", max_turns=2)
                    async for _ in result.stream_events():
                        pass
                else:
                    await Runner.run(agent, "How is the weather?", max_turns=2)
            told(f"{kind.__name__} stream={stream}", bool(called))


asyncio.run(main())
