// The chat completions and responses that the server stores: list, open, delete, export.

import * as api from "./api.js";
import { $, button, counted, download, el, say, visible } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { callOf, imageOf, reasoningOf } from "./message.js";
import { ofChat } from "./tokens.js";

const PAGE = 20;
// The objects of the list, by id; those that are ticked; the place in the list that More continues.
const listed = new Map();
const ticked = new Set();
let place = { after: null };

// What differs between the two kinds of objects.
const KINDS = {
  "chat/completions": {
    noun: "completion",
    created: (one) => one.created,
    text: (one) => one.choices[0]?.message.content,
    input: async (name) => (await all(`chat/completions/${name}/messages`)).map(withParts),
    replies: (one) => one.choices.map(({ message, logprobs }) => ({ ...message, tokens: ofChat(logprobs) })),
  },
  responses: {
    noun: "response",
    created: (one) => one.created_at,
    text: (one) => one.output.flatMap((item) => item.content ?? []).find((part) => part.type === "output_text")?.text,
    input: async (name) => (await all(`responses/${name}/input_items`)).map(messageOf),
    replies: (one) => one.output.map(messageOf),
  },
};

const kind = () => KINDS[$("stored-kind").value];
const path = (name) => `${$("stored-kind").value}/${encodeURIComponent(name)}`;

/** Return all elements of a list. */
async function all(address) {
  const found = [];
  for (let last = null; ; ) {
    const page = await api.get(`${address}?limit=100&order=asc${last ? `&after=${encodeURIComponent(last)}` : ""}`);
    found.push(...page.data);
    if (!page.has_more) return found;
    last = page.last_id;
  }
}

/** Return a listed message as it was sent: with its parts, and without the keys of the list. */
const withParts = ({ id: _id, content_parts: parts, name, content, ...rest }) => ({ ...rest, ...(name && { name }), content: parts ?? content });

/** Return an item of a response as a message of chat, with the tokens of its text. */
function messageOf(item) {
  if (["function_call", "custom_tool_call"].includes(item.type)) {
    const type = item.type === "function_call" ? "function" : "custom";
    const own = type === "function" ? { arguments: item.arguments } : { input: item.input };
    return { role: "assistant", content: null, tool_calls: [{ id: item.call_id, type, [type]: { name: item.name, ...own } }] };
  }
  if (/_call_output$/.test(item.type)) {
    return { role: "tool", tool_call_id: item.call_id, content: typeof item.output === "string" ? item.output : JSON.stringify(item.output) };
  }
  if (item.type === "reasoning") {
    return { role: "assistant", content: null, reasoning_content: (item.content ?? item.summary ?? []).map((part) => part.text).join("\n") };
  }
  if (!Array.isArray(item.content)) return { role: item.role ?? "assistant", content: item.content ?? JSON.stringify(item) };
  const parts = item.content.map((part) => {
    if (part.type === "input_image") return { type: "image_url", image_url: { url: part.image_url ?? "" } };
    return { type: "text", text: part.text ?? part.refusal ?? JSON.stringify(part) };
  });
  const isText = parts.every((part) => part.type === "text");
  const tokens = ofChat({ content: item.content.flatMap((part) => part.logprobs ?? []) });
  return { role: item.role, content: isText ? parts.map((part) => part.text).join("") : parts, tokens };
}

const day = (id, add = 0) => {
  const [year, month, date] = $(id).value.split("-").map(Number);
  return $(id).value ? new Date(year, month - 1, date + add).getTime() / 1000 : null;
};

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

/** Return up to `count` objects after a place. The API's lists have no dates, so they are compared here. */
async function next(count, at) {
  const [from, until] = [day("stored-from"), day("stored-until", 1)];
  const asked = query(Math.min(count, 100));
  const found = [];
  for (;;) {
    if (at.after) asked.set("after", at.after);
    const { data, has_more: more } = await api.get(`${$("stored-kind").value}?${asked}`);
    for (const one of data) {
      const created = kind().created(one);
      // The newest come first.
      if (from !== null && created < from) return { found, more: false };
      at.after = one.id;
      if (until === null || created < until) found.push(one);
      if (found.length === count) return { found, more: more || one !== data.at(-1) };
    }
    if (!more) return { found, more: false };
  }
}

async function list(more = false) {
  // A second click would list the same page again.
  $("stored-more").hidden = true;
  if (!more) {
    place = { after: null };
    listed.clear();
    ticked.clear();
    $("stored-list").replaceChildren();
  }
  const own = place;
  let page;
  try {
    page = await next(PAGE, own);
  } catch (error) {
    if (own === place) $("stored-more").hidden = !more;
    throw error;
  }
  // Another list has begun meanwhile.
  if (own !== place) return;
  for (const one of page.found) listed.set(one.id, one);
  $("stored-list").append(...page.found.map(row));
  $("stored-more").hidden = !page.more;
  count();
  say(`${counted(listed.size, kind().noun)}${page.more ? ", and more" : ""}.`);
}

/** Show how many are ticked: the buttons are for those, or else for all that match. */
function count() {
  const noun = kind().noun;
  $("stored-count").textContent = ticked.size ? `${counted(ticked.size, noun)} selected` : "none selected: export takes all that match";
  $("stored-delete").disabled = !ticked.size;
  $("stored-all").checked = listed.size > 0 && ticked.size === listed.size;
}

function tick(box, name) {
  if (box.checked) ticked.add(name);
  else ticked.delete(name);
  count();
}

