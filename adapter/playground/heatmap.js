// Tokens as a heat map, and one pop-over with the alternatives of a token.

import { $, el, spelled, visible } from "./dom.js";
import { Joiner, MEASURES, bits, levelOf, percent, probability, rankOf, restOf, same } from "./tokens.js";

let measure = localStorage.getItem("latimer.measure") ?? "probability";
if (!(measure in MEASURES)) measure = "probability";
// The map of each list that is in the page; the others are gone with their lists.
const maps = new WeakMap();
// Marks and joiners, which have no width of their own.
const THIN = /^[\p{M}\p{Cf}]+$/u;

export function measureSelect() {
  const select = el("select", {
    id: "measure",
    onchange: () => {
      measure = select.value;
      localStorage.setItem("latimer.measure", measure);
      for (const node of document.querySelectorAll(".tokens")) maps.get(node).recolour();
      legend();
    },
  });
  for (const [name, { name: label }] of Object.entries(MEASURES)) select.append(el("option", { value: name }, label));
  select.value = measure;
  return select;
}

export function legend() {
  const { legend: words = "" } = MEASURES[measure];
  const steps = Array.from({ length: 8 }, (_, i) => el(`i.t.h${i}`, {}, String(i)));
  $("legend").replaceChildren(...(words ? [el("span.scale", { "aria-hidden": "true" }, ...steps), " ", words] : []));
}

/** A list of tokens. `pick(index, alternative)` is called when the user chooses another token. */
export class HeatMap {
  constructor(pick = null, label = "Tokens") {
    this.tokens = [];
    this.pick = pick;
    this.node = el("div.tokens", { role: "group", "aria-label": label });
    this.joiner = new Joiner();
    this.node.addEventListener("click", (event) => this.#open(event.target, true));
    this.node.addEventListener("pointerover", (event) => event.pointerType === "mouse" && this.#open(event.target, false));
    this.node.addEventListener("focusin", (event) => this.#open(event.target, false));
    this.node.addEventListener("keydown", (event) => this.#move(event));
    maps.set(this.node, this);
  }

  /** Append tokens; those before are not touched. */
  add(tokens) {
    const added = document.createDocumentFragment();
    for (const token of tokens) {
      const text = this.joiner.add(token);
      const node = el("span.t", {}, this.#shown(token, text));
      node.tabIndex = this.tokens.length ? -1 : 0;
      node.dataset.index = this.tokens.length;
      if (token.bytes === null) node.classList.add("control");
      if (THIN.test(text)) node.classList.add("thin");
      if (token.chosen) node.classList.add("chosen");
      this.tokens.push(token);
      this.#colour(node, token);
      added.append(node);
    }
    this.node.append(added);
  }

  #shown(token, text) {
    if (token.bytes === null) return visible(token.text);
    if (!text) return "·";
    return visible(text).replace(/\n/g, "↵\n");
  }

  #colour(node, token) {
    for (const name of [...node.classList]) if (/^h\d$/.test(name)) node.classList.remove(name);
    const level = levelOf(measure, token);
    if (level !== null) node.classList.add(`h${level}`);
    const value = MEASURES[measure].of(token);
    node.setAttribute("aria-label", `${spelled(token.text)}${value === null ? "" : `, ${MEASURES[measure].show(value)}`}`);
    node.setAttribute("role", "button");
    node.setAttribute("aria-haspopup", "dialog");
  }

  recolour() {
    for (const [index, node] of [...this.node.children].entries()) this.#colour(node, this.tokens[index]);
  }

  #open(node, stays) {
    if (!(node instanceof HTMLElement) || node.dataset.index === undefined) return;
    popover.open(this, Number(node.dataset.index), node, stays);
  }

  #move(event) {
    const index = Number(event.target.dataset?.index);
    const steps = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: this.tokens.length - 1 };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#open(event.target, true);
      popover.enter();
    } else if (event.key in steps) {
      event.preventDefault();
      const next = this.node.children[steps[event.key]];
      if (!next) return;
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  }
}

