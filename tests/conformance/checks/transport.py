"""Routes, methods, content types and bodies (contract 1.1 and 1.2)."""

from __future__ import annotations

from ..check import check, expect
from ..raw import exchange
from ..target import Api


@check("transport.json-charset",
       "A JSON request body is accepted if its Content-Type header includes a charset.",
       "must", "1.2 [openapi#194]")  # fmt: skip
async def json_charset(api: Api) -> None:
    body = b'{"model": "%s", "prompt": "a", "max_tokens": 1}' % api.model.encode()
    kind = {"content-type": "application/json; charset=utf-8"}
    reply = await api.send("POST", "/completions", body, kind, {"prompt": "a"})
    reply.ok()


@check("transport.other-content-type",
       "A request body that is not sent as JSON is rejected with 400 or 415 and an error object.",
       "should", "1.2 [openapi#502]")  # fmt: skip
async def other_content_type(api: Api) -> None:
    reply = await api.send("POST", "/completions", b"model=x", {"content-type": "text/plain"})
    reply.error(400, 415)


@check("transport.no-json", "A request body that is not valid JSON is rejected with 400.",
       "must", "1.2 [Delphi#44]")  # fmt: skip
async def no_json(api: Api) -> None:
    (await api.send("POST", "/chat/completions", b'{"model": ')).error(400)


@check("transport.no-object", "A JSON request body that is not an object is rejected with 400.",
       "must", "1.2")  # fmt: skip
async def no_object(api: Api) -> None:
    (await api.send("POST", "/chat/completions", b"[]")).error(400)


@check("transport.empty-body", "An empty request body is rejected with 400.", "must", "1.2 10.77")
async def empty_body(api: Api) -> None:
    (await api.send("POST", "/completions", b"")).error(400)


@check("transport.unknown-path", "An unknown path returns 404 with an error object.", "must", "1.2")
async def unknown_path(api: Api) -> None:
    (await api.get("/no-such-endpoint")).error(404)


@check("transport.wrong-method",
       "A method that the path does not support returns 405 with an error object.",
       "must", "1.2")  # fmt: skip
async def wrong_method(api: Api) -> None:
    (await api.get("/completions")).error(405)


@check("transport.allow", "The response to GET /completions has an Allow header that lists POST.",
       "should", "1.2")  # fmt: skip
async def allow(api: Api) -> None:
    reply = await api.get("/completions")
    allowed = reply.words("allow")
    expect("POST" in allowed, f"expected POST in the Allow header, but got {allowed}")


@check("transport.duplicate-keys",
       "If a key occurs twice in a JSON request body, the last value is used.",
       "may", "design")  # fmt: skip
async def duplicate_keys(api: Api) -> None:
    body = b'{"model": "%s", "prompt": 5, "prompt": "a", "max_tokens": 1}' % api.model.encode()
    (await api.send("POST", "/completions", body, sent={"prompt": "a"})).ok()


@check("transport.empty-key",
       "An Authorization header with an empty bearer token gets 200 or 401, never a server error.",
       "must", "1.2 [LMEVAL]")  # fmt: skip
async def empty_key(api: Api) -> None:
    reply = await exchange(api, "GET", "/models", b"", "Bearer ")
    expect(reply.status in (200, 401), f"expected 200 or 401, but got {reply.status}")
