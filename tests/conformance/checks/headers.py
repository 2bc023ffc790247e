"""Response headers (contract 1.6)."""

from __future__ import annotations

from ..check import check, expect
from ..target import Api

ASK = [{"role": "user", "content": "Hello"}]


@check("headers.request-id",
       "Every response, including errors, has an x-request-id header with a unique id.",
       "must", "1.6")  # fmt: skip
async def request_id(api: Api) -> None:
    replies = [await api.get("/models"), await api.get("/no-such-endpoint")]
    ids = [reply.headers.get("x-request-id") for reply in replies]
    expect(all(ids), f"expected an x-request-id on each response, but got {ids}")
    expect(len(set(ids)) == len(ids), f"expected different ids, but got {ids}")


@check("headers.stream-request-id", "A streamed response has an x-request-id header.",
       "must", "1.6")  # fmt: skip
async def stream_request_id(api: Api) -> None:
    body = {"model": api.model, "messages": ASK, "stream": True, "max_tokens": 1}
    reply = await api.post("/chat/completions", body)
    expect(reply.headers.get("x-request-id"), "expected an x-request-id header, but got none")


@check("headers.processing-ms",
       "Every response has an openai-processing-ms header with an integer.",
       "should", "1.6")  # fmt: skip
async def processing_ms(api: Api) -> None:
    value = (await api.get("/models")).headers.get("openai-processing-ms", "")
    expect(value.isdigit(), f"expected an integer of milliseconds, but got {value!r}")


@check("headers.version", "Every response has an openai-version header.", "should", "1.6 [DD]")
async def version(api: Api) -> None:
    value = (await api.get("/models")).headers.get("openai-version")
    expect(value, "expected an openai-version header, but got none")


@check("headers.json", "A response that is not streamed has the content type application/json.",
       "must", "1.6 [LMEVAL]")  # fmt: skip
async def json_type(api: Api) -> None:
    body = {"model": api.model, "prompt": "Hello", "max_tokens": 1}
    kind = (await api.post("/completions", body)).kind
    expect(kind == "application/json", f"expected application/json, but got {kind!r}")


@check("headers.error-json", "An error response has the content type application/json.",
       "must", "1.6")  # fmt: skip
async def error_type(api: Api) -> None:
    kind = (await api.get("/no-such-endpoint")).kind
    expect(kind == "application/json", f"expected application/json, but got {kind!r}")


@check("headers.stream", "A streamed response has the content type text/event-stream.",
       "must", "1.6 [PYD]")  # fmt: skip
async def stream_type(api: Api) -> None:
    body = {"model": api.model, "messages": ASK, "stream": True, "max_tokens": 1}
    kind = (await api.post("/chat/completions", body)).kind
    expect(kind == "text/event-stream", f"expected text/event-stream, but got {kind!r}")


@check("headers.no-cache",
       "A streamed response has a Cache-Control header with no-cache or no-store.",
       "should", "1.6 [DD]")  # fmt: skip
async def no_cache(api: Api) -> None:
    body = {"model": api.model, "messages": ASK, "stream": True, "max_tokens": 1}
    found = (await api.post("/chat/completions", body)).words("cache-control")
    uncached = "no-cache" in found or "no-store" in found
    expect(uncached, f"expected no-cache or no-store, but got {found}")


# A local server may reject requests from websites, but not from apps on the same machine.
APP = "app://obsidian.md"


@check("headers.cors",
       "A request from another origin is served, and Access-Control-Allow-Origin permits that "
       "origin.",
       "should", "1.6 [DD]")  # fmt: skip
async def cors(api: Api) -> None:
    reply = await api.send("GET", "/models", headers={"origin": APP})
    expect(reply.status == 200, f"expected status 200, but got {reply.status}")
    allowed = reply.headers.get("access-control-allow-origin")
    expect(allowed in ("*", APP), f"expected '*' or {APP!r}, but got {allowed!r}")
