// OpenAI's Agents SDK for Node.js over chat completions.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Agent, OpenAIChatCompletionsModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { ANSWER, ASK, TOM, WEATHER, engines } from "./engines.mjs";

setTracingDisabled(true);
for (const [engine, baseURL] of engines) {
  const model = new OpenAIChatCompletionsModel(new OpenAI({ baseURL, apiKey: "unused" }), "demo");
  const options = { name: "one", model, modelSettings: { temperature: 0, maxTokens: 100 } };
  describe(engine, () => {
    test("chat: the final output", async () => {
      assert.equal((await run(new Agent(options), ASK)).finalOutput, ANSWER);
    });

    test("stream: text that joins to the answer", async () => {
      const result = await run(new Agent(options), ASK, { stream: true });
      let told = "";
      for await (const part of result.toTextStream()) told += part;
      assert.equal(told, ANSWER);
    });

    test("stored: a run with store is stored", async () => {
      const client = new OpenAI({ baseURL, apiKey: "unused" });
      const metadata = { run: `agents-${engine}-${process.pid}` };
      const modelSettings = { temperature: 0, store: true, providerData: { metadata } };
      const { finalOutput } = await run(new Agent({ ...options, modelSettings }), ASK);
      const found = [];
      for await (const one of client.chat.completions.list({ metadata })) found.push(one);
      assert.deepEqual(found.map((one) => one.choices[0].message.content), [finalOutput]);
      await client.chat.completions.delete(found[0].id);
    });

    test("tools: the function runs and its result leads on", async () => {
      const asked = [];
      const get_weather = tool({
        name: "get_weather",
        description: "Get the weather in a city",
        parameters: z.object({ city: z.string() }),
        execute: async ({ city }) => {
          asked.push(city);
          return '{"temp_c": 21}';
        },
      });
      const result = await run(new Agent({ ...options, tools: [get_weather] }), WEATHER);
      assert.match(result.finalOutput, /21/);
      assert.deepEqual(asked, ["Paris"]);
    });

    test("structured: an output type is enforced", async () => {
      const outputType = z.object({ name: z.string(), age: z.number().int() });
      outputType.parse((await run(new Agent({ ...options, outputType }), TOM)).finalOutput);
    });
  });
}
