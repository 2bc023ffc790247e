// The chat completions that the server stores, and responses by their ids.

import * as api from "./api.js";
import { $, button, download, el, say, visible } from "./dom.js";

let after = null;

function query(limit) {
  const found = new URLSearchParams({ limit: String(limit), order: "desc" });
  if ($("stored-model").value) found.set("model", $("stored-model").value);
  for (const pair of $("stored-metadata").value.split(",")) {
    const [name, ...value] = pair.split("=");
    if (name.trim()) found.set(`metadata[${name.trim()}]`, value.join("=").trim());
  }
  return found;
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    say(error.message, true);
  }
}

async function list(more = false) {
  const asked = query(20);
  if (more && after) asked.set("after", after);
  const page = await api.get(`chat/completions?${asked}`);
  const rows = page.data.map(row);
  if (more) $("stored-list").append(...rows);
  else $("stored-list").replaceChildren(...rows);
  after = page.last_id;
  $("stored-more").hidden = !page.has_more;
  say(`${$("stored-list").children.length} completions${page.has_more ? ", and more" : ""}.`);
}

function row(one) {
  const text = one.choices[0]?.message.content ?? "(no text)";
  const labels = Object.entries(one.metadata ?? {}).map(([name, value]) => `${name}=${value}`).join(", ");
  const item = el("li", { "data-id": one.id });
  item.append(
    el("time", {}, new Date(one.created * 1000).toLocaleString()),
    el("b", {}, visible(one.model)),
    el("span.text", {}, visible(text.slice(0, 200))),
    el("i", {}, visible(labels)),
    button("Open", () => guarded(() => open(`chat/completions/${encodeURIComponent(one.id)}`))),
    button("Delete", () => guarded(async () => {
      await api.remove(`chat/completions/${encodeURIComponent(one.id)}`);
      item.remove();
      say("Deleted.");
    })),
  );
  return item;
}

async function open(path) {
  const found = await api.get(path);
  const inputs = path.startsWith("responses") ? `${path}/input_items` : `${path}/messages`;
  const input = await api.get(inputs);
  $("stored-open").replaceChildren(
    el("h3", {}, visible(found.id)),
    el("h4", {}, "Input"), el("pre", {}, visible(JSON.stringify(input.data, null, 2))),
    el("h4", {}, "Object"), el("pre", {}, visible(JSON.stringify(found, null, 2))),
  );
}

async function exported() {
  const asked = query(100);
  const lines = [];
  for (;;) {
    const page = await api.get(`chat/completions?${asked}`);
    for (const one of page.data) lines.push(JSON.stringify(one));
    if (!page.has_more) break;
    asked.set("after", page.last_id);
    say(`${lines.length} completions …`);
  }
  download("completions.jsonl", lines.join("\n") + (lines.length ? "\n" : ""), "application/jsonl");
  say(`${lines.length} completions exported.`);
}

export function listen() {
  const response = () => `responses/${encodeURIComponent($("response-id").value.trim())}`;
  $("stored-refresh").addEventListener("click", () => guarded(list));
  $("stored-more").addEventListener("click", () => guarded(() => list(true)));
  $("stored-export").addEventListener("click", () => guarded(exported));
  $("response-open").addEventListener("click", () => guarded(() => open(response())));
  $("response-delete").addEventListener("click", () => guarded(async () => {
    await api.remove(response());
    $("stored-open").replaceChildren();
    say("Deleted.");
  }));
}

export const enter = () => guarded(list);
