// The server's metrics, live: engines, queues and totals.

import * as api from "./api.js";
import { $, el, visible } from "./dom.js";

const SECONDS = 2;
let timer = 0;
let before = new Map();
let since = 0;

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \S+)?$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return the samples of Prometheus' text format: name, labels, value, and the type of the name. */
export function parsed(text) {
  const types = new Map();
  const found = [];
  for (const line of text.split("\n")) {
    const type = line.match(/^# TYPE (\S+) (\S+)/);
    if (type) types.set(type[1], type[2]);
    const match = line.startsWith("#") ? null : line.match(LINE);
    if (!match) continue;
    const labels = [...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one))]);
    found.push({ name: match[1], labels, value: Number(match[3]), type: types.get(match[1]) ?? types.get(match[1].replace(/_total$/, "")) ?? "" });
  }
  return found;
}

async function refresh() {
  clearTimeout(timer);
  try {
    const text = await api.text("../metrics");
    const now = performance.now() / 1000;
    draw(parsed(text), now - since);
    since = now;
    $("fleet-error").textContent = "";
  } catch (error) {
    $("fleet-error").textContent = visible(
      error.status === 404 ? "The server has no metrics (--no-metrics)." : error.message,
    );
  }
  if (!$("fleet").hidden) timer = setTimeout(refresh, SECONDS * 1000);
}

function draw(samples, seconds) {
  const rows = samples.filter((one) => /^(latimer|vllm)[_:]/.test(one.name) && (one.type === "gauge" || one.type === "counter") && !/_created$/.test(one.name));
  const next = new Map();
  const lines = rows.map((one) => {
    const labels = one.labels.map(([name, value]) => `${name}=${value}`).join(", ");
    const key = `${one.name} ${labels}`;
    next.set(key, one.value);
    const isNew = !before.has(key);
    const rate = one.type === "counter" && !isNew ? (one.value - before.get(key)) / seconds : null;
    return el(`tr.${one.type}`, {},
      el("td", {}, visible(one.name.replace(/^(latimer|vllm)[_:]/, ""))), el("td", {}, visible(labels)),
      el("td.number", {}, Number.isInteger(one.value) ? String(one.value) : one.value.toPrecision(4)),
      el("td.number", {}, rate === null ? "" : `${rate.toFixed(1)}/s`));
  });
  before = next;
  $("fleet-rows").replaceChildren(...lines);
}

export const enter = refresh;
export const leave = () => clearTimeout(timer);
