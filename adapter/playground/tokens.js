// The tokens of a reply with the model's own log-probabilities. Pure functions, without a page.

const FLOOR = -9999;
const strict = new TextDecoder("utf-8", { fatal: true });

/** Return the bytes of a token of /v1/completions: its text, or `bytes:\xNN…`. */
export function bytesOf(spelling) {
  if (/^bytes:(\\x[0-9a-f]{2})+$/.test(spelling)) {
    return spelling.slice(6).match(/[0-9a-f]{2}/g).map((one) => parseInt(one, 16));
  }
  return [...new TextEncoder().encode(spelling)];
}

/**
 * Return the tokens in the `logprobs` of a completion that asked for `count` alternatives. The API
 * adds a token to its own list, below the others; it is left out of the list then.
 */
export function ofCompletion(logprobs, count) {
  return (logprobs?.tokens ?? []).map((spelling, i) => {
    const ids = logprobs.top_token_ids?.[i] ?? {};
    const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([text, logprob]) => ({
      text, logprob, bytes: bytesOf(text), id: ids[text] ?? null,
    }));
    const token = {
      text: spelling,
      bytes: bytesOf(spelling),
      logprob: logprobs.token_logprobs[i],
      id: logprobs.token_ids?.[i] ?? null,
    };
    const listed = sorted(top);
    if (listed.length > count && same(listed.at(-1), token)) listed.pop();
    return { ...token, top: listed };
  });
}

/**
 * Return the tokens in the `logprobs` of a chat completion, or of a chunk. `hidden` are the ids of
 * the tokens before one that are not shown: reasoning, and markers.
 */
export function ofChat(logprobs) {
  const one = ({ token, logprob, bytes, id = null }) => ({ text: token, logprob, bytes, id });
  return (logprobs?.content ?? []).map((token) => ({
    ...one(token), hidden: token.hidden_token_ids ?? [], top: sorted(token.top_logprobs.map(one)),
  }));
}

export const haveIds = (tokens) => tokens.every((token) => token.id !== null);

/** Return the ids of tokens, with the hidden ones before each. */
export const idsOf = (tokens) => tokens.flatMap((token) => [...(token.hidden ?? []), token.id]);

const sorted = (top) => top.sort((a, b) => b.logprob - a.logprob);

/** Return the text of bytes, or null if they end or begin inside a character. */
export function textOf(bytes) {
  try {
    return strict.decode(Uint8Array.from(bytes));
  } catch {
    return null;
  }
}

/** Join the bytes of tokens; control tokens have none. */
export const joined = (tokens) => tokens.flatMap((token) => token.bytes ?? []);

/**
 * Decode tokens one after the other. A token that ends inside a character gets an empty text, and
 * the character is part of the token that completes it.
 */
export class Joiner {
  #decoder = new TextDecoder("utf-8");

  add(token) {
    return token.bytes === null ? "" : this.#decoder.decode(Uint8Array.from(token.bytes), { stream: true });
  }
}

export const same = (a, b) =>
  a.id !== null && b.id !== null ? a.id === b.id : a.text === b.text && String(a.bytes) === String(b.bytes);

export const probability = (logprob) => (logprob === null ? null : Math.exp(logprob));
export const bits = (logprob) => (logprob === null ? null : -logprob / Math.LN2);

/** Return the place of a token among the alternatives, from 1; null if it is not one of them. */
export function rankOf(token) {
  const index = token.top.findIndex((other) => same(other, token));
  return index < 0 || token.logprob === null ? null : index + 1;
}

/** Return the entropy of the alternatives in bits; the rest of the vocabulary counts as one. */
export function entropyOf(token) {
  if (!token.top.length) return null;
  const shown = token.top.map((other) => Math.exp(other.logprob));
  const all = [...shown, restOf(token)];
  return all.reduce((sum, p) => (p > 1e-12 ? sum - p * Math.log2(p) : sum), 0);
}

/** Return the probability of all tokens that are not listed. */
export const restOf = (token) =>
  Math.max(0, 1 - token.top.reduce((sum, other) => sum + Math.exp(other.logprob), 0));

// Each measure: its legend, its value, the bounds of its steps (8 classes), and its words.
export const MEASURES = {
  off: { name: "Off", of: () => null, bounds: [], show: () => "" },
  probability: {
    name: "Probability",
    legend: "probability of the token: from 100 % to below 1 %",
    of: (token) => probability(token.logprob),
    bounds: [0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01],
    falls: true,
    show: (value) => percent(value),
  },
  surprise: {
    name: "Surprise",
    legend: "surprise in bits (−log₂ p): from 0 to more than 9",
    of: (token) => bits(token.logprob),
    bounds: [0.15, 0.5, 1, 2, 3.5, 6, 9],
    show: (value) => `${value.toFixed(2)} bits`,
  },
  entropy: {
    name: "Entropy",
    legend: "entropy of the alternatives in bits: from 0 to more than 4",
    of: entropyOf,
    bounds: [0.2, 0.5, 1, 1.5, 2, 3, 4],
    show: (value) => `${value.toFixed(2)} bits`,
  },
  rank: {
    name: "Rank",
    legend: "rank of the token among the alternatives: from 1 to more than 7, or not listed",
    of: (token) => (token.logprob === null || !token.top.length ? null : (rankOf(token) ?? Infinity)),
    bounds: [1, 2, 3, 4, 5, 6, 7],
    show: (value) => (value === Infinity ? "not listed" : `rank ${value}`),
  },
};

/** Return the class of a token, 0 (expected) to 7 (unexpected), or null without a value. */
export function levelOf(measure, token) {
  const { of, bounds, falls } = MEASURES[measure];
  const value = of(token);
  if (value === null || Number.isNaN(value)) return null;
  const index = bounds.findIndex((bound) => (falls ? value >= bound : value <= bound));
  return index < 0 ? bounds.length : index;
}

export function percent(p) {
  if (p === null) return "–";
  if (p > 0 && p < 0.0001) return "< 0.01 %";
  return `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`;
}

/** Return the number of scored tokens, their mean log-probability, perplexity and bits. */
export function summary(tokens) {
  const scored = tokens.filter((token) => token.logprob !== null);
  const total = scored.reduce((sum, token) => sum + Math.max(token.logprob, FLOOR), 0);
  const mean = scored.length ? total / scored.length : null;
  return {
    tokens: tokens.length,
    scored: scored.length,
    mean,
    perplexity: mean === null ? null : Math.exp(-mean),
    bits: -total / Math.LN2,
  };
}
