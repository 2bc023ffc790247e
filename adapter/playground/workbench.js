// Chat and raw text: the transcript, its buttons, and generation.

import * as conversation from "./conversation.js";
import * as library from "./library.js";
import * as reply from "./reply.js";
import * as sampling from "./sampling.js";
import { $, button, counted, download, el, say, visible } from "./dom.js";
import { HeatMap, closePopover } from "./heatmap.js";
import { callOf, imageOf, reasoningOf } from "./message.js";
import { haveIds, joined, summary, textOf } from "./tokens.js";

let talk = conversation.create("chat");
let page = null;
let running = null;
let editing = null;
let images = [];

const isText = () => talk.mode === "text";
const ROLES = { user: "You", assistant: "Model", tool: "Tool result", prompt: "Text", completion: "Completion" };

/** Draw the whole transcript; streaming only appends to its last message. */
function draw() {
  closePopover();
  const shown = conversation.path(talk);
  $("transcript").replaceChildren(...shown.map(message));
  $("system").value = talk.system;
  $("system-field").hidden = isText();
  $("undo").disabled = Boolean(running) || !conversation.canUndo(talk);
  $("redo").disabled = Boolean(running) || !conversation.canRedo(talk);
  const last = shown.at(-1);
  $("regenerate").disabled = Boolean(running) || !["assistant", "completion"].includes(last?.role);
  $("continue").disabled = $("regenerate").disabled || Boolean(last.calls?.length);
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  const [call] = conversation.pendingCalls(talk);
  $("composer-label").textContent = visible(
    call ? `Result of ${call[call.type].name}` : isText() ? "Text to complete" : "Message",
  );
  $("send").textContent = isText() ? "Complete" : call ? "Send result" : "Send";
  $("attach").hidden = isText() || !page.seesImages();
  $("thumbnails").replaceChildren(...images.map((url) => el("img", { src: url, alt: "image to send" })));
}

function message(node) {
  const article = el(`article.${node.role}`, { "data-id": node.id, "aria-label": ROLES[node.role] ?? node.role });
  const versions = conversation.versions(talk, node);
  const place = versions.indexOf(node);
  const step = (by) => () => {
    conversation.showVersion(talk, versions[place + by]);
    changed();
  };
  article.append(
    el("header", {},
      el("b", {}, ROLES[node.role] ?? visible(node.role)),
      versions.length > 1 && el("span.versions", {},
        button("‹", step(-1), { title: "Previous version", disabled: place === 0 || Boolean(running) }),
        ` ${place + 1}/${versions.length} `,
        button("›", step(1), { title: "Next version", disabled: place === versions.length - 1 || Boolean(running) })),
      el("span.actions", {},
        button("Copy", () => navigator.clipboard?.writeText(node.content).then(() => say("Copied."))),
        node.role !== "tool" && button("Edit", () => edit(node), { disabled: Boolean(running) }))),
  );
  if (node.id === editing) article.append(editor(node));
  else article.append(...content(node));
  return article;
}

function content(node) {
  const parts = [];
  if (node.reasoning !== undefined) parts.push(reasoningOf(node.reasoning));
  if (node.tokens?.length) {
    const map = new HeatMap((index, other) => choose(node, index, other), "Tokens of the reply");
    map.note = haveIds(node.tokens)
      ? "Choose a token: the reply goes on from exactly these token ids."
      : "Choose a token: the reply goes on from this text. The model may split the text into other tokens.";
    map.add(node.tokens);
    parts.push(map.node);
    node.map = new WeakRef(map);
    Object.defineProperty(node, "map", { enumerable: false });
    // Control tokens, and what a stop sequence cut off, are in one of the two only.
    if (textOf(joined(node.tokens)) !== node.content && node.tokens.length && !node.isPartial) {
      parts.push(el("details", {}, el("summary", {}, "Text as the API returned it"), el("pre.plain", {}, visible(node.content))));
    }
  } else if (node.content) {
    parts.push(el("pre.plain", {}, visible(node.content)));
  }
  parts.push(...(node.images ?? []).map(imageOf), ...(node.calls ?? []).map(callOf));
  if (node.error) parts.push(el("p.error", { role: "alert" }, visible(node.error)));
  if (node.times) parts.push(footer(node));
  return parts;
}

