// Vercel's AI SDK with `@ai-sdk/anthropic`.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { APICallError, Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, ASK, DEGREES, FINAL, LONG, TOM, TWO, engines, thinkers } from "./engines.mjs";

const schema = z.object({ name: z.string(), age: z.number().int() });
const get_weather = tool({
  description: "Get the weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => DEGREES[city],
});
const modelOf = (baseURL) => createAnthropic({ baseURL, apiKey: "unused" })("demo");

for (const [engine, baseURL] of engines) {
  const options = { model: modelOf(baseURL), temperature: 0, maxRetries: 0, maxOutputTokens: 100 };
  describe(engine, () => {
    test("chat: text and usage", async () => {
      const result = await generateText({ ...options, prompt: ASK });
      assert.equal(result.text, ANSWER);
      assert.ok(result.usage.inputTokens > 0 && result.usage.outputTokens > 0);
      assert.equal(result.finishReason, "stop");
    });

    test("stream: text and usage", async () => {
      const result = streamText({ ...options, prompt: ASK });
      let told = "";
      for await (const part of result.textStream) told += part;
      assert.equal(told, ANSWER);
      assert.ok((await result.usage).outputTokens > 0);
    });

    test("structured: an object of a zod schema", async () => {
      const output = Output.object({ schema });
      schema.parse((await generateText({ ...options, prompt: TOM, output })).output);
    });

    test("errors: an APICallError that is not retried", async () => {
      await assert.rejects(generateText({ ...options, prompt: LONG }), (error) => {
        assert.ok(APICallError.isInstance(error));
        assert.equal(error.statusCode, 400);
        assert.match(error.message, /prompt is too long/);
        return true;
      });
    });
  });
}

for (const [engine, baseURL] of thinkers) {
  describe(`${engine}, reasoning`, () => {
    for (const stream of [false, true]) {
      test(`reasoning: it is sent back with the results of calls (stream: ${stream})`, async () => {
        const options = { model: modelOf(baseURL), maxRetries: 0, maxOutputTokens: 400 };
        const more = { prompt: TWO, tools: { get_weather }, stopWhen: isStepCount(4) };
        const result = await (stream ? streamText : generateText)({ ...options, ...more });
        assert.equal(await result.text, FINAL);
        const steps = await result.steps;
        assert.ok(steps[0].reasoningText);
      });
    }
  });
}
