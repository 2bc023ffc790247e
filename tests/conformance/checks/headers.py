"""Response headers (contract 1.6)."""

from __future__ import annotations

from ..check import check, expect
from ..target import Api

ASK = [{"role": "user", "content": "Hello"}]


@check("headers.request-id", "Every reply has an x-request-id, errors too.", "must", "1.6")
async def request_id(api: Api) -> None:
    replies = [await api.get("/models"), await api.get("/no-such-endpoint")]
    ids = [reply.headers.get("x-request-id") for reply in replies]
    expect(all(ids), f"expected an id on each reply, but got {ids}")
    expect(len(set(ids)) == len(ids), f"expected each its own id, but got {ids}")


@check("headers.stream-request-id", "A stream has an x-request-id.", "must", "1.6")
async def stream_request_id(api: Api) -> None:
    body = {"model": api.model, "messages": ASK, "stream": True, "max_tokens": 1}
    reply = await api.post("/chat/completions", body)
    expect(reply.headers.get("x-request-id"), "expected an x-request-id on the stream")


@check("headers.processing-ms", "openai-processing-ms is an integer.", "should", "1.6")
async def processing_ms(api: Api) -> None:
    value = (await api.get("/models")).headers.get("openai-processing-ms", "")
    expect(value.isdigit(), f"expected a number of milliseconds, but got {value!r}")


@check("headers.version", "openai-version is told.", "should", "1.6 [DD]")
async def version(api: Api) -> None:
    value = (await api.get("/models")).headers.get("openai-version")
    expect(value, "expected an openai-version header")


@check("headers.json", "A plain reply's content type is JSON.", "must", "1.6 [LMEVAL]")
async def json_type(api: Api) -> None:
    body = {"model": api.model, "prompt": "Hello", "max_tokens": 1}
    kind = (await api.post("/completions", body)).headers.get("content-type", "")
    expect(kind.startswith("application/json"), f"expected application/json, but got {kind!r}")


@check("headers.error-json", "An error's content type is JSON.", "must", "1.6")
async def error_type(api: Api) -> None:
    kind = (await api.get("/no-such-endpoint")).headers.get("content-type", "")
    expect(kind.startswith("application/json"), f"expected application/json, but got {kind!r}")


@check("headers.stream", "A stream's content type is text/event-stream.", "must", "1.6 [PYD]")
async def stream_type(api: Api) -> None:
    body = {"model": api.model, "messages": ASK, "stream": True, "max_tokens": 1}
    kind = (await api.post("/chat/completions", body)).headers.get("content-type", "")
    expect(kind.startswith("text/event-stream"), f"expected an event stream, but got {kind!r}")


@check("headers.no-cache", "A stream must not be cached.", "should", "1.6 [DD]")
async def no_cache(api: Api) -> None:
    body = {"model": api.model, "messages": ASK, "stream": True, "max_tokens": 1}
    value = (await api.post("/chat/completions", body)).headers.get("cache-control", "")
    kept = "no-cache" in value or "no-store" in value
    expect(kept, f"expected no-cache or no-store, but got {value!r}")


# A local server may reject requests from websites, but not from apps on the same machine.
APP = "app://obsidian.md"


@check("headers.cors", "A web page of another origin may read the reply.", "should", "1.6 [DD]")
async def cors(api: Api) -> None:
    reply = await api.send("GET", "/models", headers={"origin": APP})
    expect(reply.status == 200, f"expected status 200, but got {reply.status}")
    allowed = reply.headers.get("access-control-allow-origin")
    expect(allowed in ("*", APP), f"expected the origin, but got {allowed!r}")