function footer(node) {
  const { first, seconds, count, prompt } = node.times;
  const { mean, perplexity } = summary(node.tokens ?? []);
  const facts = [
    prompt === null ? null : counted(prompt, "prompt token"),
    counted(count, "token"),
    mean === null ? null : `mean logprob ${mean.toFixed(3)}, perplexity ${perplexity.toFixed(2)}`,
    first === null ? null : `first token after ${first.toFixed(2)} s`,
    count > 1 ? `${(count / seconds).toFixed(1)} tokens/s` : null,
    node.finish ? `finish: ${node.finish}` : null,
    node.exact === undefined ? null : node.exact ? "continued from exact token ids" : "continued from text",
    node.unbound ? "not bound to the JSON schema" : null,
  ];
  return el("footer", {}, visible(facts.filter(Boolean).join(" · ")));
}

function editor(node) {
  const area = el("textarea", { rows: 4, "aria-label": "Edit the message" });
  area.value = node.content;
  const close = () => {
    editing = null;
    draw();
  };
  const accept = () => {
    editing = null;
    const { role, images: own, call } = node;
    const added = conversation.add(talk, node.parent, { role, content: area.value, images: own, call });
    changed();
    if (role === "user" || role === "prompt") generate(added);
  };
  const isReply = ["assistant", "completion"].includes(node.role);
  setTimeout(() => area.focus());
  return el("div.editor", {}, area,
    button(isReply ? "Keep" : "Send", accept, { className: "primary" }), button("Cancel", close));
}

function edit(node) {
  editing = node.id;
  draw();
}

/** Keep a conversation, which may have been left, and draw the shown one again. */
async function changed(own = talk) {
  draw();
  await library.save(own);
  await listConversations();
}

/** Generate a reply after a node; `kept` are the tokens that it begins with. */
async function generate(parent, kept = []) {
  if (running) return;
  const own = talk;
  const role = isText() ? "completion" : "assistant";
  let made;
  try {
    if (isText()) {
      made = await reply.textRequest(page.model(), textBefore(parent), kept);
    } else {
      made = reply.chatRequest(page.model(), talk, parent?.id ?? null, kept);
    }
  } catch (error) {
    say(error.message, true);
    return;
  }
  // Another conversation was opened meanwhile, or another reply has begun.
  if (running || own !== talk) return;
  const begins = kept.length ? (textOf(joined(kept)) ?? new TextDecoder().decode(Uint8Array.from(joined(kept)))) : "";
  const tokens = sampling.wantsTokens() ? [...kept] : [];
  const node = conversation.add(talk, parent?.id ?? null, { role, content: begins, tokens });
  if (kept.length) {
    node.exact = haveIds(kept);
    node.unbound = Boolean(sampling.parameters(talk.mode).response_format);
  }
  const error = await receive(own, node, made);
  if (error?.param !== "reply_token_ids" || textOf(joined(kept)) === null) return;
  // The engine takes text only here, and would split it into other tokens.
  Object.assign(node, { exact: false, content: begins, error: undefined });
  await receive(own, node, reply.chatRequest(page.model(), own, parent?.id ?? null, kept.map((token) => ({ ...token, id: null }))));
}

/** Send a request of a conversation, and show its reply as it comes; returns the error of one that failed. */
async function receive(own, node, made) {
  let failed = null;
  running = new AbortController();
  node.isPartial = true;
  draw();
  const article = document.querySelector(`article[data-id="${node.id}"]`);
  say("The model generates …");
  let plain = null;
  const shown = ({ content: text, tokens, reasoning, calls }) => {
    const map = node.map?.deref();
    if (tokens.length && map) map.add(tokens);
    else if (tokens.length || reasoning || calls) article.replaceChildren(article.firstChild, ...content(node));
    else if (text && plain?.isConnected) plain.append(visible(text));
    else if (text) article.append((plain = el("pre.plain", {}, visible(text))));
    const reasons = article.querySelector("details.reasoning");
    if (reasoning && reasons) reasons.open = !node.content;
  };
  try {
    await reply.run(made, node, running.signal, shown);
    say(node.finish === "stopped" ? "Stopped." : "The reply is complete.");
  } catch (error) {
    failed = error;
    node.error = error.id ? `${error.message} (${error.id})` : error.message;
    page.failed(error);
    say(error.message, true);
  }
  running = null;
  delete node.isPartial;
  await changed(own);
  return failed;
}

/** Return the text before a completion: a prompt, and completions that were continued. */
function textBefore(parent) {
  const shown = conversation.path({ ...talk, leaf: parent.id });
  return shown.map((node) => node.content).join("");
}

