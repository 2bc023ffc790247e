// LangChain.js with `ChatOpenAI` and `useResponsesApi`.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { ContextOverflowError } from "@langchain/core/errors";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { ANSWER, ASK, DEGREES, DOT, FINAL, LONG, TOM, TWO, engines, thinkers } from "./engines.mjs";

const schema = z.object({ name: z.string(), age: z.number().int() });
const get_weather = tool(async ({ city }) => DEGREES[city], {
  name: "get_weather",
  description: "Get the weather in a city",
  schema: z.object({ city: z.string() }),
});
const modelOf = (baseURL, more = {}) =>
  new ChatOpenAI({
    model: "demo",
    apiKey: "unused",
    temperature: 0,
    maxRetries: 0,
    useResponsesApi: true,
    configuration: { baseURL },
    ...more,
  });
// The message of a model, plain or joined from a stream's chunks.
const said = async (model, talk, stream) => {
  if (!stream) return model.invoke(talk);
  let whole = null;
  for await (const chunk of await model.stream(talk)) whole = whole ? whole.concat(chunk) : chunk;
  return whole;
};

for (const [engine, baseURL] of engines) {
  const model = modelOf(baseURL);
  describe(engine, () => {
    test("chat: text and usage", async () => {
      const reply = await model.invoke(ASK);
      assert.equal(reply.text, ANSWER);
      assert.ok(reply.usage_metadata.output_tokens > 0);
      assert.match(reply.response_metadata.id, /^resp_/);
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

    test("errors: LangChain's own class", async () => {
      await assert.rejects(model.invoke(LONG), ContextOverflowError);
    });
  });
}

const settings = {
  default: {},
  encrypted: {
    zdrEnabled: true,
    reasoning: { effort: "low", summary: "auto" },
    modelKwargs: { include: ["reasoning.encrypted_content"] },
  },
  blocks: { outputVersion: "v1" },
};
for (const [engine, baseURL] of thinkers) {
  for (const [name, more] of Object.entries(settings)) {
    // The chunks of a stream lack the encrypted reasoning.
    for (const stream of name === "encrypted" ? [false] : [false, true]) {
      test(`tools: two calls lead to the answer, ${engine}, ${name}, stream: ${stream}`, async () => {
        const model = modelOf(baseURL, more).bindTools([get_weather]);
        const talk = [new HumanMessage(TWO)];
        for (let i = 0; i < 2; i += 1) {
          const reply = await said(model, talk, stream);
          talk.push(reply);
          for (const call of reply.tool_calls) talk.push(await get_weather.invoke(call));
        }
        talk.push(await said(model, talk, stream), new HumanMessage("Say it again."));
        assert.equal(talk.at(-2).text, FINAL);
        assert.equal((await said(model, talk, stream)).text, FINAL);
      });
    }
  }

  test(`previous response id: a conversation is continued, ${engine}`, async () => {
    const model = modelOf(baseURL).bindTools([get_weather]);
    let reply = await model.invoke(TWO);
    for (let i = 0; i < 2; i += 1) {
      const result = await get_weather.invoke(reply.tool_calls[0]);
      reply = await model.invoke([result], { previous_response_id: reply.response_metadata.id });
    }
    assert.equal(reply.text, FINAL);
  });

  test(`images: an image is a part of the prompt, ${engine}`, async () => {
    const text = { type: "text", text: "What is it?" };
    const image = { type: "image_url", image_url: { url: DOT } };
    const counts = [];
    for (const content of [[text], [text, image]]) {
      const reply = await modelOf(baseURL).invoke([new HumanMessage({ content })]);
      counts.push(reply.usage_metadata.input_tokens);
    }
    assert.ok(counts[1] >= counts[0] + 4);
  });
}
