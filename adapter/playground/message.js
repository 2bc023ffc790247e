// The parts of a message that are not text: reasoning, images and tool calls.

import { el, visible } from "./dom.js";

/** Return JSON with line breaks; another text stays as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Reasoning, folded. */
export const reasoningOf = (text) =>
  el("details.reasoning", {}, el("summary", {}, "Reasoning"), el("pre", {}, visible(text)));

/** An image of a data URL; an image at another address is shown as that address. */
export const imageOf = (url) =>
  url.startsWith("data:image/") ? el("img", { src: url, alt: "image of the message" }) : el("pre.plain", {}, visible(url));

/** A call of a function or of a custom tool, as chat returns it. */
export function callOf(call) {
  const { name, arguments: given, input } = call[call.type] ?? {};
  return el("div.call", {}, el("b", {}, `Tool call ${visible(name ?? "")}`), el("pre", {}, visible(pretty(given ?? input ?? ""))));
}
