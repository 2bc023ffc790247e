// Vercel's AI SDK with `@ai-sdk/openai-compatible`, and with `@ai-sdk/openai`'s `.chat()`.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embed, embedMany, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import {
  ANSWER, ASK, LONG, TEXTS, TOM, VECTORS, WEATHER, checkVectors, embedders, engines,
} from "./engines.mjs";

const schema = z.object({ name: z.string(), age: z.number().int() });
const apiKey = "unused";
const models = {
  "openai-compatible": (baseURL) => {
    const options = { name: "latimer", baseURL, apiKey, includeUsage: true };
    return createOpenAICompatible({ ...options, supportsStructuredOutputs: true })("demo");
  },
  "openai.chat": (baseURL) => createOpenAI({ baseURL, apiKey }).chat("demo"),
};

for (const [engine, baseURL] of engines) {
  for (const [name, modelOf] of Object.entries(models)) {
    const options = { model: modelOf(baseURL), temperature: 0, maxRetries: 0, maxOutputTokens: 100 };
    describe(`${engine}, ${name}`, () => {
      test("chat: text and usage", async () => {
        const result = await generateText({ ...options, prompt: ASK });
        assert.equal(result.text, ANSWER);
        assert.ok(result.usage.outputTokens > 0);
      });

      test("stream: text and usage", async () => {
        const result = streamText({ ...options, prompt: ASK });
        let told = "";
        for await (const part of result.textStream) told += part;
        assert.equal(told, ANSWER);
        assert.ok((await result.usage).outputTokens > 0);
      });

      for (const stream of [false, true]) {
        test(`tools: the function runs and its result leads on (stream: ${stream})`, async () => {
          const asked = [];
          const get_weather = tool({
            description: "Get the weather in a city",
            inputSchema: z.object({ city: z.string() }),
            execute: async ({ city }) => {
              asked.push(city);
              return '{"temp_c": 21}';
            },
          });
          const more = { prompt: WEATHER, tools: { get_weather }, stopWhen: isStepCount(3) };
          const run = stream ? streamText : generateText;
          const result = await run({ ...options, ...more });
          assert.match(await result.text, /21/);
          assert.deepEqual(asked, ["Paris"]);
        });
      }

      test("structured: an object of a zod schema", async () => {
        const output = Output.object({ schema });
        schema.parse((await generateText({ ...options, prompt: TOM, output })).output);
      });

      test("reasoning effort: accepted by a model that does not reason", async () => {
        const providerOptions = { openai: { reasoningEffort: "low" }, latimer: { reasoningEffort: "low" } };
        const result = await generateText({ ...options, prompt: ASK, providerOptions });
        assert.ok(result.text);
      });

      test("errors: an APICallError that is not retried", async () => {
        await assert.rejects(generateText({ ...options, prompt: LONG }), (error) => {
          assert.ok(APICallError.isInstance(error));
          assert.equal(error.statusCode, 400);
          assert.equal(error.isRetryable, false);
          assert.match(error.message, /maximum context length/);
          return true;
        });
      });

      test("abort: a stream ends", async () => {
        const aborter = new AbortController();
        const more = { prompt: "Tell me a story.", abortSignal: aborter.signal };
        const result = streamText({ ...options, ...more });
        const seen = [];
        for await (const part of result.stream) {
          seen.push(part.type);
          if (part.type === "text-delta") aborter.abort();
        }
        assert.ok(seen.includes("abort"));
      });
    });
  }
}

for (const [engine, baseURL] of embedders) {
  const embeddings = {
    "openai-compatible": createOpenAICompatible({ name: "latimer", baseURL, apiKey }),
    openai: createOpenAI({ baseURL, apiKey }),
  };
  for (const [name, provider] of Object.entries(embeddings)) {
    const model = provider.embeddingModel("demo");
    test(`embeddings: one text and several, ${engine}, ${name}`, async () => {
      checkVectors((await embedMany({ model, values: TEXTS })).embeddings);
      const { embedding, usage } = await embed({ model, value: TEXTS[0] });
      checkVectors([embedding], VECTORS.slice(0, 1));
      assert.ok(usage.tokens > 0);
      const long = embed({ model, value: LONG, maxRetries: 0 });
      await assert.rejects(long, (error) => error instanceof APICallError);
    });
  }
}
