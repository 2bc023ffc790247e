// LangChain.js with `ChatAnthropic`.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { z } from "zod";
import { ANSWER, ASK, DEGREES, FINAL, LONG, TOM, TWO, engines, thinkers } from "./engines.mjs";

const schema = z.object({ name: z.string(), age: z.number().int() });
const get_weather = tool(async ({ city }) => DEGREES[city], {
  name: "get_weather",
  description: "Get the weather in a city",
  schema: z.object({ city: z.string() }),
});
const modelOf = (baseURL, more = {}) =>
  new ChatAnthropic({
    model: "demo",
    apiKey: "unused",
    anthropicApiUrl: baseURL.replace("/v1", ""),
    maxTokens: 400,
    maxRetries: 0,
    ...more,
  });
const said = async (model, talk, stream) => {
  if (!stream) return model.invoke(talk);
  let whole = null;
  for await (const chunk of await model.stream(talk)) whole = whole ? whole.concat(chunk) : chunk;
  return whole;
};

for (const [engine, baseURL] of engines) {
  const model = modelOf(baseURL, { temperature: 0 });
  describe(engine, () => {
    test("chat: text and usage", async () => {
      const reply = await model.invoke(ASK);
      assert.equal(reply.text, ANSWER);
      assert.ok(reply.usage_metadata.output_tokens > 0);
    });

    test("stream: chunks join to the answer", async () => {
      let told = "";
      for await (const chunk of await model.stream(ASK)) told += chunk.text;
      assert.equal(told, ANSWER);
    });

    for (const method of ["jsonSchema", "functionCalling"]) {
      test(`structured: an object by ${method}`, async () => {
        schema.parse(await model.withStructuredOutput(schema, { method }).invoke(TOM));
      });
    }

    test("errors: the words of a long prompt", async () => {
      await assert.rejects(model.invoke(LONG), /prompt is too long/);
    });
  });
}

for (const [engine, baseURL] of thinkers) {
  describe(`${engine}, reasoning`, () => {
    for (const stream of [false, true]) {
      test(`reasoning: it is sent back with the results of calls (stream: ${stream})`, async () => {
        const model = modelOf(baseURL).bindTools([get_weather]);
        const talk = [new HumanMessage(TWO)];
        for (;;) {
          const reply = await said(model, talk, stream);
          talk.push(reply);
          if (!reply.tool_calls.length) break;
          for (const call of reply.tool_calls) talk.push(await get_weather.invoke(call));
        }
        assert.equal(talk.at(-1).text, FINAL);
      });
    }
  });
}
