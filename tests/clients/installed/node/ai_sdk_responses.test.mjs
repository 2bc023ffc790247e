// Vercel's AI SDK with the default model of `@ai-sdk/openai`, which uses the Responses API.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import {
  ANSWER, ASK, DEGREES, DOT, FINAL, LONG, TOM, TWO, engines, thinkers,
} from "./engines.mjs";

const schema = z.object({ name: z.string(), age: z.number().int() });
const apiKey = "unused";
const get_weather = tool({
  description: "Get the weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => DEGREES[city],
});

for (const [engine, baseURL] of engines) {
  const model = createOpenAI({ baseURL, apiKey })("demo");
  const options = { model, temperature: 0, maxRetries: 0 };
  describe(engine, () => {
    test("chat: text, usage and the response's id", async () => {
      const result = await generateText({ ...options, instructions: "Be brief.", prompt: ASK });
      assert.equal(result.text, ANSWER);
      assert.ok(result.usage.outputTokens > 0);
      assert.match(result.providerMetadata.openai.responseId, /^resp_/);
      assert.equal(result.finishReason, "stop");
    });

    test("stream: text and usage", async () => {
      const result = streamText({ ...options, prompt: ASK });
      let told = "";
      for await (const part of result.textStream) told += part;
      assert.equal(told, ANSWER);
      assert.ok((await result.usage).outputTokens > 0);
    });

    test("structured: an object of a zod schema, by each function", async () => {
      const output = Output.object({ schema });
      schema.parse((await generateText({ ...options, prompt: TOM, output })).output);
      const streamed = streamText({ ...options, prompt: TOM, output });
      for await (const _ of streamed.partialOutputStream) continue;
      schema.parse(await streamed.output);
    });

    test("logprobs: tokens join to the answer", async () => {
      const providerOptions = { openai: { logprobs: 2 } };
      const result = await generateText({ ...options, prompt: ASK, providerOptions });
      const [tokens] = result.providerMetadata.openai.logprobs;
      assert.equal(tokens.map((one) => one.token).join(""), ANSWER);
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

for (const [engine, baseURL] of thinkers) {
  const sent = [];
  const fetched = (url, init) => {
    sent.push(JSON.parse(init.body));
    return fetch(url, init);
  };
  const provider = createOpenAI({ baseURL, apiKey, fetch: fetched });
  const tools = { get_weather };
  const options = { model: provider("demo"), maxRetries: 0, tools, stopWhen: isStepCount(5) };
  const kinds = () => sent.at(-1).input.map((item) => item.type ?? item.role);
  for (const run of [generateText, streamText]) {
    describe(`${engine}, ${run.name}`, () => {
      test("tools: two calls lead to the answer, and earlier items are sent as references", async () => {
        const messages = [{ role: "user", content: TWO }];
        const result = await run({ ...options, messages });
        assert.equal(await result.text, FINAL);
        assert.equal((await result.steps).length, 3);
        assert.equal(sent.at(-1).store, undefined);
        const call = ["item_reference", "function_call", "function_call_output"];
        assert.deepEqual(kinds(), ["user", ...call, ...call]);
        messages.push(...(await result.responseMessages));
        messages.push({ role: "user", content: "Say it again." });
        assert.equal(await (await run({ ...options, messages })).text, FINAL);
        // The second reference is that of the answer's text.
        const answer = ["item_reference", "item_reference"];
        assert.deepEqual(kinds(), ["user", ...call, ...call, ...answer, "user"]);
      });

      test("reasoning: encrypted, and sent back without the server's store", async () => {
        const openai = {
          store: false, forceReasoning: true, reasoningEffort: "low", reasoningSummary: "auto",
        };
        const result = await run({ ...options, prompt: TWO, providerOptions: { openai } });
        assert.equal(await result.text, FINAL);
        const call = ["reasoning", "function_call", "function_call_output"];
        assert.deepEqual(kinds(), ["user", ...call, ...call]);
        const thoughts = (await result.steps).map((step) => step.reasoningText);
        assert.deepEqual(thoughts, ["I need both cities.", "Now the second city.", "I have both now."]);
      });

      test("previous response id: a conversation is continued", async () => {
        const first = await run({ ...options, prompt: TWO });
        const { responseId } = (await first.providerMetadata).openai;
        const providerOptions = { openai: { previousResponseId: responseId } };
        const result = await run({ ...options, prompt: "Say it again.", providerOptions });
        assert.equal(await result.text, FINAL);
        assert.deepEqual(kinds(), ["user"]);
      });
    });
  }

  test(`images: an image is a part of the prompt, ${engine}`, async () => {
    const text = { type: "text", text: "What is it?" };
    const counts = [];
    for (const content of [[text], [text, { type: "file", data: DOT, mediaType: "image" }]]) {
      const messages = [{ role: "user", content }];
      const result = await generateText({ model: options.model, maxRetries: 0, messages });
      counts.push(result.usage.inputTokens);
    }
    assert.ok(counts[1] >= counts[0] + 4);
  });
}
