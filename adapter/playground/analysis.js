// The model's own log-probabilities of a text, one or two side by side.

import * as api from "./api.js";
import * as request from "./request.js";
import * as sampling from "./sampling.js";
import { $, el, say, visible } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { ofCompletion, summary } from "./tokens.js";

let running = null;

async function score(model, text, signal) {
  const count = sampling.alternatives();
  const body = { model, prompt: text, echo: true, max_tokens: 0, logprobs: count, logprobs_token_ids: true };
  const seen = request.note("completions", body);
  let reply = null;
  for await (const event of api.stream("completions", body, { signal, seen })) reply = event;
  request.draw();
  return ofCompletion(reply.choices[0].logprobs, count);
}

function result(tokens, text, model) {
  const { scored, mean, perplexity, bits } = summary(tokens);
  const map = new HeatMap(null, "Tokens of the text");
  map.add(tokens);
  const size = new TextEncoder().encode(text).length;
  const rows = [
    ["Tokens", String(tokens.length)],
    ["Perplexity", perplexity === null ? "–" : perplexity.toFixed(3)],
    ["Mean logprob", mean === null ? "–" : mean.toFixed(4)],
    ["Total", scored ? `${bits.toFixed(1)} bits` : "–"],
    ["Bits per byte", scored && size ? (bits / size).toFixed(3) : "–"],
  ];
  const table = el("table", {}, ...rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))));
  table.prepend(el("caption", {}, visible(model)));
  return [table, map.node];
}

async function analyse(model) {
  running?.abort();
  const own = (running = new AbortController());
  $("analyse").disabled = true;
  say("The model reads the text …");
  const other = $("model-b").value || model;
  const sides = [["a", model, $("text-a").value], ["b", other, $("text-b").value || (other === model ? "" : $("text-a").value)]];
  for (const [side, by, text] of sides) {
    const place = $(`scores-${side}`);
    place.replaceChildren();
    if (!text) continue;
    try {
      place.replaceChildren(...result(await score(by, text, own.signal), text, by));
      say("The analysis is complete.");
    } catch (error) {
      if (error.name !== "AbortError") place.replaceChildren(el("p.error", { role: "alert" }, visible(error.message)));
      say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
    }
  }
  $("analyse").disabled = false;
}

export function listen(page) {
  $("analyse").addEventListener("click", () => analyse(page.model()));
  $("analyse-stop").addEventListener("click", () => running?.abort());
}
