// One reply of the model: send the request, and collect text, tokens, reasoning and tool calls.

import * as api from "./api.js";
import * as conversation from "./conversation.js";
import * as request from "./request.js";
import * as sampling from "./sampling.js";
import { haveIds, idsOf, joined, ofChat, ofCompletion, textOf } from "./tokens.js";

/**
 * Return the path and the body of a chat request. `kept` are the tokens that the reply begins with:
 * their exact ids, or else their text as the last message.
 */
export function chatRequest(model, talk, until, kept) {
  const body = { model, messages: conversation.messages(talk, until), ...parameters("chat", kept) };
  if (kept.length && haveIds(kept)) body.reply_token_ids = idsOf(kept);
  else if (kept.length) body.messages.push({ role: "assistant", content: textOf(joined(kept)) });
  if (sampling.wantsTokens()) {
    body.logprobs = true;
    body.top_logprobs = sampling.alternatives();
    body.logprobs_token_ids = true;
  }
  return { path: "chat/completions", body: streamed(body) };
}

/** Return those of a completion of a text. After chosen tokens the prompt is the exact ids. */
export async function textRequest(model, prompt, kept) {
  const body = { model, prompt, ...parameters("text", kept) };
  if (kept.length && haveIds(kept)) {
    const { tokens } = await api.post("tokenize", { model, prompt });
    body.prompt = [...tokens, ...idsOf(kept)];
  } else if (kept.length) {
    body.prompt = prompt + textOf(joined(kept));
  }
  if (sampling.wantsTokens()) {
    body.logprobs = sampling.alternatives();
    body.logprobs_token_ids = true;
  }
  return { path: "completions", body: streamed(body) };
}

/** Return the parameters; the grammar of a schema would begin again inside a reply. */
function parameters(mode, kept) {
  const found = sampling.parameters(mode);
  if (kept.length) delete found.response_format;
  return found;
}

function streamed(body) {
  if (sampling.streams()) {
    body.stream = true;
    body.stream_options = { include_usage: true };
  }
  return body;
}

function addCalls(calls, parts) {
  for (const part of parts ?? []) {
    const call = (calls[part.index ?? calls.length] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    if (part.type) call.type = part.type;
    const kind = call.type === "custom" ? "custom" : "function";
    call[kind] ??= { name: "" };
    for (const [name, value] of Object.entries(part[kind] ?? {})) call[kind][name] = (call[kind][name] ?? "") + value;
  }
}

/**
 * Send a request and add its reply to a node. `shown(part)` is called with what is new: `tokens`,
 * `content`, `reasoning` or `calls`.
 */
export async function run({ path, body }, node, signal, shown) {
  const begun = performance.now();
  const seen = request.note(path, body);
  const isChat = path === "chat/completions";
  let first = null;
  let usage = null;
  // The reply has the text of the tokens that it begins with.
  let isWhole = Boolean(body.reply_token_ids);
  try {
    for await (const event of api.stream(path, body, { signal, seen })) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const delta = isChat ? (choice.delta ?? choice.message) : { content: choice.text };
      const tokens = isChat ? ofChat(choice.logprobs) : ofCompletion(choice.logprobs, body.logprobs);
      const content = delta.content ?? delta.refusal ?? "";
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (first === null && (content || reasoning || delta.tool_calls)) first = performance.now() - begun;
      if (isWhole) node.content = "";
      isWhole = false;
      node.content += content;
      node.tokens.push(...tokens);
      if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
      if (delta.tool_calls) addCalls((node.calls ??= []), delta.tool_calls);
      if (choice.finish_reason) node.finish = choice.finish_reason;
      shown({ content, tokens, reasoning, calls: Boolean(delta.tool_calls) });
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    node.finish = "stopped";
  } finally {
    const seconds = (performance.now() - begun) / 1000;
    const count = usage?.completion_tokens ?? node.tokens.length;
    node.times = { first: first === null ? null : first / 1000, seconds, count, prompt: usage?.prompt_tokens ?? null };
    request.draw();
  }
}
