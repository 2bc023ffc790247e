// LangChain.js: `ChatOpenAI` with audio in its answers.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { ChatOpenAI } from "@langchain/openai";
import { ANSWER, ASK, begins, speakers } from "./engines.mjs";

for (const [engine, baseURL] of speakers) {
  const make = (format, more) =>
    new ChatOpenAI({
      model: "demo", temperature: 0, maxRetries: 0, apiKey: "unused", configuration: { baseURL },
      modalities: ["text", "audio"], audio: { voice: "alloy", format }, ...more,
    });
  describe(engine, () => {
    test("spoken chat: a file, a transcript, and a follow-up with the message", async () => {
      const model = make("wav");
      const found = await model.invoke(ASK);
      const { audio } = found.additional_kwargs;
      assert.equal(audio.transcript, ANSWER);
      assert.ok(begins(Buffer.from(audio.data, "base64"), "wav"));
      const again = await model.invoke([["user", ASK], found, ["user", ASK]]);
      assert.ok(again.additional_kwargs.audio.transcript);
    });

    test("spoken chat stream: a transcript in pieces", async () => {
      let told = "";
      let size = 0;
      for await (const chunk of await make("pcm16").stream(ASK)) {
        const part = chunk.additional_kwargs.audio;
        told += part?.transcript ?? "";
        size += Buffer.from(part?.data ?? "", "base64").length;
      }
      assert.equal(told, ANSWER);
      assert.ok(size > 24_000);
    });

    test("errors: an unknown voice", async () => {
      const model = make("wav", { audio: { voice: "nobody", format: "wav" } });
      await assert.rejects(model.invoke(ASK), /nobody/);
    });
  });
}
