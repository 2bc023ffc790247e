"""Tests that error messages repeat only little of a request."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter

LONG = "a" * 20_000
SCHEMA = {"type": "object", "properties": {LONG: False}, "required": [LONG]}
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": LONG, "type": "function", "function": {"name": "f", "arguments": "{}"}}

BODIES: dict[str, dict[str, Any]] = {
    "rule": {"prompt": "a", "grammar": f"root ::= {LONG}"},
    "dashes": {"prompt": "a", "grammar": "root ::= " + "a-" * 4_000},
    "left recursion": {"prompt": "a", "grammar": f"root ::= {LONG}\n{LONG} ::= {LONG} | [b]"},
    "repetition": {"prompt": "a", "grammar": f"root ::= {{{' ' * 9_000}1}}"},
    "grammar's token": {"prompt": "a", "grammar": f"root ::= <{LONG}>"},
    "regex": {"prompt": "a", "regex": f"({LONG}"},
    "property": {"prompt": "a", "json_schema": SCHEMA},
    "property's keyword": {"prompt": "a", "json_schema": {"properties": {LONG: {"not": {}}}}},
    "format": {"prompt": "a", "json_schema": {"type": "string", "format": LONG}},
    "reference": {"prompt": "a", "json_schema": {"$ref": f"#/{LONG}"}},
    "lark": {"prompt": "a", "lark": f"start: {LONG}"},
    "bias": {"prompt": "a", "logit_bias": {LONG: 1}},
    "bias of a kind": {"prompt": "a", "logit_bias": {"1" * 9: LONG}},
    "vocabulary": {"prompt": "a", "logit_bias": {"1": 1}, "logit_bias_vocabulary": LONG},
    "metadata": {"messages": [USER], "metadata": {LONG: 5}},
    "role": {"messages": [{"role": LONG, "content": "a"}]},
    "part": {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
    "tool": {"messages": [USER], "tools": [TOOL], "tool_choice": LONG},
    "chosen tool": {
        "messages": [USER],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": LONG}},
    },
    "other choice": {"messages": [USER], "tools": [TOOL], "tool_choice": {LONG: LONG}},
    "call": {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]},
    "effort": {"messages": [USER], "reasoning_effort": LONG},
    "response format": {"messages": [USER], "response_format": {"type": LONG}},
    "variable": {"messages": [USER], "chat_template_kwargs": {"tools": LONG}},
    "image": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG}}]}
        ]
    },
}


def _is_short(reply: httpx2.Response) -> None:
    assert 400 <= reply.status_code < 500, reply.text
    assert len(reply.content) < 1_500, len(reply.content)
    error = reply.json()["error"]
    assert max(error["message"].count("a" * size) * size for size in (250, 500)) == 0
    headers = dict(reply.headers)
    assert sum(len(name) + len(value) for name, value in headers.items()) < 4_000


@pytest.mark.parametrize("name", BODIES)
async def test_errors_repeat_little_of_a_request(demo: httpx2.AsyncClient, name: str) -> None:
    """An error stays short for a wrong value of any length."""
    body = {"model": "m", **BODIES[name]}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    _is_short(await demo.post(path, json=body))


async def test_errors_repeat_little_of_an_address(echo: httpx2.AsyncClient) -> None:
    """Long paths, methods, content types and keys are shortened in errors."""
    _is_short(await echo.get(f"/v1/{LONG}"))
    _is_short(await echo.post(f"/v1/models/{LONG}"))
    _is_short(await echo.request("A" * 9_000, "/v1/models"))
    headers = {"content-type": f"text/{LONG}"}
    _is_short(await echo.post("/v1/completions", content=b"{}", headers=headers))


async def test_an_unknown_model_is_named_in_part(make_backend: Any, client_of: Any) -> None:
    """A long unknown model name is shortened in a 404."""
    app = OpenAIAdapter(make_backend("echo"), model_names=["m"], strict=True)
    async with client_of(app) as client:
        _is_short(await client.post("/v1/completions", json={"model": LONG, "prompt": "a"}))
        _is_short(await client.get(f"/v1/models/{LONG}"))
        _is_short(await client.post("/v1/completions", json={"model": "m", "prompt": "a", LONG: 1}))
    await app.aclose()
