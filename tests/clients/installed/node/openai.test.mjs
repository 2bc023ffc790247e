// The `openai` package for Node.js.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ANSWER, ASK, IDS, LONG, TEXTS, TOM, VECTORS, WEATHER, checkVectors, embedders, engines,
} from "./engines.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });
const ask = (content) => ({ model: "demo", temperature: 0, messages: [{ role: "user", content }] });

for (const [engine, baseURL] of engines) {
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  describe(engine, () => {
    test("chat: a completion has the answer and usage", async () => {
      const reply = await client.chat.completions.create(ask(ASK));
      assert.equal(reply.choices[0].message.content, ANSWER);
      assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
    });

    test("stream: deltas join to the answer, usage comes last", async () => {
      let told = "";
      let usage = null;
      const options = { stream: true, stream_options: { include_usage: true } };
      for await (const chunk of await client.chat.completions.create({ ...ask(ASK), ...options })) {
        told += chunk.choices[0]?.delta.content ?? "";
        usage = chunk.usage ?? usage;
      }
      assert.equal(told, ANSWER);
      assert.ok(usage.completion_tokens > 0);
    });

    test("stream: the helper's final message", async () => {
      const stream = client.chat.completions.stream(ask(ASK));
      assert.equal(await stream.finalContent(), ANSWER);
    });

    test("stored: a completion is listed, updated, retrieved and deleted", async () => {
      const run = `${engine}-${process.pid}`;
      const made = [];
      for (let i = 0; i < 5; i += 1) {
        const more = { store: true, metadata: { run }, max_tokens: 4, stream: i % 2 === 1 };
        const reply = await client.chat.completions.create({ ...ask(ASK), ...more });
        if (i % 2 === 0) made.push(reply.id);
        else for await (const chunk of reply) if (made.at(-1) !== chunk.id) made.push(chunk.id);
      }
      const listed = [];
      const list = client.chat.completions.list({ metadata: { run }, limit: 2 });
      for await (const one of list) listed.push(one.id);
      assert.deepEqual(listed, made);
      const changed = await client.chat.completions.update(made[0], { metadata: { run, a: "b" } });
      assert.deepEqual(changed.metadata, { run, a: "b" });
      assert.equal((await client.chat.completions.retrieve(made[0])).id, made[0]);
      const sent = [];
      for await (const one of client.chat.completions.messages.list(made[0])) sent.push(one.content);
      assert.deepEqual(sent, [ASK]);
      for (const id of made) await client.chat.completions.delete(id);
      await assert.rejects(client.chat.completions.retrieve(made[0]), OpenAI.NotFoundError);
    });

    test("tools: runTools calls the function and returns its result", async () => {
      const asked = [];
      const get_weather = ({ city }) => {
        asked.push(city);
        return '{"temp_c": 21}';
      };
      const runner = client.chat.completions.runTools({
        ...ask(WEATHER),
        tools: [
          zodFunction({
            name: "get_weather",
            description: "Get the weather in a city",
            parameters: z.object({ city: z.string() }),
            function: get_weather,
          }),
        ],
      });
      assert.match(await runner.finalContent(), /21/);
      assert.deepEqual(asked, ["Paris"]);
    });

    test("structured: parse returns an object of a zod schema", async () => {
      const reply = await client.chat.completions.parse({
        ...ask(TOM),
        max_tokens: 100,
        response_format: zodResponseFormat(Person, "person"),
      });
      Person.parse(reply.choices[0].message.parsed);
    });

    test("logprobs: tokens join to the answer", async () => {
      const options = { logprobs: true, top_logprobs: 2 };
      const reply = await client.chat.completions.create({ ...ask(ASK), ...options });
      const content = reply.choices[0].logprobs.content;
      assert.equal(content.map((one) => one.token).join(""), ANSWER);
    });

    test("completions: the legacy route", async () => {
      const prompt = "Q: What is the capital of Japan?\nA:";
      const options = { model: "demo", prompt, max_tokens: 9, temperature: 0 };
      assert.match((await client.completions.create(options)).choices[0].text, /Tokyo/);
    });

    test("errors: the client's own classes with OpenAI's codes", async () => {
      await assert.rejects(client.chat.completions.create(ask(LONG)), (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        assert.equal(error.code, "context_length_exceeded");
        return true;
      });
      await assert.rejects(
        client.chat.completions.create({ ...ask(ASK), model: "another" }),
        OpenAI.NotFoundError,
      );
    });

    test("abort: a stream ends, and the next request is served", async () => {
      const aborter = new AbortController();
      const options = { ...ask("Tell me a story."), stream: true };
      const stream = await client.chat.completions.create(options, { signal: aborter.signal });
      for await (const _ of stream) aborter.abort();
      const reply = await client.chat.completions.create(ask(ASK));
      assert.equal(reply.choices[0].message.content, ANSWER);
    });

    test("models: the one that is served", async () => {
      const { data } = await client.models.list();
      assert.deepEqual(data.map((one) => one.id), ["demo"]);
    });
  });
}

for (const [engine, baseURL] of embedders) {
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  const vectorsOf = async (input, more = {}) => {
    const reply = await client.embeddings.create({ model: "demo", input, ...more });
    assert.deepEqual(reply.data.map((one) => one.index), [...reply.data.keys()]);
    return reply.data.map((one) => one.embedding);
  };
  describe(`${engine}, embeddings`, () => {
    for (const more of [{}, { encoding_format: "float" }]) {
      test(`embeddings: texts and ids, ${JSON.stringify(more)}`, async () => {
        checkVectors(await vectorsOf(TEXTS, more));
        checkVectors(await vectorsOf(IDS, more));
        checkVectors(await vectorsOf(TEXTS[0], more), VECTORS.slice(0, 1));
        checkVectors(await vectorsOf(IDS[0], more), VECTORS.slice(0, 1));
        assert.equal((await vectorsOf("a", { ...more, dimensions: 16 }))[0].length, 16);
      });
    }

    test("embeddings: eight requests at once", async () => {
      const found = await Promise.all(Array.from({ length: 8 }, () => vectorsOf(TEXTS)));
      found.forEach((vectors) => checkVectors(vectors));
    });

    test("embeddings: 2,048 texts", async () => {
      const texts = Array.from({ length: 2047 }, (_, number) => `text ${number}`);
      const found = await vectorsOf([...texts, TEXTS[0]]);
      assert.equal(found.length, 2048);
      checkVectors(found.slice(-1), VECTORS.slice(0, 1));
    });

    test("errors: a text that is too long", async () => {
      await assert.rejects(vectorsOf(["a", LONG]), (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        assert.deepEqual([error.code, error.param], ["context_length_exceeded", "input[1]"]);
        return true;
      });
    });
  });
}
