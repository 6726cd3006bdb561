"""openai-agents: its loop over Responses and over Chat Completions, streamed and not."""

import asyncio

from agents import (
    Agent,
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
                tool_use_behavior="stop_on_first_tool",  # a random model might talk until its tokens are spent
                model_settings=ModelSettings(tool_choice="required", max_tokens=2000, parallel_tool_calls=False),
            )
            called.clear()
            if stream:
                result = Runner.run_streamed(agent, "How is the weather?")
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, "How is the weather?")
            told(f"{kind.__name__} stream={stream}", len(called) == 1, called)
            told(f"{kind.__name__} stream={stream} output", result.final_output == "sunny", result.final_output)


asyncio.run(main())
