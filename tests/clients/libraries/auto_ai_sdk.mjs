// The AI SDK with a model that decides on a call: each check prints its name.
//
//   node auto_ai_sdk.mjs http://127.0.0.1:8080

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = {
  chat: openai.chat("smollm2"),
  responses: openai.responses("smollm2"),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("smollm2"),
};
const get_weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It rains in ${city}.`,
});

// A question that no prompt began with yet: the script sees only new text.
let number = 100;
const question = () => `${++number}: What is the weather in Paris?`;

let failed = 0;
for (const [name, model] of Object.entries(models)) {
  const params = { model, tools: { get_weather }, stopWhen: isStepCount(3), maxRetries: 0 };
  try {
    const whole = await generateText({ ...params, prompt: question() });
    const streamed = streamText({ ...params, prompt: question(), onError: ({ error }) => { throw error; } });
    await streamed.consumeStream();
    for (const steps of [whole.steps, await streamed.steps]) {
      assert.deepEqual(steps.map((step) => step.text), ["Let me look.", "An umbrella helps."]);
      assert.deepEqual(steps[0].toolCalls[0].input, { city: "Paris" });
    }
    console.log(name);
  } catch (error) {
    failed += 1;
    console.error(`--- ${name}\n${error.stack}\n${error.responseBody ?? ""}`);
  }
}
process.exit(failed ? 1 : 0);
