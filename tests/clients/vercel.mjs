// The Vercel AI SDK: its tool loop and its structured output, over chat completions, responses and messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { told } from "./common.mjs";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const anthropic = createAnthropic({
  baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1`,
  apiKey: process.env.ANTHROPIC_API_KEY,
});
const models = { chat: openai.chat("gpt-4o"), responses: openai.responses("gpt-4o"), messages: anthropic("claude-x") };

for (const [name, model] of Object.entries(models)) {
  for (const stream of [false, true]) {
    const called = [];
    const weather = tool({
      description: "The weather.",
      inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
      execute: async ({ city }) => {
        called.push(city);
        return "sunny";
      },
    });
    const asked = {
      model,
      prompt: "How is the weather?",
      tools: { weather },
      maxOutputTokens: 2000,
      maxRetries: 0,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
    };
    if (stream) {
      const failures = [];
      const result = streamText({ ...asked, onError: ({ error }) => failures.push(error) });
      await result.consumeStream();
      const steps = failures.length ? [] : await result.steps;
      told(`${name} stream`, failures.length === 0 && called.length === 1 && steps.length === 2, failures[0] ?? called);
    } else {
      const result = await generateText(asked);
      told(`${name}`, called.length === 1 && result.steps.length === 2, called);
      told(`${name} usage`, result.totalUsage.inputTokens > 0, result.totalUsage);
    }
  }
}
