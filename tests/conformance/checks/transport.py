"""Routes, methods, content types and bodies (contract 1.1 and 1.2)."""

from __future__ import annotations

from ..check import check, expect
from ..raw import exchange
from ..target import Api


@check("transport.json-charset", "A JSON body may say its charset.", "must", "1.2 [openapi#194]")
async def json_charset(api: Api) -> None:
    body = b'{"model": "%s", "prompt": "a", "max_tokens": 1}' % api.model.encode()
    kind = {"content-type": "application/json; charset=utf-8"}
    reply = await api.send("POST", "/completions", body, kind, {"prompt": "a"})
    reply.ok()


@check(
    "transport.other-content-type",
    "A body of another content type is refused with 400 or 415 and an error object.",
    "should",
    "1.2 [openapi#502]",
)
async def other_content_type(api: Api) -> None:
    reply = await api.send("POST", "/completions", b"model=x", {"content-type": "text/plain"})
    reply.error(400, 415)


@check("transport.no-json", "A body that is no JSON is a 400.", "must", "1.2 [Delphi#44]")
async def no_json(api: Api) -> None:
    (await api.send("POST", "/chat/completions", b'{"model": ')).error(400)


@check("transport.no-object", "A JSON body that is no object is a 400.", "must", "1.2")
async def no_object(api: Api) -> None:
    (await api.send("POST", "/chat/completions", b"[]")).error(400)


@check("transport.empty-body", "An empty body is a 400.", "must", "1.2 10.77")
async def empty_body(api: Api) -> None:
    (await api.send("POST", "/completions", b"")).error(400)


@check("transport.unknown-path", "An unknown path is a 404 with an error object.", "must", "1.2")
async def unknown_path(api: Api) -> None:
    (await api.get("/no-such-endpoint")).error(404)


@check("transport.wrong-method", "A wrong method is a 405 with an error object.", "must", "1.2")
async def wrong_method(api: Api) -> None:
    (await api.get("/completions")).error(405)


@check("transport.allow", "A 405 says which methods are allowed.", "should", "1.2")
async def allow(api: Api) -> None:
    reply = await api.get("/completions")
    allowed = reply.headers.get("allow", "")
    expect("POST" in allowed, f"expected POST in 'allow', but got {allowed!r}")


@check("transport.duplicate-keys", "Of a key that comes twice the last counts.", "may", "design")
async def duplicate_keys(api: Api) -> None:
    body = b'{"model": "%s", "prompt": 5, "prompt": "a", "max_tokens": 1}' % api.model.encode()
    (await api.send("POST", "/completions", body, sent={"prompt": "a"})).ok()


@check("transport.empty-key", "A bearer without a key is no server error.", "must", "1.2 [LMEVAL]")
async def empty_key(api: Api) -> None:
    reply = await exchange(api, "GET", "/models", b"", "Bearer ")
    expect(reply.status in (200, 401), f"expected 200 or 401, but got {reply.status}")
