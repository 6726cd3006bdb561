// The npm package @anthropic-ai/sdk: messages, streamed by its helper and not, through a tool loop, and counting.
import Anthropic from "@anthropic-ai/sdk";
import { CITIES, PARAMETERS, told } from "./common.mjs";

const client = new Anthropic({ maxRetries: 0 });
const tools = [{ name: "weather", description: "The weather.", input_schema: PARAMETERS }];
const user = { role: "user", content: "How is the weather?" };

for (const stream of [false, true]) {
  const asked = { model: "claude", max_tokens: 2000, messages: [user], tools };
  const forced = { ...asked, tool_choice: { type: "tool", name: "weather" } };
  const reply = stream ? await client.messages.stream(forced).finalMessage() : await client.messages.create(forced);
  const [call] = reply.content;
  told(`messages stream=${stream}`, call.type === "tool_use" && CITIES.includes(call.input.city), reply);
  const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
  const messages = [user, { role: "assistant", content: reply.content }, { role: "user", content: [result] }];
  const after = await client.messages.create({ ...asked, messages, tool_choice: { type: "none" } });
  told("messages goes on", ["end_turn", "max_tokens"].includes(after.stop_reason), after);
  const counted = await client.messages.countTokens({ model: "claude", messages, tools });
  told("tokens are counted", counted.input_tokens === after.usage.input_tokens, counted);
}