function row(one) {
  const text = kind().text(one) ?? "(no text)";
  const labels = Object.entries(one.metadata ?? {}).map(([name, value]) => `${name}=${value}`).join(", ");
  const box = el("input", { type: "checkbox", "aria-label": `Select ${one.id}`, onchange: () => tick(box, one.id) });
  return el("li", { "data-id": one.id }, box,
    el("time", {}, new Date(kind().created(one) * 1000).toLocaleString()),
    el("b", {}, visible(one.model)),
    el("span.text", {}, visible(text.slice(0, 200))),
    el("i", {}, visible(labels)),
    button("Open", () => guarded(() => open(one.id))),
    button("Delete", () => guarded(() => remove([one.id]))));
}

async function remove(names) {
  for (const name of names) {
    await api.remove(path(name));
    listed.delete(name);
    ticked.delete(name);
    document.querySelector(`#stored-list li[data-id="${CSS.escape(name)}"]`)?.remove();
    if ($("stored-open").dataset.id === name) $("stored-open").replaceChildren();
  }
  count();
  say(`${counted(names.length, kind().noun)} deleted.`);
}

/** Show a message, with the log-probabilities of its tokens if it has them. */
function shown(message) {
  const { role, content, tokens, reasoning_content: thought, reasoning = thought, tool_calls: calls, tool_call_id: call } = message;
  const article = el(`article.${/^\w+$/.test(role) ? role : "other"}`, {}, el("header", {}, el("b", {}, visible(role)), call && el("i", {}, visible(call))));
  if (reasoning) article.append(reasoningOf(reasoning));
  if (tokens?.length) {
    const map = new HeatMap(null, "Tokens of the reply");
    map.add(tokens);
    article.append(map.node);
  } else {
    for (const part of typeof content === "string" ? [{ type: "text", text: content }] : (content ?? [])) {
      const url = part.image_url?.url;
      article.append(url ? imageOf(url) : el("pre.plain", {}, visible(part.text ?? JSON.stringify(part))));
    }
  }
  article.append(...(calls ?? []).map(callOf));
  return article;
}

async function open(name) {
  const one = await api.get(path(name));
  const input = await kind().input(encodeURIComponent(name));
  const facts = [
    ["Model", one.model], ["Created", new Date(kind().created(one) * 1000).toLocaleString()],
    ["Metadata", Object.entries(one.metadata ?? {}).map(([key, value]) => `${key}=${value}`).join(", ") || "–"],
    ["Usage", one.usage ? `${counted(one.usage.prompt_tokens ?? one.usage.input_tokens, "prompt token")}, ${counted(one.usage.completion_tokens ?? one.usage.output_tokens, "token")}` : "–"],
    ["Temperature", String(one.temperature ?? "–")],
  ];
  $("stored-open").dataset.id = name;
  $("stored-open").replaceChildren(
    el("h2", {}, visible(one.id)),
    el("table", {}, ...facts.map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, visible(value))))),
    el("h3", {}, "Messages"), ...input.map(shown),
    el("h3", {}, "Reply"), ...kind().replies(one).map(shown),
    el("details", {}, el("summary", {}, "Object"), el("pre", {}, visible(JSON.stringify(one, null, 2)))),
  );
  $("stored-open").scrollIntoView({ block: "start" });
}

/** Return the lines of an object: an example in OpenAI's format for fine-tuning for each reply, or itself. */
async function lines(one) {
  if ($("stored-format").value === "objects") return [JSON.stringify(one)];
  const input = await kind().input(encodeURIComponent(one.id));
  const tools = one.tools?.length && $("stored-kind").value !== "responses" ? { tools: one.tools } : {};
  const kept = ({ role, content = null, name, tool_calls: calls, tool_call_id: call }) => ({
    role, content, ...(name && { name }), ...(calls && { tool_calls: calls }), ...(call && { tool_call_id: call }),
  });
  const replies = kind().replies(one).filter((reply) => reply.content || reply.tool_calls);
  // The items of a response follow each other; the choices of a completion are alternatives.
  const endings = $("stored-kind").value === "responses" ? [replies] : replies.map((reply) => [reply]);
  const isMessage = (reply) => reply.content || reply.tool_calls;
  return endings.filter((ending) => ending.length).map((ending) =>
    JSON.stringify({ messages: [...input.filter(isMessage), ...ending].map(kept), ...tools }));
}

async function exported() {
  let chosen = [...ticked].map((name) => listed.get(name));
  if (!chosen.length) {
    const at = { after: null };
    for (let more = true; more; ) {
      const page = await next(100, at);
      chosen.push(...page.found);
      more = page.more;
      say(`${counted(chosen.length, kind().noun)} …`);
    }
  }
  const found = [];
  for (const one of chosen) found.push(...(await lines(one)));
  download(`${kind().noun}s.jsonl`, found.map((line) => `${line}\n`).join(""), "application/jsonl");
  say(`${counted(chosen.length, kind().noun)} exported.`);
}

export function listen() {
  $("stored-refresh").addEventListener("click", () => guarded(list));
  for (const id of ["stored-kind", "stored-from", "stored-until", "stored-model"]) $(id).addEventListener("change", () => guarded(list));
  $("stored-more").addEventListener("click", () => guarded(() => list(true)));
  $("stored-export").addEventListener("click", () => guarded(exported));
  $("stored-delete").addEventListener("click", () => guarded(() => remove([...ticked])));
  $("stored-all").addEventListener("change", () => {
    const { checked } = $("stored-all");
    for (const box of document.querySelectorAll("#stored-list input")) {
      box.checked = checked;
      tick(box, box.closest("li").dataset.id);
    }
  });
}

export const enter = () => guarded(list);
