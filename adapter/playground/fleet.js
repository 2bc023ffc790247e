// The server's metrics, live: a table of models and engines, and charts of the last minutes.

import * as api from "./api.js";
import { $, el, visible } from "./dom.js";

const SECONDS = 2;
// The numbers of a chart: three minutes.
const MOST = 90;
let timer = 0;
let before = null;
// The numbers of each model on an engine.
const past = new Map();

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \S+)?$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return the samples of Prometheus' text format: name without its prefix, labels, value. */
export function parsed(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : line.match(LINE);
    if (!match || !/^(latimer_|vllm:)/.test(match[1])) continue;
    const labels = Object.fromEntries(
      [...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one))]),
    );
    found.push({ name: match[1].replace(/^(latimer_|vllm:)/, ""), labels, value: Number(match[3]) });
  }
  return found;
}

/** Return the scraped numbers of each model on an engine; rates come from two scrapes. */
export function read(text, at) {
  const rows = new Map();
  const waiting = new Map();
  const counts = new Map();
  const rowOf = ({ model_name: model = "", engine = "" }) => {
    const key = JSON.stringify([model, engine]);
    if (!rows.has(key)) rows.set(key, { key, model, engine, state: "ready", running: 0, cache: null, buckets: {} });
    return rows.get(key);
  };
  const FIELDS = { num_requests_running: "running", kv_cache_usage_perc: "cache", prompt_tokens_total: "prompt", generation_tokens_total: "generated" };
  for (const { name, labels, value } of parsed(text)) {
    if (name in FIELDS) rowOf(labels)[FIELDS[name]] = value;
    else if (name === "engine_state" && value) rowOf(labels).state = labels.state;
    else if (name === "num_requests_waiting") waiting.set(labels.model_name, value);
    else if (name === "requests_total") counts.set(labels.status, (counts.get(labels.status) ?? 0) + value);
    else if (/^(time_to_first_token|inter_token_latency)_seconds_bucket$/.test(name)) {
      (rowOf(labels).buckets[name] ??= []).push([labels.le === "+Inf" ? Infinity : Number(labels.le), value]);
    }
  }
  for (const row of rows.values()) row.waiting = waiting.get(row.model) ?? 0;
  return { at, rows, counts };
}

/** Return the rise of a counter for each second; a counter that fell has begun again. */
export function rate(name, row, earlier, seconds) {
  if (!earlier || row[name] === undefined) return null;
  const was = earlier[name] ?? 0;
  return (row[name] >= was ? row[name] - was : row[name]) / seconds;
}

/** Return the median of a histogram, spread evenly in a bucket; null if it is empty. */
export function median(buckets = []) {
  const sorted = [...buckets].sort(([a], [b]) => a - b);
  const total = sorted.at(-1)?.[1] ?? 0;
  let [low, below] = [0, 0];
  for (const [high, count] of total ? sorted : []) {
    if (count >= total / 2) return high === Infinity ? low : low + ((high - low) * (total / 2 - below)) / (count - below || 1);
    [low, below] = [high, count];
  }
  return null;
}

const shown = (value, digits = 0) => (value === null || value === undefined ? "–" : value.toFixed(digits));
function time(value) {
  if (value === null) return "–";
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

/** A line of the last minutes, with its highest number. */
function chart(name, values, digits) {
  const figure = $("chart").content.firstElementChild.cloneNode(true);
  const [line, dot] = [figure.querySelector("polyline"), figure.querySelector("circle")];
  const { width, height } = figure.querySelector("svg").viewBox.baseVal;
  const most = Math.max(...values, 0);
  const x = (index) => width - 3 - ((values.length - 1 - index) * width) / (MOST - 1);
  const y = (value) => height - 3 - (most ? ((height - 8) * value) / most : 0);
  line.setAttribute("points", values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  dot.setAttribute("cx", x(values.length - 1));
  dot.setAttribute("cy", y(values.at(-1)));
  const words = `${name}: now ${shown(values.at(-1), digits)}, at most ${shown(most, digits)}`;
  figure.querySelector("svg").setAttribute("aria-label", words);
  figure.querySelector("figcaption").textContent = words;
  return figure;
}

function draw(now) {
  const seconds = before ? now.at - before.at : 0;
  const lines = [];
  const charts = [];
  for (const key of [...now.rows.keys()].sort()) {
    const row = now.rows.get(key);
    const earlier = before?.rows.get(key);
    const [input, output] = ["prompt", "generated"].map((name) => rate(name, row, earlier, seconds));
    const series = past.get(key) ?? { running: [], waiting: [], output: [] };
    past.set(key, series);
    for (const [name, value] of [["running", row.running], ["waiting", row.waiting], ["output", output ?? 0]]) {
      series[name].push(value);
      if (series[name].length > MOST) series[name].shift();
    }
    const cells = [
      row.state, shown(row.running), shown(row.waiting), row.cache === null ? "–" : `${(100 * row.cache).toFixed(0)} %`,
      shown(input, 1), shown(output, 1), time(median(row.buckets.time_to_first_token_seconds_bucket)),
      time(median(row.buckets.inter_token_latency_seconds_bucket)),
    ];
    lines.push(el("tr", {},
      el("th", { scope: "row" }, visible(row.model)), el("td", {}, visible(row.engine)),
      ...cells.map((cell, index) => el(index ? "td.number" : "td", {}, cell))));
    charts.push(el("section", { "aria-label": `${visible(row.model)} on ${visible(row.engine)}` },
      el("h2", {}, `${visible(row.model)} on ${visible(row.engine)}`),
      el("div.charts", {}, chart("running", series.running, 0), chart("waiting", series.waiting, 0), chart("tokens/s", series.output, 1))));
  }
  for (const key of past.keys()) if (!now.rows.has(key)) past.delete(key);
  $("fleet-rows").replaceChildren(...lines);
  $("fleet-charts").replaceChildren(...charts);
  const counts = [...now.counts].filter(([, value]) => value).sort().map(([status, value]) => `${value} × ${status}`);
  $("fleet-requests").textContent = counts.length ? `Requests by status: ${counts.join(", ")}.` : "No requests yet.";
}

async function refresh() {
  clearTimeout(timer);
  try {
    const now = read(await api.text("../metrics"), performance.now() / 1000);
    draw(now);
    before = now;
    $("fleet-error").textContent = "";
  } catch (error) {
    $("fleet-error").textContent = visible(
      error.status === 404 ? "The server has no metrics (--no-metrics)." : error.message,
    );
  }
  if (!$("fleet").hidden) timer = setTimeout(refresh, SECONDS * 1000);
}

export const enter = refresh;
export const leave = () => clearTimeout(timer);
