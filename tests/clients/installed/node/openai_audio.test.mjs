// The `openai` package for Node.js: speech, transcriptions, translations, and spoken chat.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import OpenAI, { toFile } from "openai";
import { ANSWER, ASK, RECORDING, SENTENCE, TEXT, begins, speakers } from "./engines.mjs";

for (const [engine, baseURL] of speakers) {
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  const speak = (fields) =>
    client.audio.speech.create({ model: "tts-1", voice: "alloy", input: TEXT, ...fields });
  const file = () => toFile(RECORDING, "sentence.wav");
  const hear = async (fields) =>
    client.audio.transcriptions.create({ model: "whisper-1", file: await file(), ...fields });
  describe(engine, () => {
    test("speech: each format has its own bytes", async () => {
      for (const response_format of ["mp3", "opus", "aac", "flac", "wav"]) {
        const data = Buffer.from(await (await speak({ response_format })).arrayBuffer());
        assert.ok(begins(data, response_format), response_format);
      }
    });

    test("speech stream: samples arrive in pieces", async () => {
      let size = 0;
      for await (const piece of (await speak({ response_format: "pcm" })).body) size += piece.length;
      assert.ok(size > 24_000 && size % 2 === 0);
    });

    test("transcription: text, subtitles and times", async () => {
      assert.equal((await hear()).text, SENTENCE);
      assert.match(await hear({ response_format: "srt" }), /^1\n00:00:00,000 --> /);
      assert.match(await hear({ response_format: "vtt" }), /^WEBVTT\n\n/);
      const timestamp_granularities = ["word", "segment"];
      const found = await hear({ response_format: "verbose_json", timestamp_granularities });
      assert.equal(found.words.length, 6);
      assert.equal(found.segments.length, 2);
    });

    test("transcription stream: deltas join to the text", async () => {
      let told = "";
      let whole = "";
      for await (const event of await hear({ stream: true })) {
        if (event.type === "transcript.text.delta") told += event.delta;
        else whole = event.text;
      }
      assert.equal(told, SENTENCE);
      assert.equal(whole, SENTENCE);
    });

    test("translation: English text", async () => {
      const found = await client.audio.translations.create({ model: "whisper-1", file: await file() });
      assert.equal(found.text, SENTENCE);
    });

    const chat = {
      model: "demo", temperature: 0, modalities: ["text", "audio"],
      messages: [{ role: "user", content: ASK }],
    };

    test("spoken chat: a file, a transcript, and a follow-up by id", async () => {
      const audio = { voice: "alloy", format: "wav" };
      const { message } = (await client.chat.completions.create({ ...chat, audio })).choices[0];
      assert.equal(message.content, null);
      assert.equal(message.audio.transcript, ANSWER);
      assert.ok(begins(Buffer.from(message.audio.data, "base64"), "wav"));
      const messages = [
        ...chat.messages, { role: "assistant", audio: { id: message.audio.id } }, ...chat.messages,
      ];
      const again = await client.chat.completions.create({ ...chat, audio, messages });
      assert.ok(again.choices[0].message.audio.transcript);
    });

    test("spoken chat stream: samples and a transcript", async () => {
      const audio = { voice: "alloy", format: "pcm16" };
      let told = "";
      let size = 0;
      for await (const chunk of await client.chat.completions.create({ ...chat, audio, stream: true })) {
        const part = chunk.choices[0]?.delta.audio;
        told += part?.transcript ?? "";
        size += Buffer.from(part?.data ?? "", "base64").length;
      }
      assert.equal(told, ANSWER);
      assert.ok(size > 24_000 && size % 2 === 0);
    });

    test("errors: a bad request names the field", async () => {
      await assert.rejects(speak({ voice: "nobody" }), (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        return error.param === "voice";
      });
      await assert.rejects(
        client.audio.transcriptions.create({
          model: "whisper-1", file: await toFile(Buffer.from("No audio."), "a.wav"),
        }),
        OpenAI.BadRequestError,
      );
    });
  });
}
