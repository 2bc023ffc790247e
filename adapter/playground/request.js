// The last request, as curl, Python and JavaScript, and the raw response.

import { $, say, visible } from "./dom.js";
import { address, key } from "./api.js";

const MOST = 2_000_000;
let last = null;
let raw = "";

const quoted = (text) => `'${text.replace(/'/g, `'\\''`)}'`;

/** Return a value as a Python literal. */
function python(value, indent = 0) {
  const pad = " ".repeat(indent + 4);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  // The escapes of JSON are those of Python, apart from surrogate pairs, which stay as they are.
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close, rows] = Array.isArray(value)
    ? ["[", "]", value.map((one) => python(one, indent + 4))]
    : ["{", "}", Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, indent + 4)}`)];
  if (!rows.length || (Array.isArray(value) && typeof value[0] === "number")) return `${open}${rows.join(", ")}${close}`;
  return `${open}\n${rows.map((row) => `${pad}${row},\n`).join("")}${" ".repeat(indent)}${close}`;
}

// The arguments of openai-python; it takes others in `extra_body`.
const KNOWN = new Set([
  // `logprobs_token_ids` and `reply_token_ids` are Latimer's own.
  "model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop",
  "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "echo", "tools", "reasoning_effort", "store",
  "metadata",
]);

const WRITERS = {
  curl: ({ path, body }) =>
    [
      `curl ${body.stream ? "-N " : ""}${quoted(address(path))} -H 'content-type: application/json'`,
      ...(key.get() ? [`  -H "authorization: Bearer $LATIMER_KEY"`] : []),
      `  -d ${quoted(JSON.stringify(body))}`,
    ].join(" \\\n"),
  python({ path, body }) {
    const base = address("").replace(/\/$/, "");
    const isKnown = (name) => KNOWN.has(name) || (path === "chat/completions" && name === "response_format");
    const entries = Object.entries(body);
    const extra = Object.fromEntries(entries.filter(([name]) => !isKnown(name)));
    const rows = entries.filter(([name]) => isKnown(name)).map(([name, value]) => `    ${name}=${python(value, 4)},\n`);
    if (Object.keys(extra).length) rows.push(`    extra_body=${python(extra, 4)},\n`);
    const secret = key.get() ? 'os.environ["LATIMER_KEY"]' : '"unused"';
    return [
      ...(key.get() ? ["import os", ""] : []),
      "from openai import OpenAI", "",
      `client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${secret})`,
      `reply = client.${path.replace("/", ".")}.create(\n${rows.join("")})`,
      ...(body.stream ? ["for chunk in reply:", "    print(chunk)"] : ["print(reply)"]), "",
    ].join("\n");
  },
  javascript: ({ path, body }) =>
    [
      `const response = await fetch(${JSON.stringify(address(path))}, {`,
      `  method: "POST",`,
      `  headers: { "content-type": "application/json"${key.get() ? ", authorization: `Bearer ${process.env.LATIMER_KEY}`" : ""} },`,
      `  body: JSON.stringify(${JSON.stringify(body, null, 2).replace(/\n/g, "\n  ")}),`,
      "});",
      ...(body.stream
        ? ["for await (const part of response.body.pipeThrough(new TextDecoderStream())) console.log(part);"]
        : ["console.log(await response.json());"]),
    ].join("\n"),
};

/** Return a request in one of three languages. The key is never part of it. */
export const written = (language, request) => WRITERS[language](request);

/** Note a request; returns what its stream tells: the headers, and the raw text. */
export function note(path, body) {
  last = { path, body };
  raw = "";
  draw();
  return {
    head: (headers) => (last.id = headers.get("x-request-id")),
    raw: (part) => {
      if (raw.length < MOST) raw += part;
    },
  };
}

export function draw() {
  $("code").textContent = last ? written($("language").value, last) : "No request has been sent yet.";
  $("raw").textContent = visible(raw);
  $("request-id").textContent = last?.id ?? "";
}

export function listen() {
  $("language").addEventListener("change", draw);
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("code").textContent);
      say("Copied.");
    } catch {
      getSelection().selectAllChildren($("code"));
      say("The text is selected; copy it with Ctrl-C.");
    }
  });
}
