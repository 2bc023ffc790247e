// The `openai` package for Node.js over the Responses API.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ANSWER, ASK, DEGREES, DOT, FINAL, LONG, TOM, TWO, engines, thinkers } from "./engines.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });
const ask = (input) => ({ model: "demo", temperature: 0, input });
const get_weather = zodResponsesFunction({
  name: "get_weather",
  description: "Get the weather in a city",
  parameters: z.object({ city: z.string() }),
});
const outputs = (reply) =>
  reply.output
    .filter((item) => item.type === "function_call")
    .map((item) => {
      const output = DEGREES[JSON.parse(item.arguments).city];
      return { type: "function_call_output", call_id: item.call_id, output };
    });

for (const [engine, baseURL] of engines) {
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  describe(engine, () => {
    test("chat: a response has the answer and usage, and is retrieved", async () => {
      const reply = await client.responses.create(ask(ASK));
      assert.equal(reply.output_text, ANSWER);
      assert.equal(reply.usage.total_tokens, reply.usage.input_tokens + reply.usage.output_tokens);
      assert.deepEqual((await client.responses.retrieve(reply.id)).output, reply.output);
    });

    test("stream: deltas join to the answer, the helper has the response", async () => {
      let told = "";
      for await (const event of await client.responses.create({ ...ask(ASK), stream: true })) {
        if (event.type === "response.output_text.delta") told += event.delta;
      }
      assert.equal(told, ANSWER);
      const stream = client.responses.stream(ask(ASK));
      const reply = await stream.finalResponse();
      assert.equal(reply.output_text, ANSWER);
      const again = client.responses.stream({ response_id: reply.id, starting_after: 3 });
      assert.equal((await again.finalResponse()).output_text, ANSWER);
    });

    test("structured: parse returns an object of a zod schema", async () => {
      const body = { ...ask(TOM), text: { format: zodTextFormat(Person, "person") } };
      Person.parse((await client.responses.parse(body)).output_parsed);
      Person.parse((await client.responses.stream(body).finalResponse()).output_parsed);
    });

    test("logprobs: tokens join to the answer", async () => {
      const options = { top_logprobs: 2, include: ["message.output_text.logprobs"] };
      const reply = await client.responses.create({ ...ask(ASK), ...options });
      const { logprobs } = reply.output[0].content[0];
      assert.equal(logprobs.map((one) => one.token).join(""), ANSWER);
    });

    test("errors: the client's own classes with OpenAI's codes", async () => {
      await assert.rejects(client.responses.create(ask(LONG)), (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        assert.equal(error.code, "context_length_exceeded");
        return true;
      });
      await assert.rejects(
        client.responses.create({ ...ask(ASK), previous_response_id: "resp_none" }),
        { code: "previous_response_not_found" },
      );
    });

    test("abort: a stream ends, and the next request is served", async () => {
      const aborter = new AbortController();
      const options = { ...ask("Tell me a story."), stream: true };
      const stream = await client.responses.create(options, { signal: aborter.signal });
      for await (const _ of stream) aborter.abort();
      assert.equal((await client.responses.create(ask(ASK))).output_text, ANSWER);
    });
  });
}

for (const [engine, baseURL] of thinkers) {
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  const step = (stream, body) => {
    const whole = { model: "demo", tools: [get_weather], ...body };
    return stream ? client.responses.stream(whole).finalResponse() : client.responses.parse(whole);
  };
  for (const stream of [false, true]) {
    describe(`${engine}, stream: ${stream}`, () => {
      test("tools: two calls and their results lead to the answer", async () => {
        const input = [{ role: "user", content: TWO }];
        let reply;
        for (let i = 0; i < 3; i += 1) {
          reply = await step(stream, { input });
          input.push(...reply.output, ...outputs(reply));
        }
        assert.equal(reply.output_text, FINAL);
      });

      test("reasoning: encrypted, and sent back without the server's store", async () => {
        const input = [{ role: "user", content: TWO }];
        const options = {
          store: false,
          include: ["reasoning.encrypted_content"],
          reasoning: { effort: "low", summary: "auto" },
        };
        let reply;
        for (let i = 0; i < 3; i += 1) {
          reply = await step(stream, { ...options, input });
          const [thought, ...items] = reply.output;
          assert.equal(thought.summary[0].text, thought.content[0].text);
          input.push({ ...thought, summary: [], content: [] }, ...items, ...outputs(reply));
        }
        assert.equal(reply.output_text, FINAL);
      });

      test("previous response id: only the new items are sent", async () => {
        let reply = await step(stream, { input: TWO });
        for (let i = 0; i < 2; i += 1) {
          reply = await step(stream, { input: outputs(reply), previous_response_id: reply.id });
        }
        assert.equal(reply.output_text, FINAL);
      });

      test("conversations: the items of the responses are kept", async () => {
        const { id } = await client.conversations.create({ metadata: { topic: "weather" } });
        let reply = await step(stream, { input: TWO, conversation: id });
        for (let i = 0; i < 2; i += 1) {
          reply = await step(stream, { input: outputs(reply), conversation: id });
        }
        assert.equal(reply.output_text, FINAL);
        const kinds = [];
        const list = client.conversations.items.list(id, { order: "asc", limit: 3 });
        for await (const item of list) kinds.push(item.type);
        const call = ["reasoning", "function_call", "function_call_output"];
        assert.deepEqual(kinds, ["message", ...call, ...call, "reasoning", "message"]);
        await client.conversations.delete(id);
        await assert.rejects(client.conversations.retrieve(id), OpenAI.NotFoundError);
      });
    });
  }

  test(`images: an image is a part of the prompt, ${engine}`, async () => {
    const text = { type: "input_text", text: "What is it?" };
    const image = { type: "input_image", image_url: DOT, detail: "auto" };
    const counts = [];
    for (const content of [[text], [text, image]]) {
      const reply = await client.responses.create(ask([{ role: "user", content }]));
      counts.push(reply.usage.input_tokens);
    }
    assert.ok(counts[1] >= counts[0] + 4);
  });
}
