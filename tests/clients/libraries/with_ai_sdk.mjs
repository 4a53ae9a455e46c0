// Vercel's AI SDK, by Chat Completions, Responses and Messages: each check prints its name.
//
//   node with_ai_sdk.mjs http://127.0.0.1:8080

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = {
  compatible: createOpenAICompatible({ name: "kvkeep", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("smollm2"),
  chat: openai.chat("smollm2"),
  responses: openai.responses("smollm2"),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("smollm2"),
};
const common = { instructions: "Answer in one word.", temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const question = { role: "user", content: "What is the capital of France?" };
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string().max(12) }),
  execute: async ({ city }) => `It rains in ${city}.`,
});

const checks = {
  async turns(model) {
    const first = await generateText({ model, messages: [question], ...common });
    assert.match(first.text, /Paris/);
    const messages = [question, ...first.response.messages, { role: "user", content: "And of Italy?" }];
    const second = await generateText({ model, messages, ...common });
    assert.match(second.text, /Rome/);
    assert.ok(second.usage.outputTokens > 0);
  },
  async stream(model) {
    const whole = await generateText({ model, messages: [question], ...common });
    const parts = [];
    const streamed = streamText({ model, messages: [question], ...common, onError: ({ error }) => { throw error; } });
    for await (const part of streamed.textStream) parts.push(part);
    assert.equal(parts.join(""), whole.text);
    assert.equal(await streamed.finishReason, whole.finishReason);
  },
  async tools(model) {
    // One forced call, which the SDK runs, and an answer to its result.
    const params = { model, messages: [question], tools: { weather }, stopWhen: isStepCount(2), ...common };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
    const whole = await generateText({ ...params, prepareStep });
    assert.equal(whole.steps.length, 2);
    assert.equal(whole.steps[0].toolCalls[0].toolName, "weather");
    assert.ok(whole.text);
    const streamed = streamText({ ...params, prepareStep, onError: ({ error }) => { throw error; } });
    await streamed.consumeStream();
    const steps = await streamed.steps;
    assert.deepEqual(steps[0].toolCalls[0].input, whole.steps[0].toolCalls[0].input);
    assert.equal(await streamed.text, whole.text);
  },
  async schema(model) {
    const output = Output.object({ schema: z.object({ city: z.string().max(12) }) });
    const answer = await generateText({ model, messages: [question], output, ...common });
    assert.deepEqual(Object.keys(answer.output), ["city"]);
  },
};

let failed = 0;
for (const [name, model] of Object.entries(models)) {
  for (const [kind, check] of Object.entries(checks)) {
    try {
      await check(model);
      console.log(`${name}_${kind}`);
    } catch (error) {
      failed += 1;
      console.error(`--- ${name}_${kind}\n${error.stack}`);
      if (error.responseBody) console.error(error.responseBody);
    }
  }
}
process.exit(failed ? 1 : 0);