/** Go on with another token instead of the one at `index`, in a new version of the reply. */
function choose(node, index, other) {
  if (running) {
    running.abort();
    setTimeout(() => choose(node, index, other), 50);
    return;
  }
  const kept = node.tokens.slice(0, index);
  const replaced = node.tokens[index];
  kept.push({ ...other, top: replaced.top, chosen: true });
  if (!haveIds(kept) && textOf(joined(kept)) === null) {
    say("This token ends inside a character, so no text can begin with it.", true);
    return;
  }
  generate(node.parent ? talk.nodes[node.parent] : null, kept);
}

function send() {
  const area = $("composer");
  const text = area.value;
  const [call] = conversation.pendingCalls(talk);
  if (!text && !images.length && !call && !isText()) return;
  try {
    sampling.parameters(talk.mode);
  } catch (error) {
    // The message stays in its field.
    say(error.message, true);
    return;
  }
  area.value = "";
  if (call) {
    const node = conversation.add(talk, talk.leaf, { role: "tool", content: text, call: call.id });
    if (conversation.pendingCalls(talk).length) changed();
    else generate(node);
    return;
  }
  const own = images;
  images = [];
  generate(conversation.add(talk, talk.leaf, { role: isText() ? "prompt" : "user", content: text, images: own }));
}

function regenerate() {
  const node = talk.nodes[talk.leaf];
  generate(node.parent ? talk.nodes[node.parent] : null);
}

/** Go on after the last token of the reply, for example after the limit of tokens. */
function goOn() {
  const node = talk.nodes[talk.leaf];
  const kept = [...(node.tokens ?? [])];
  while (kept.at(-1)?.bytes === null) kept.pop();
  if (kept.length) generate(talk.nodes[node.parent] ?? null, kept);
  else say("Only a reply with token probabilities can be continued.", true);
}

async function attach(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const url = await new Promise((resolve) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.readAsDataURL(file);
    });
    images.push(url);
  }
  draw();
}

async function listConversations() {
  const all = await library.list();
  const open = (one) => () => {
    if (running) running.abort();
    editing = null;
    talk = one;
    $("mode").value = talk.mode;
    page.allowed();
    draw();
  };
  $("conversations").replaceChildren(...all.map((one) =>
    el("li", {},
      button(visible(one.title || "Empty"), open(one), { className: one.id === talk.id ? "current" : "", title: one.mode }),
      button("×", async () => {
        await library.remove(one.id);
        if (one.id === talk.id) begin(talk.mode);
        await listConversations();
      }, { title: "Delete this conversation from the browser" }))));
}

/** Begin an empty conversation. */
export function begin(mode) {
  if (running) running.abort();
  talk = conversation.create(mode);
  editing = null;
  images = [];
  page.allowed();
  draw();
}

export const mode = () => talk.mode;
export const isRunning = () => Boolean(running);
export const redraw = () => draw();

async function take(file) {
  try {
    talk = conversation.imported(JSON.parse(await file.text()));
    $("mode").value = talk.mode;
    page.allowed();
    await changed();
    say("Imported.");
  } catch (error) {
    say(`The file cannot be imported. ${error.message}`, true);
  }
}

/** Connect the buttons. `host` tells the model: `model()`, `seesImages()`, `allowed()`, `failed(error)`. */
export function listen(host) {
  page = host;
  $("mode").addEventListener("change", () => begin($("mode").value));
  $("new").addEventListener("click", () => begin(talk.mode));
  $("send").addEventListener("click", send);
  $("stop").addEventListener("click", () => running?.abort());
  $("regenerate").addEventListener("click", regenerate);
  $("continue").addEventListener("click", goOn);
  for (const [id, act] of [["undo", conversation.undo], ["redo", conversation.redo]]) {
    $(id).addEventListener("click", () => {
      act(talk);
      changed();
    });
  }
  $("composer").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && (!isText() || event.ctrlKey)) {
      event.preventDefault();
      if (!running) send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && $("popover").hidden) running.abort();
    const inText = event.target.closest?.("textarea, input");
    if ((event.ctrlKey || event.metaKey) && event.key === "z" && !inText && !running) {
      event.preventDefault();
      const [can, act] = event.shiftKey ? [conversation.canRedo, conversation.redo] : [conversation.canUndo, conversation.undo];
      if (can(talk)) {
        say("");
        act(talk);
        changed();
      }
    }
  });
  $("system").addEventListener("change", () => {
    talk.system = $("system").value;
    library.save(talk);
  });
  $("image").addEventListener("change", async () => {
    await attach($("image").files);
    $("image").value = "";
  });
  $("export").addEventListener("click", () => download("conversation.json", conversation.exported(talk)));
  $("import").addEventListener("change", async () => {
    await take($("import").files[0]);
    $("import").value = "";
  });
  draw();
  return listConversations();
}
