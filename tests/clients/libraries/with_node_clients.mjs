// The clients of OpenAI, Anthropic and Ollama for Node: each check prints its name.
//
//   node with_node_clients.mjs http://127.0.0.1:8080

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const url = process.argv[2];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const ollama = new Ollama({ host: url });
const model = "smollm2";
const system = "Answer in one word.";
const question = { role: "user", content: "What is the capital of France?" };
const messages = [{ role: "system", content: system }, question];
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false };
const description = "The weather in a city.";

const checks = {
  async openai_chat_stream() {
    const settings = { model, messages, max_tokens: 60, temperature: 0 };
    const whole = await openai.chat.completions.create(settings);
    const runner = openai.chat.completions.stream(settings);
    assert.equal((await runner.finalChatCompletion()).choices[0].message.content, whole.choices[0].message.content);
  },
  async openai_chat_tools() {
    const functions = [{ type: "function", function: { name: "weather", description, parameters } }];
    const settings = { model, messages, max_tokens: 60, temperature: 0, tools: functions };
    const runner = openai.chat.completions.stream({ ...settings, tool_choice: "required" });
    const { message } = (await runner.finalChatCompletion()).choices[0];
    const [call] = message.tool_calls;
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
    const result = { role: "tool", tool_call_id: call.id, content: "It rains." };
    const answer = await openai.chat.completions.create({ ...settings, messages: [...messages, message, result] });
    assert.ok(answer.choices[0].message.content);
  },
  async openai_responses_tools() {
    const tools = [{ type: "function", name: "weather", description, parameters, strict: true }];
    const settings = { model, max_output_tokens: 60, temperature: 0, tools };
    const stream = openai.responses.stream({ ...settings, input: messages, tool_choice: "required" });
    const { output } = await stream.finalResponse();
    const call = output.find((item) => item.type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: "It rains." };
    const answer = await openai.responses.create({ ...settings, input: [...messages, ...output, result] });
    assert.ok(answer.output_text);
  },
  async openai_responses_schema() {
    const format = zodTextFormat(z.object({ city: z.string().max(12) }), "city");
    const answer = await openai.responses.parse({ model, input: messages, max_output_tokens: 60, temperature: 0, text: { format } });
    assert.deepEqual(Object.keys(answer.output_parsed), ["city"]);
  },
  async anthropic_stream() {
    const settings = { model, system, messages: [question], max_tokens: 60 };
    const stream = anthropic.messages.stream(settings);
    let text = "";
    stream.on("text", (delta) => { text += delta; });
    assert.equal((await stream.finalMessage()).content[0].text, text);
  },
  async anthropic_tools() {
    const tools = [{ name: "weather", description, input_schema: parameters }];
    const settings = { model, system, max_tokens: 60, tools };
    const stream = anthropic.messages.stream({ ...settings, messages: [question], tool_choice: { type: "any" } });
    const first = await stream.finalMessage();
    const call = first.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: "It rains." };
    const turns = [question, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    assert.ok((await anthropic.messages.create({ ...settings, messages: turns })).content[0].text);
  },
  async ollama_stream() {
    const settings = { model, messages, options: { temperature: 0, num_predict: 60 } };
    const whole = await ollama.chat(settings);
    let text = "";
    for await (const part of await ollama.chat({ ...settings, stream: true })) text += part.message.content;
    assert.equal(text, whole.message.content);
  },
  async ollama_schema() {
    const answer = await ollama.chat({ model, messages, format: parameters, options: { temperature: 0, num_predict: 60 } });
    assert.deepEqual(Object.keys(JSON.parse(answer.message.content)), ["city"]);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(name);
  } catch (error) {
    failed += 1;
    console.error(`--- ${name}\n${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