/** The pop-over: it can be hovered, stays after a click, and Escape closes it. */
const popover = {
  at: null,
  stays: false,
  timer: 0,

  open(map, index, node, stays) {
    clearTimeout(this.timer);
    if (this.stays && !stays && this.at) return;
    if (this.at?.node === node && this.stays === stays) return;
    this.at?.node.classList.remove("open");
    this.at = { map, index, node };
    this.stays = stays;
    node.classList.add("open");
    this.fill(map, index);
    const box = $("popover");
    box.hidden = false;
    const place = node.getBoundingClientRect();
    const width = box.offsetWidth;
    const left = Math.max(4, Math.min(place.left, document.documentElement.clientWidth - width - 4));
    const below = place.bottom + box.offsetHeight + 8 < innerHeight || place.top < box.offsetHeight + 8;
    box.style.left = `${left + scrollX}px`;
    box.style.top = `${(below ? place.bottom + 4 : place.top - box.offsetHeight - 4) + scrollY}px`;
  },

  fill(map, index) {
    const token = map.tokens[index];
    const rank = rankOf(token);
    const head = [
      el("b.spelling", {}, spelled(token.text)),
      token.logprob === null ? " first token, without a probability" : ` ${percent(probability(token.logprob))}`,
    ];
    const facts = [
      token.logprob === null ? null : `logprob ${token.logprob.toFixed(4)}, ${bits(token.logprob).toFixed(2)} bits`,
      rank !== null ? `rank ${rank}` : token.top.length ? `not among the ${token.top.length} most likely` : null,
      token.id === null ? null : `id ${token.id}`,
      token.bytes === null ? "control token" : `bytes ${token.bytes.map((one) => one.toString(16).padStart(2, "0")).join(" ")}`,
    ];
    const rows = token.top.map((other, place) => this.row(map, index, token, other, place));
    const rest = token.top.length ? el("p.rest", {}, `rest of the vocabulary ${percent(restOf(token))}`) : null;
    $("popover").replaceChildren(
      el("p", {}, ...head),
      el("p.facts", {}, facts.filter(Boolean).join(" · ")),
      el("ol", {}, ...rows),
      ...(rest ? [rest] : []),
      ...(map.pick && rows.length ? [el("p.facts", {}, map.note ?? "Choose a token to generate from there.")] : []),
    );
  },

  row(map, index, token, other, place) {
    const meter = el("meter", { min: 0, max: 1, value: Math.exp(other.logprob), "aria-hidden": "true" });
    const isSame = same(other, token);
    const label = `${isSame ? "● " : ""}${other.text ? spelled(other.text) : "(no text)"}`;
    const parts = [
      el("span.place", {}, String(place + 1)), el("span.spelling", {}, label), meter,
      el("span.number", {}, percent(Math.exp(other.logprob))),
    ];
    const properties = { title: `logprob ${other.logprob.toFixed(4)}`, "data-text": other.text };
    if (!map.pick || isSame || other.bytes === null) return el("li", {}, el("span.row", properties, ...parts));
    const choose = () => {
      this.close();
      map.pick(index, other);
    };
    return el("li", {}, el("button.row", { type: "button", onclick: choose, ...properties }, ...parts));
  },

  enter() {
    ($("popover").querySelector("button") ?? $("popover")).focus();
  },

  close(focus = false) {
    clearTimeout(this.timer);
    const { at } = this;
    this.at = null;
    this.stays = false;
    $("popover").hidden = true;
    at?.node.classList.remove("open");
    if (focus) at?.node.focus({ preventScroll: true });
  },

  leave() {
    clearTimeout(this.timer);
    if (!this.stays) this.timer = setTimeout(() => this.close(), 300);
  },
};

export const closePopover = () => popover.close();

export function listen() {
  const box = $("popover");
  let width = innerWidth;
  addEventListener("resize", () => {
    // The keyboard of a phone changes the height only.
    if (innerWidth !== width) popover.close();
    width = innerWidth;
  });
  box.addEventListener("pointerenter", () => clearTimeout(popover.timer));
  box.addEventListener("pointerleave", () => popover.leave());
  document.addEventListener("pointerover", (event) => {
    if (!popover.at || box.contains(event.target) || event.target === popover.at.node) return;
    if (!event.target.closest?.(".tokens .t")) popover.leave();
  });
  document.addEventListener("pointerdown", (event) => {
    if (popover.at && !box.contains(event.target) && !event.target.closest?.(".tokens")) popover.close();
  });
  document.addEventListener("keydown", (event) => {
    if (!popover.at) return;
    if (event.key === "Escape") popover.close(true);
    if (!box.contains(event.target) || !["ArrowDown", "ArrowUp"].includes(event.key)) return;
    event.preventDefault();
    const all = [...box.querySelectorAll("button")];
    const next = all.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
    all[(next + all.length) % all.length]?.focus();
  });
}
