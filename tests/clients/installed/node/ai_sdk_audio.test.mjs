// Vercel's AI SDK with `@ai-sdk/openai`: `generateSpeech` and `transcribe`.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { generateSpeech, transcribe } from "ai";
import { RECORDING, SENTENCE, TEXT, begins, speakers } from "./engines.mjs";

for (const [engine, baseURL] of speakers) {
  const openai = createOpenAI({ baseURL, apiKey: "unused" });
  const speak = (fields) =>
    generateSpeech({ model: openai.speech("tts-1"), text: TEXT, maxRetries: 0, ...fields });
  const hear = (fields) =>
    transcribe({
      model: openai.transcription("whisper-1"), audio: RECORDING, maxRetries: 0, ...fields,
    });
  describe(engine, () => {
    test("speech: MP3 by default, and other formats", async () => {
      const { audio } = await speak();
      assert.equal(audio.mediaType, "audio/mpeg");
      assert.ok(begins(Buffer.from(audio.uint8Array), "mp3"));
      for (const outputFormat of ["wav", "flac", "opus", "aac"]) {
        const found = await speak({ outputFormat, voice: "nova", speed: 1.5 });
        assert.ok(begins(Buffer.from(found.audio.uint8Array), outputFormat), outputFormat);
      }
    });

    test("transcription: text, segments and seconds", async () => {
      assert.equal((await hear()).text, SENTENCE);
      const providerOptions = { openai: { timestampGranularities: ["segment"], language: "en" } };
      const found = await hear({ providerOptions });
      assert.equal(found.text, SENTENCE);
      assert.ok(found.segments.length === 2);
      assert.ok(found.durationInSeconds > 1);
    });

    test("transcription stream: the newer models' default is plain text", async () => {
      const found = await hear({ model: openai.transcription("gpt-4o-transcribe") });
      assert.equal(found.text, SENTENCE);
    });

    test("errors: an unknown voice, and a file without sound", async () => {
      await assert.rejects(speak({ voice: "nobody" }), /nobody/);
      await assert.rejects(hear({ audio: Buffer.from("No audio.") }), /file/);
    });
  });
}
