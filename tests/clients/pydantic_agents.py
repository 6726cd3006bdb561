"""pydantic-ai: structured output by its own validators, from all three formats."""

from typing import Literal

from anthropic import AsyncAnthropic
from common import told
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


openai = OpenAIProvider(openai_client=AsyncOpenAI(max_retries=0))
claude = AnthropicProvider(anthropic_client=AsyncAnthropic(max_retries=0))
for name, model in (
    ("chat", OpenAIChatModel("gpt-4o", provider=openai)),
    ("responses", OpenAIResponsesModel("gpt-4o", provider=openai)),
    ("messages", AnthropicModel("claude-sonnet-4-5", provider=claude)),
):
    agent = Agent(
        model, output_type=Place, model_settings={"max_tokens": 2000, "parallel_tool_calls": False}, retries=3
    )
    found = agent.run_sync("Which city has the better weather?")
    told(f"pydantic-ai {name}", isinstance(found.output, Place), found.output)
    told(f"pydantic-ai {name} usage", found.usage().input_tokens > 0, found.usage())
