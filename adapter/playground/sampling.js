// The form of a request's parameters. An empty field is left out of the request.

import { $, el } from "./dom.js";

const number = (text) => (text === "" ? undefined : Number(text));
const json = (text, name) => {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
};
const lines = (text) => (text === "" ? undefined : text.split("\n").filter(Boolean).map((one) => one.replace(/\\n/g, "\n")));

// Name, label, kind and attributes, and the parameter that the model must support.
const FIELDS = [
  ["temperature", "Temperature", "number", { min: 0, max: 2, step: 0.05, placeholder: "1" }],
  ["top_p", "Top p", "number", { min: 0, max: 1, step: 0.01, placeholder: "1" }],
  ["top_k", "Top k", "number", { min: 0, step: 1, placeholder: "off" }],
  ["min_p", "Min p", "number", { min: 0, max: 1, step: 0.01, placeholder: "0" }],
  ["max_tokens", "Max tokens", "number", { min: 1, step: 1, placeholder: "model's limit" }],
  ["seed", "Seed", "number", { step: 1, placeholder: "random" }],
  ["presence_penalty", "Presence penalty", "number", { min: -2, max: 2, step: 0.1, placeholder: "0" }],
  ["frequency_penalty", "Frequency penalty", "number", { min: -2, max: 2, step: 0.1, placeholder: "0" }],
  ["stop", "Stop sequences, one a line", "lines", {}],
  ["response_format", "JSON schema of the answer", "schema", { placeholder: '{"type": "object", …}' }],
  ["tools", "Tools (JSON array)", "json", { placeholder: '[{"type": "function", "function": {…}}]' }, "chat"],
  ["reasoning_effort", "Reasoning effort", "choice", { of: ["", "none", "low", "medium", "high"] }, "chat"],
  ["store", "Store the completion on the server", "check", {}, "chat"],
  ["metadata", "Metadata (JSON), if stored", "json", { placeholder: '{"project": "…"}' }, "chat"],
];
const READ = {
  number: (node) => number(node.value),
  lines: (node) => lines(node.value),
  json: (node, label) => json(node.value, label),
  choice: (node) => node.value || undefined,
  check: (node) => node.checked || undefined,
  schema(node, label) {
    const schema = json(node.value, label);
    return schema && { type: "json_schema", json_schema: { name: "answer", schema } };
  },
};

/** Fill the form. */
export function build() {
  for (const [name, label, kind, attributes] of FIELDS) {
    const id = `p-${name}`;
    let node;
    if (kind === "choice") node = el("select", { id }, ...attributes.of.map((one) => el("option", { value: one }, one || "default")));
    else if (kind === "check") node = el("input", { id, type: "checkbox" });
    else if (kind === "number") node = el("input", { id, type: "number", inputMode: "decimal", ...attributes });
    else node = el("textarea", { id, rows: 2, spellcheck: false, ...attributes });
    $("parameters").append(el(`label.field.${kind}`, { htmlFor: id }, el("span", {}, label), node));
  }
}

/** Disable what the model does not support, or what the mode has not. */
export function allow(model, mode) {
  const supported = model?.supported_parameters;
  for (const [name, , , , only] of FIELDS) {
    const node = $(`p-${name}`);
    node.closest("label").hidden = Boolean(only) && only !== mode;
    const isKnown = !["store", "metadata"].includes(name);
    node.disabled = Boolean(supported && isKnown && !supported.includes(name));
    node.title = node.disabled ? "The model does not support it." : "";
  }
}

/** Return the parameters for a request; throws an Error that names a wrong field. */
export function parameters(mode) {
  const found = {};
  for (const [name, label, kind, , only] of FIELDS) {
    const node = $(`p-${name}`);
    if (node.disabled || (only && only !== mode)) continue;
    const value = READ[kind](node, label);
    if (value !== undefined) found[name] = value;
  }
  if (!found.store) delete found.metadata;
  return found;
}

export const alternatives = () => Math.min(20, Math.max(0, Number($("alternatives").value) || 0));
export const wantsTokens = () => $("probabilities").checked;
export const streams = () => $("streams").checked;
