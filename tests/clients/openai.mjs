// The npm package openai: chat completions and responses, streamed by its helpers and not, through a tool loop.
import OpenAI from "openai";
import { CITIES, PARAMETERS, told } from "./common.mjs";

const client = new OpenAI({ maxRetries: 0 });
const weather = { name: "weather", description: "The weather.", parameters: PARAMETERS, strict: true };
const tools = [{ type: "function", function: weather }];
const user = { role: "user", content: "How is the weather?" };

for (const stream of [false, true]) {
  const asked = { model: "gpt-4o", max_completion_tokens: 2000, parallel_tool_calls: false, messages: [user], tools, tool_choice: "required" };
  const reply = stream
    ? await client.chat.completions.stream(asked).finalChatCompletion()
    : await client.chat.completions.create(asked);
  const { message } = reply.choices[0];
  const right = message.tool_calls.every((call) => CITIES.includes(JSON.parse(call.function.arguments).city));
  told(`chat stream=${stream}`, right, message);
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "sunny" }));
  const history = [user, message, ...results];
  const after = await client.chat.completions.create({ ...asked, messages: history, tool_choice: "none" });
  told("chat goes on", ["stop", "length"].includes(after.choices[0].finish_reason), after);
}

for (const stream of [false, true]) {
  const asked = { model: "gpt-5", max_output_tokens: 2000, parallel_tool_calls: false, tools: [{ type: "function", ...weather }] };
  const first = { ...asked, input: [user], tool_choice: "required" };
  const reply = stream ? await client.responses.stream(first).finalResponse() : await client.responses.create(first);
  const calls = reply.output.filter((item) => item.type === "function_call");
  const right = calls.length > 0 && calls.every((call) => CITIES.includes(JSON.parse(call.arguments).city));
  told(`responses stream=${stream}`, right, reply);
  const outputs = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "sunny" }));
  for (const more of [
    { previous_response_id: reply.id, input: outputs },
    { input: [user, ...reply.output, ...outputs] },
  ]) {
    const after = await client.responses.create({ ...asked, ...more, tool_choice: "none" });
    told("responses goes on", ["completed", "incomplete"].includes(after.status), after);
  }
}
