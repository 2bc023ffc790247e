// A conversation as a tree of messages: nothing that was written or generated is lost.
// Pure functions, without a page. A conversation can be kept and exported as JSON.

let last = 0;
const newId = () => `${Date.now().toString(36)}${(last += 1).toString(36)}${Math.random().toString(36).slice(2, 6)}`;

/** Return an empty conversation; `mode` is `chat` or `text`. */
export const create = (mode) => ({
  id: newId(), mode, title: "", system: "", nodes: {}, leaf: null, undo: [], redo: [], changed: Date.now(),
});

/** Return the messages from the first to the shown one. */
export function path(conversation) {
  const found = [];
  for (let id = conversation.leaf; id; id = conversation.nodes[id].parent) found.unshift(conversation.nodes[id]);
  return found;
}

/** Show another message, and those before it. */
export function show(conversation, id) {
  if (id === conversation.leaf) return;
  conversation.undo.push(conversation.leaf);
  conversation.redo = [];
  conversation.leaf = id;
}

/** Add a message after another one (null for the first), and show it. */
export function add(conversation, parent, message) {
  const node = { id: newId(), parent, ...message };
  conversation.nodes[node.id] = node;
  conversation.changed = Date.now();
  if (!conversation.title && node.content) conversation.title = node.content.slice(0, 60);
  show(conversation, node.id);
  return node;
}

export const canUndo = (conversation) => conversation.undo.length > 0;
export const canRedo = (conversation) => conversation.redo.length > 0;

export function undo(conversation) {
  conversation.redo.push(conversation.leaf);
  conversation.leaf = conversation.undo.pop();
}

export function redo(conversation) {
  conversation.undo.push(conversation.leaf);
  conversation.leaf = conversation.redo.pop();
}

const childrenOf = (conversation, parent) => Object.values(conversation.nodes).filter((node) => node.parent === parent);

/** Return the other versions of a message, itself included, oldest first. */
export const versions = (conversation, node) => childrenOf(conversation, node.parent);

/** Show another version of a message, with the newest messages after it. */
export function showVersion(conversation, node) {
  let id = node.id;
  for (let next = childrenOf(conversation, id); next.length; next = childrenOf(conversation, id)) id = next.at(-1).id;
  show(conversation, id);
}

/** Return the tool calls of the last reply that have no result yet. */
export function pendingCalls(conversation) {
  const shown = path(conversation);
  const done = new Set();
  for (const node of shown.reverse()) {
    if (node.role === "tool") done.add(node.call);
    else return (node.calls ?? []).filter((call) => !done.has(call.id));
  }
  return [];
}

/** Return the messages of a chat request for the shown messages up to and with a node. */
export function messages(conversation, until) {
  const shown = path(conversation);
  const end = until === null ? 0 : shown.findIndex((node) => node.id === until) + 1;
  const found = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  for (const node of shown.slice(0, end)) {
    // A request that failed is shown, but it is not a message.
    if (node.error && !node.content && !node.calls?.length) continue;
    const message = { role: node.role, content: node.content };
    if (node.images?.length) {
      const images = node.images.map((url) => ({ type: "image_url", image_url: { url } }));
      message.content = [{ type: "text", text: node.content }, ...images];
    }
    if (node.calls?.length) {
      message.tool_calls = node.calls;
      message.content ||= null;
    }
    // The template of the model decides about it: between calls, most show it again.
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (node.role === "tool") message.tool_call_id = node.call;
    found.push(message);
  }
  return found;
}

const isText = (one) => typeof one === "string";
const isNumber = (one) => one === null || Number.isFinite(one);
const isId = (one) => Number.isInteger(one) && one >= 0;
const isOption = (one) =>
  isText(one?.text) && isNumber(one.logprob) && (one.id === null || isId(one.id)) &&
  (one.bytes === null || Array.isArray(one.bytes)) && (one.hidden ?? []).every(isId);
const isToken = (one) => isOption(one) && Array.isArray(one.top) && one.top.every(isOption);
const isCall = (one) => isText(one?.id) && isText(one[one.type]?.name);
const isTimes = (one) => ["first", "prompt"].every((name) => isNumber(one?.[name])) && one.seconds > 0 && one.count >= 0;
const ROLES = ["user", "assistant", "tool", "prompt", "completion"];

/** Return a message of a file with the fields that are known; throws an Error if one is wrong. */
function known({ id, parent = null, role, content, tokens, images = [], reasoning, calls, call, finish, exact, unbound, times }) {
  const isWrong =
    !isText(id) || !isText(content) || !ROLES.includes(role) ||
    !(tokens ?? []).every(isToken) || !(calls ?? []).every(isCall) || ![reasoning, call, finish].every((one) => one === undefined || isText(one));
  if (isWrong) throw new Error("The file has a broken message.");
  const own = images.filter((one) => isText(one) && one.startsWith("data:image/"));
  return { id, parent, role, content, tokens, images: own, reasoning, calls, call, finish, exact, unbound, times: isTimes(times) ? times : undefined };
}

/** Return a conversation from an export; throws an Error that says what is wrong with it. */
export function imported(value) {
  if (value?.format !== "latimer-conversation" || typeof value.nodes !== "object") {
    throw new Error("The file is not an exported conversation.");
  }
  if (!["chat", "text"].includes(value.mode)) throw new Error("The file has an unknown mode.");
  const conversation = { ...create(value.mode), title: String(value.title ?? ""), system: String(value.system ?? "") };
  for (const [id, node] of Object.entries(value.nodes)) {
    conversation.nodes[id] = known({ ...node, id });
  }
  for (const node of Object.values(conversation.nodes)) {
    const seen = new Set();
    for (let at = node; at.parent; at = conversation.nodes[at.parent]) {
      if (seen.has(at.id) || !conversation.nodes[at.parent]) throw new Error("The file has a message without its place.");
      seen.add(at.id);
    }
  }
  conversation.leaf = conversation.nodes[value.leaf] ? value.leaf : null;
  return conversation;
}

export const exported = ({ mode, title, system, nodes, leaf }) =>
  JSON.stringify({ format: "latimer-conversation", version: 1, mode, title, system, nodes, leaf }, null, 1);
