// Anthropic's SDK for TypeScript.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { ANSWER, ASK, DEGREES, FINAL, LONG, TWO, engines, thinkers } from "./engines.mjs";

const clientOf = (baseURL) =>
  new Anthropic({ baseURL: baseURL.replace("/v1", ""), apiKey: "unused", maxRetries: 0 });
const user = (content) => ({ role: "user", content });
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");
const get_weather = {
  name: "get_weather",
  description: "Get the weather in a city",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

for (const [engine, baseURL] of engines) {
  const client = clientOf(baseURL);
  const body = { model: "demo", max_tokens: 100, temperature: 0, messages: [user(ASK)] };
  describe(engine, () => {
    test("chat: text and usage", async () => {
      const made = await client.messages.create(body);
      assert.equal(textOf(made), ANSWER);
      assert.equal(made.stop_reason, "end_turn");
      assert.match(made._request_id, /^req_/);
      const { input_tokens, cache_read_input_tokens } = made.usage;
      const { model, messages } = body;
      const counted = await client.messages.countTokens({ model, messages });
      assert.equal(counted.input_tokens, input_tokens + cache_read_input_tokens);
    });

    test("stream: texts join to the answer", async () => {
      let told = "";
      const stream = client.messages.stream(body).on("text", (text) => (told += text));
      const final = await stream.finalMessage();
      assert.equal(told, ANSWER);
      assert.equal(textOf(final), ANSWER);
      assert.ok(final.usage.output_tokens > 0);
    });

    test("models: a page of one", async () => {
      const page = await client.models.list({ limit: 1 });
      assert.equal(page.data[0].id, "demo");
    });

    test("errors: a BadRequestError with the words of a long prompt", async () => {
      const long = { ...body, messages: [user(LONG)] };
      await assert.rejects(client.messages.create(long), (error) => {
        assert.ok(error instanceof Anthropic.BadRequestError);
        assert.match(error.message, /prompt is too long: \d+ tokens > \d+ maximum/);
        return true;
      });
    });

    test("abort: a stream that the client closes early", async () => {
      const stream = client.messages.stream(body);
      for await (const event of stream) if (event.type === "content_block_delta") break;
      stream.abort();
    });
  });
}

for (const [engine, baseURL] of thinkers) {
  const client = clientOf(baseURL);
  describe(`${engine}, reasoning`, () => {
    for (const display of ["summarized", "omitted"]) {
      test(`reasoning: it is sent back with the results of calls (${display})`, async () => {
        const messages = [user(TWO)];
        const more = { tools: [get_weather], thinking: { type: "adaptive", display } };
        for (;;) {
          const body = { model: "demo", max_tokens: 400, messages, ...more };
          const made = await client.messages.stream(body).finalMessage();
          const thought = made.content.find((block) => block.type === "thinking");
          if (thought) assert.equal(thought.thinking === "", display === "omitted");
          messages.push({ role: "assistant", content: made.content });
          const calls = made.content.filter((block) => block.type === "tool_use");
          if (!calls.length) break;
          messages.push(user(calls.map(({ id, input }) => (
            { type: "tool_result", tool_use_id: id, content: DEGREES[input.city] }))));
        }
        assert.equal(textOf(messages.at(-1)), FINAL);
      });
    }
  });
}
