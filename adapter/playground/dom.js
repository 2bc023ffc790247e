// DOM nodes. All text is set by textContent, so no text can become markup.

// Characters that would hide, or change the direction of, their neighbours. Joiners of emoji stay.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;

/** Return a text with control characters and direction marks spelled out. */
export function visible(text) {
  return text.replace(HIDDEN, (one) => `‹U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
}

/** Return a text with whitespace spelled out, too, for lists of tokens. */
export function spelled(text) {
  return visible(text).replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥");
}

/** Make an element: `el("a.b.c", {title: "…", onclick: f}, "text", node)`. */
export function el(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && !key.startsWith("aria") && typeof node[key] !== "object") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const $ = (id) => document.getElementById(id);

export function button(label, onclick, properties = {}) {
  return el("button", { type: "button", onclick, ...properties }, label);
}

/** Give a text to the user as a file. */
export function download(name, text, type = "application/json") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Say something to the user, and to a screen reader; what is said of an action ends with the next one. */
export function say(text, isError = false) {
  const line = $("status");
  line.textContent = visible(text);
  line.classList.toggle("error", isError);
}

/** Return a number with its noun. */
export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
