// The API of the server that has sent the page. The key is in this tab only, and never in an address.

const BASE = new URL("v1/", new URL(".", document.baseURI)).href;
export const address = (path) => new URL(path, BASE).href;
let kept = sessionStorage.getItem("latimer.key") ?? "";

export const key = {
  get: () => kept,
  set(value) {
    kept = value.trim();
    if (kept) sessionStorage.setItem("latimer.key", kept);
    else sessionStorage.removeItem("latimer.key");
  },
};

/** An error object of the API. */
export class ApiError extends Error {
  constructor(status, error, id) {
    super(error?.message ?? `The server responded with status ${status}.`);
    Object.assign(this, { status, param: error?.param, code: error?.code, id });
  }
}

async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (kept) headers.authorization = `Bearer ${kept}`;
  const response = await fetch(address(path), {
    method, headers, signal, credentials: "omit", referrerPolicy: "no-referrer",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) {
    let error = null;
    try {
      error = (await response.json()).error;
    } catch {
      // Not from Latimer.
    }
    throw new ApiError(response.status, error, response.headers.get("x-request-id"));
  }
  return response;
}

export const get = async (path, options) => (await request(path, options)).json();
export const text = async (path, options) => (await request(path, options)).text();
export const post = (path, body, options) => get(path, { method: "POST", body, ...options });
export const remove = (path) => get(path, { method: "DELETE" });

/** Split the text of an event stream into the data of its events; `feed` takes any part of it. */
export class Events {
  #rest = "";

  feed(part) {
    this.#rest += part;
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
  }
}

/**
 * Send a request and yield the objects of its response: each event of a stream, or the one reply.
 * `seen` gets the raw text, and the headers first.
 */
export async function* stream(path, body, { signal, seen = {} } = {}) {
  const response = await request(path, { method: "POST", body, signal });
  seen.head?.(response.headers);
  if (!body.stream) {
    const whole = await response.text();
    seen.raw?.(whole);
    yield JSON.parse(whole);
    return;
  }
  const events = new Events();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    const part = done ? "\n" : value;
    if (!done) seen.raw?.(part);
    for (const data of events.feed(part)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(response.status, event.error, response.headers.get("x-request-id"));
      yield event;
    }
    if (done) return;
  }
}
