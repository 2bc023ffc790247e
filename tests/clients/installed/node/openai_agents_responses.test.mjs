// OpenAI's Agents SDK for Node.js with its default model, which uses the Responses API.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import {
  Agent, MemorySession, OpenAIConversationsSession, OpenAIProvider, Runner, tool,
} from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { ANSWER, ASK, DEGREES, FINAL, TOM, TWO, engines, thinkers } from "./engines.mjs";

const get_weather = tool({
  name: "get_weather",
  description: "Get the weather in a city",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => DEGREES[city],
});
// Each agent is known by the name of its model only.
const agentOf = (more = {}) =>
  new Agent({ name: "first", model: "demo", modelSettings: { temperature: 0 }, ...more });
const runnerOf = (client) =>
  new Runner({ tracingDisabled: true, modelProvider: new OpenAIProvider({ openAIClient: client }) });
const clientOf = (baseURL) => new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const finished = async (result) => {
  for await (const _ of result) continue;
  await result.completed;
  return result;
};

for (const [engine, baseURL] of engines) {
  const runner = runnerOf(clientOf(baseURL));
  const run = (...words) => runner.run(...words);
  describe(engine, () => {
    test("chat: the final output", async () => {
      assert.equal((await run(agentOf({ instructions: "Be brief." }), ASK)).finalOutput, ANSWER);
    });

    test("stream: text that joins to the answer", async () => {
      const result = await run(agentOf(), ASK, { stream: true });
      let told = "";
      for await (const part of result.toTextStream()) told += part;
      assert.equal(told, ANSWER);
    });

    test("structured: an output type is enforced", async () => {
      const outputType = z.object({ name: z.string(), age: z.number().int() });
      outputType.parse((await run(agentOf({ outputType }), TOM)).finalOutput);
    });
  });
}

for (const [engine, baseURL] of thinkers) {
  const client = clientOf(baseURL);
  const runner = runnerOf(client);
  const run = (...words) => runner.run(...words);
  describe(`${engine}, thinking`, () => {
    test("tools: two calls run the tool, and the answer follows", async () => {
      const agent = agentOf({ tools: [get_weather] });
      assert.equal((await run(agent, TWO)).finalOutput, FINAL);
      const result = await finished(await run(agent, TWO, { stream: true }));
      assert.equal(result.finalOutput, FINAL);
    });

    test("reasoning: encrypted, and sent back without the server's store", async () => {
      const reasoning = { effort: "low", summary: "auto" };
      const providerData = { include: ["reasoning.encrypted_content"] };
      const modelSettings = { temperature: 0, store: false, reasoning, providerData };
      const result = await run(agentOf({ tools: [get_weather], modelSettings }), TWO);
      assert.equal(result.finalOutput, FINAL);
      const kinds = result.newItems.map((item) => item.type);
      assert.equal(kinds.filter((kind) => kind === "reasoning_item").length, 3);
    });

    test("handoff: another agent answers", async () => {
      const second = agentOf({ name: "second", instructions: "Answer." });
      const agent = Agent.create({ ...agentOf({ tools: [get_weather] }), handoffs: [second] });
      for (const stream of [false, true]) {
        const result = await run(agent, "Which city?", { stream });
        if (stream) await finished(result);
        assert.equal(result.finalOutput, "Paris is the capital.");
        assert.equal(result.lastAgent.name, "second");
      }
    });

    test("conversations: a session of the server keeps all items, and so does a client's", async () => {
      const agent = agentOf({ tools: [get_weather] });
      for (const session of [new OpenAIConversationsSession({ client }), new MemorySession()]) {
        assert.equal((await run(agent, TWO, { session })).finalOutput, FINAL);
        assert.equal((await run(agent, "Say it again.", { session })).finalOutput, FINAL);
        const kinds = (await session.getItems()).map((item) => item.type);
        assert.equal(kinds.filter((kind) => kind === "function_call_result").length, 2);
        await session.clearSession();
      }
    });

    test("stored: a run continues the response of another run", async () => {
      const agent = agentOf({ tools: [get_weather] });
      const { lastResponseId } = await run(agent, TWO);
      const result = await run(agent, "And now?", { previousResponseId: lastResponseId });
      assert.equal(result.finalOutput, FINAL);
    });
  });
}
