import { readFileSync } from "node:fs";
import assert from "node:assert/strict";

const urlsOf = (words) =>
  words.split(" ").map((one) => {
    const at = one.indexOf("=");
    return [one.slice(0, at), `${one.slice(at + 1)}/v1`];
  });

// The engines of LATIMER_URLS, as [name, base URL].
export const engines = urlsOf(process.env.LATIMER_URLS);
// The same with a model that thinks, calls a tool for two cities, and answers. It takes images,
// hands a conversation over if it can, and tells if the reasoning was not sent back.
export const thinkers = urlsOf(process.env.LATIMER_STEPS);
export const ASK = "What is the capital of France?";
export const ANSWER = "The capital of France is Paris.";
export const WEATHER = "What is the weather in Paris?";
export const TOM = "Give me JSON for Tom, age 33.";
export const TWO = "What is the weather in Paris and Rome?";
export const DEGREES = { Paris: "21", Rome: "18" };
export const FINAL = "It is 21 degrees in Paris and 18 in Rome.";
// A red image of 8 by 8 pixels.
export const DOT =
  "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEX" +
  "HbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC";
export const LONG = "word ".repeat(5000);

// The engines with a speaker and a transcriber; its recording, and what is heard in it.
export const speakers = urlsOf(process.env.LATIMER_AUDIO);
export const RECORDING = readFileSync(process.env.LATIMER_RECORDING);
export const SENTENCE = "The cat sat on the chair.";
export const TEXT = "Two cats sat on the mat. A dog came in.";
const MAGIC = { wav: "RIFF", flac: "fLaC", opus: "OggS" };

// True if a file has the bytes of a format: those of MP3 and AAC begin with a frame, or a tag.
export const begins = (data, format) => {
  if (MAGIC[format]) return data.subarray(0, 4).toString("latin1") === MAGIC[format];
  if (format === "mp3" && data.subarray(0, 3).toString("latin1") === "ID3") return true;
  const layer = data[1] & 0b110;
  return data[0] === 0xff && (data[1] & 0xf0) >= 0xe0 && (format === "aac") === (layer === 0);
};

const { urls, inputs } = JSON.parse(readFileSync(process.env.LATIMER_EMBEDDINGS));
// The engines with an embedding model, texts, their ids, and their vectors in float64 arithmetic.
export const embedders = Object.entries(urls.plain);
export const TEXTS = inputs.map((one) => one.text);
export const IDS = inputs.map((one) => one.ids);
export const VECTORS = inputs.map((one) => one.vector);

const dot = (one, other) => one.reduce((sum, number, at) => sum + number * other[at], 0);

// Vectors have unit length and the directions that are expected, by default those of TEXTS.
export const checkVectors = (found, expected = VECTORS) => {
  assert.equal(found.length, expected.length);
  found.forEach((vector, at) => {
    assert.equal(vector.length, expected[at].length);
    assert.ok(Math.abs(dot(vector, vector) - 1) < 1e-5);
    assert.ok(dot(vector, expected[at]) > 0.99999);
  });
};
