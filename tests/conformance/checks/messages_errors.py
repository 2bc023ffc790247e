"""The rejections of a Messages request, and models in Anthropic's form (contract, 8 and 11.1)."""

from __future__ import annotations

import json
import re
from typing import Any

from ..check import Body, Diverges, Skip, check, expect
from ..target import Api
from .messages import VERSION, M, body_of, expect_error, send, user
from .models import too_long

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


def _missing(name: str) -> Body:
    async def run(api: Api) -> None:
        body = {key: value for key, value in body_of(api).items() if key != name}
        reply = await api.send("POST", M, json.dumps(body).encode(), VERSION, body)
        found = expect_error(reply, 400, "invalid_request_error")
        wanted = f"{name}: Field required"
        expect(found == wanted, f"expected {wanted!r}, but got {found!r}")

    return run


for _name in ("model", "max_tokens", "messages"):
    check(f"messages.missing-{_name.replace('_', '-')}",
          f"A request without {_name} is rejected in Anthropic's words.",
          "must", "M2.3 M13.5")(_missing(_name))  # fmt: skip

# Each row: the id, the fields, and the promise.
INVALID: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("no-messages", {"messages": []}, "A request with an empty list of messages is rejected."),
    ("temperature-above", {"temperature": 1.5}, "A temperature above 1 is rejected."),
    ("limit-negative", {"max_tokens": -1}, "A negative max_tokens is rejected."),
    ("role-unknown", {"messages": [{"role": "nobody", "content": "Hi"}]},
     "An unknown role is rejected."),
    ("stop-empty", {"stop_sequences": [""]}, "An empty stop sequence is rejected."),
    ("budget-small", {"thinking": {"type": "enabled", "budget_tokens": 1}},
     "A budget_tokens below 1024 is rejected."),
    ("tool-unknown", {"tools": [{"type": "no_such_tool_1", "name": "x"}]},
     "A tool of an unknown type is rejected."),
    ("mcp-servers", {"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]},
     "mcp_servers are rejected."),
)  # fmt: skip


def _invalid(fields: dict[str, Any]) -> Body:
    async def run(api: Api) -> None:
        expect_error(await send(api, **fields), 400, "invalid_request_error")

    return run


for _id, _fields, _promise in INVALID:
    check(f"messages.{_id}", _promise, "must", "M2.1 M2.3")(_invalid(_fields))


@check("messages.unknown-model", "An unknown model is a 404 whose message names it.",
       "must", "M2.1 M13.7")  # fmt: skip
async def unknown_model(api: Api) -> None:
    reply = await send(api, model="no-such-model-anywhere")
    found = expect_error(reply, 404, "not_found_error")
    wanted = "model: no-such-model-anywhere"
    expect(found == wanted, f"expected {wanted!r}, but got {found!r}")


@check("messages.context",
       "A prompt beyond the context is rejected in the words after which clients compact, also "
       "with stream true.",
       "must", "M2.3 M13.43")  # fmt: skip
async def context(api: Api) -> None:
    text = await too_long(api)
    for stream in (False, True):
        reply = await send(api, messages=[user(text)], stream=stream)
        found = expect_error(reply, 400, "invalid_request_error")
        match = _TOO_LONG.fullmatch(found)
        valid = match is not None and int(match[1]) > int(match[2])
        expect(valid, f"expected 'prompt is too long: N tokens > M maximum', but got {found!r}")


@check("messages.batches", "Batches are served, or a 404 not_found_error.", "must", "M1 M13.69")
async def batches(api: Api) -> None:
    reply = await api.send("POST", f"{M}/batches", b"{}", VERSION)
    if reply.status != 200:
        expect_error(reply, 404, "not_found_error")


@check("messages.wrong-key", "A wrong key is a 401 authentication_error.",
       "must", "M11.1 M13.2")  # fmt: skip
async def wrong_key(api: Api) -> None:
    if "authorization" not in api.client.headers:
        raise Skip("this check needs an API key: --api-key")
    headers = {**VERSION, "authorization": "Bearer sk-wrong", "x-api-key": "sk-wrong"}
    reply = await send(api, headers=headers)
    if reply.status == 200:
        raise Diverges("the server accepts any API key")
    expect_error(reply, 401, "authentication_error")


@check("messages.models",
       "Models have Anthropic's form for a request with anthropic-version, and OpenAI's without.",
       "must", "M8 M13.66")  # fmt: skip
async def models(api: Api) -> None:
    reply = await api.send("GET", "/models?limit=1", headers=VERSION)
    found = reply.ok()
    valid = found.get("has_more") in (True, False) and len(found["data"]) == 1
    expect(valid, f"expected a page of one model, but got {found}")
    one = found["data"][0]
    valid = one.get("type") == "model" and isinstance(one.get("display_name"), str)
    expect(valid and one["display_name"], f"expected a model in Anthropic's form, but got {one}")
    made = str(one.get("created_at"))
    expect(_TIME.fullmatch(made), f"expected a time as of RFC 3339 in created_at, but got {made!r}")
    plain = (await api.get("/models")).ok()
    expect(plain.get("object") == "list", f"expected OpenAI's list, but got {plain}")
    ids = [model["id"] for model in plain["data"]]
    expect(one.get("id") in ids, f"expected one of the ids {ids}, but got {one.get('id')!r}")
    ends = {name: found.get(name) for name in ("first_id", "last_id", "has_more")}
    wanted = {"first_id": one["id"], "last_id": one["id"], "has_more": len(ids) > 1}
    expect(ends == wanted, f"expected {wanted}, but got {ends}")
