// What people do with OpenAI's client for Node: each check prints its name once it holds.
//
//   node openai.mjs http://127.0.0.1:8080/v1

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "smollm2";
const messages = [{ role: "user", content: "What is the capital of France? One word." }];
const settings = { model, messages, max_tokens: 12, temperature: 0 };

const checks = {
  async chat() {
    const answer = await client.chat.completions.create(settings);
    assert.match(answer.choices[0].message.content, /Paris/);
    assert.ok(answer.usage.prompt_tokens > 0);
  },
  async stream() {
    const whole = await client.chat.completions.create(settings);
    const options = { stream: true, stream_options: { include_usage: true } };
    let text = "";
    let usage = null;
    for await (const chunk of await client.chat.completions.create({ ...settings, ...options })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async tools() {
    const parameters = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false };
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const answer = await client.chat.completions.create({ ...settings, max_tokens: 60, tools, tool_choice: "required" });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "weather");
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  },
  async schema() {
    const schema = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false };
    const response_format = { type: "json_schema", json_schema: { name: "city", schema } };
    const answer = await client.chat.completions.create({ ...settings, max_tokens: 60, response_format });
    assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)), ["city"]);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...settings, temperature: -1 }), OpenAI.BadRequestError);
    await assert.rejects(client.responses.retrieve("resp_000000000000000000000000"), OpenAI.NotFoundError);
  },
  async cancellation() {
    const stream = await client.chat.completions.create({ ...settings, max_tokens: 1000, stream: true, ignore_eos: true });
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) break; // which hangs up
    }
    const metrics = () => fetch(process.argv[2].replace("/v1", "/metrics")).then((answer) => answer.text());
    while (!/kvkeep_generations_running 0/.test(await metrics()));
  },
  async branches() {
    const first = await client.responses.create({ model, input: "My name is Ada.", max_output_tokens: 12, temperature: 0 });
    const ask = { model, previous_response_id: first.id, max_output_tokens: 12, temperature: 0 };
    const one = await client.responses.create({ ...ask, input: "What is my name?" });
    const two = await client.responses.create({ ...ask, input: "Say hello." });
    const again = await client.responses.create({ ...ask, input: "What is my name?" });
    assert.equal(one.output_text, again.output_text);
    assert.notEqual(one.id, two.id);
    assert.equal((await client.responses.retrieve(one.id)).output_text ?? one.output_text, one.output_text);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
