// LangChain.js with `ChatOpenAI`.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { ContextOverflowError } from "@langchain/core/errors";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";
import {
  ANSWER, ASK, LONG, TEXTS, TOM, VECTORS, WEATHER, checkVectors, embedders, engines,
} from "./engines.mjs";

const schema = z.object({ name: z.string(), age: z.number().int() });
const get_weather = tool(async () => '{"temp_c": 21}', {
  name: "get_weather",
  description: "Get the weather in a city",
  schema: z.object({ city: z.string() }),
});

for (const [engine, baseURL] of engines) {
  const model = new ChatOpenAI({
    model: "demo",
    apiKey: "unused",
    temperature: 0,
    maxTokens: 100,
    maxRetries: 0,
    configuration: { baseURL },
  });
  describe(engine, () => {
    test("chat: text and usage", async () => {
      const reply = await model.invoke(ASK);
      assert.equal(reply.content, ANSWER);
      assert.ok(reply.usage_metadata.output_tokens > 0);
    });

    test("stream: chunks join to the answer", async () => {
      let told = "";
      for await (const chunk of await model.stream(ASK)) told += chunk.content;
      assert.equal(told, ANSWER);
    });

    test("tools: a call and its result", async () => {
      const bound = model.bindTools([get_weather]);
      const talk = [new HumanMessage(WEATHER)];
      talk.push(await bound.invoke(talk));
      assert.deepEqual(talk[1].tool_calls.map((one) => one.args), [{ city: "Paris" }]);
      talk.push(await get_weather.invoke(talk[1].tool_calls[0]));
      assert.match((await bound.invoke(talk)).content, /21/);
    });

    for (const method of ["jsonSchema", "functionCalling"]) {
      test(`structured: an object by ${method}`, async () => {
        schema.parse(await model.withStructuredOutput(schema, { method }).invoke(TOM));
      });
    }

    test("errors: LangChain's own class", async () => {
      await assert.rejects(model.invoke(LONG), ContextOverflowError);
    });
  });
}

for (const [engine, baseURL] of embedders) {
  const options = { model: "demo", apiKey: "unused", maxRetries: 0, configuration: { baseURL } };
  test(`embeddings: documents and a query, ${engine}`, async () => {
    const model = new OpenAIEmbeddings(options);
    checkVectors(await model.embedDocuments(TEXTS));
    checkVectors([await model.embedQuery(TEXTS[0])], VECTORS.slice(0, 1));
    await assert.rejects(model.embedQuery(LONG), /maximum context length is 512/);
  });
}
