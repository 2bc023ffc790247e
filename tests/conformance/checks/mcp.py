"""Tools with the schemas of MCP servers: many, and with every keyword (contract 3.1, 3.6).

OpenAI accepts any schema in a tool that is not `strict`. A keyword that the server cannot enforce
may be missing in the constraint, but it must not make the request fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from ..check import Body, Skip, check, expect
from ..target import Api, Reply
from .tools import ASK, LIMIT, WEATHER, calls_of

H = "/chat/completions"
WORD = {"type": "string", "maxLength": 8}

# The properties of a tool and other keywords of its parameters, by the keyword in question.
KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "lookahead": ({"name": {**WORD, "pattern": "^(?!-)(?=.*[a-z])[a-z0-9-]{1,8}(?<!-)$"}}, {}),
    "nested-refs": ({"item": {"$ref": "#/$defs/item"}},
                    {"$defs": {"item": {"type": "object", "required": ["side"],
                                        "additionalProperties": False,
                                        "properties": {"side": {"$ref": "#/$defs/side"}}},
                               "side": {"enum": ["left", "right"]}}}),
    "nested-pattern": ({"path": {**WORD, "pattern": "^(([a-z]+)(-[a-z0-9]+)*/?)+$"}}, {}),
    "escapes": ({"id": {**WORD, "pattern": "^\\p{L}[\\w.\\-]{0,7}\\b$"}}, {}),
    "format": ({"day": {"type": "string", "format": "date"},
                "link": {"type": "string", "format": "iri-reference", "maxLength": 8}}, {}),
    "const": ({"kind": {"const": "issue"}, "version": {"const": 2}}, {}),
    "condition": ({"state": {"enum": ["open", "closed"]}, "reason": {"enum": ["done", "stale"]}},
                  {"if": {"properties": {"state": {"const": "closed"}}},
                   "then": {"required": ["reason"]}, "else": {"required": ["state"]}}),
    "recursive-ref": ({"tree": {"$ref": "#/definitions/node"}},
                      {"definitions": {"node": {
                          "type": "object", "required": ["leaf"], "additionalProperties": False,
                          "properties": {
                              "leaf": {"type": "boolean"},
                              "next": {"anyOf": [{"$ref": "#/definitions/node"},
                                                 {"type": "null"}]}}}}}),
    "type-list": ({"limit": {"type": ["integer", "null"], "enum": [1, 10, None], "default": None},
                   "order": {"type": ["string", "null"], "enum": ["asc", "desc", None]}}, {}),
    "not": ({"key": {"enum": ["a", "b"], "not": {"const": "c"}}},
            {"minProperties": 1, "patternProperties": {"^x-": {"type": "string"}},
             "propertyNames": {"pattern": "^(?!__)"}}),
}  # fmt: skip
SERVICES = ("github", "jira", "files", "postgres", "slack")
# Keywords that a grammar cannot always enforce, and that a call may therefore violate.
LOOSE = {"pattern", "format", "if", "then", "else", "not", "propertyNames"}


def _parameters(kind: str) -> dict[str, Any]:
    properties, more = KINDS[kind]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
        "properties": {**properties}, "required": list(properties)[:1],
        "additionalProperties": False, **more,
    }  # fmt: skip


def _tool(name: str, kind: str) -> dict[str, Any]:
    function = {"name": name, "description": f"Use {name}.", "parameters": _parameters(kind)}
    return {"type": "function", "function": function}


TOOLS = [_tool(f"mcp__{service}__{kind}", kind) for service in SERVICES for kind in KINDS]


def _loose(schema: Any) -> Any:
    """Return a schema without the keywords that a call may violate."""
    if isinstance(schema, list):
        return [_loose(one) for one in schema]
    if isinstance(schema, dict):
        return {key: _loose(one) for key, one in schema.items() if key not in LOOSE}
    return schema


async def _asked(api: Api, tools: Sequence[Any], choice: Any, limit: int) -> Reply:
    messages = [{"role": "user", "content": ASK}]
    body = {"model": api.model, "messages": messages, "tools": tools, "tool_choice": choice,
            "temperature": 0, "max_tokens": limit}  # fmt: skip
    return await api.post(H, body)


async def _choice(api: Api, tools: Sequence[Any], choice: Any, limit: int = LIMIT) -> Any:
    """Return the choice of a request with tools, which the server must accept.

    A rejection is a failure even if it names `tools`: the client did not write their schemas. Only
    the size of the context may reduce the number of tools.
    """
    await api.chat(ASK, tools=[WEATHER], tool_choice="auto", max_tokens=1)
    reply = await _asked(api, tools, choice, limit)
    while len(tools) > 1 and reply.status == 400 and "context" in str(reply.error(400)):
        tools = tools[: len(tools) // 2]
        reply = await _asked(api, tools, choice, limit)
    expect(reply.status == 200, f"expected status 200, but got {reply.status}: {reply.text[:300]}")
    return reply.json()["choices"][0]


def _match(choice: Any, tools: Sequence[Any]) -> None:
    if choice["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    for call in calls_of(choice["message"]):
        name, text = call["function"]["name"], call["function"]["arguments"]
        expect(name in schemas, f"expected a tool's name, but got {name!r}")
        schema = _loose(schemas[name])
        error = next(Draft202012Validator(schema).iter_errors(json.loads(text)), None)
        expect(error is None, f"expected arguments that match the schema, but got {text!r}")


@check("mcp.auto",
       "A request with 50 MCP tools, or as many as the context holds, is accepted.",
       "must", "3.1", seconds=60)  # fmt: skip
async def auto(api: Api) -> None:
    choice = await _choice(api, TOOLS, "auto", 16)
    reason = choice["finish_reason"]
    valid = reason in ("stop", "length", "tool_calls")
    expect(valid, f"expected stop, length or tool_calls, but got {reason!r}")


@check("mcp.required",
       "With 50 MCP tools and tool_choice required, the arguments match the tool's schema.",
       "must", "3.6", seconds=60)  # fmt: skip
async def required(api: Api) -> None:
    _match(await _choice(api, TOOLS, "required"), TOOLS)


@check("mcp.named",
       "With 50 MCP tools and tool_choice naming one, it is called and its arguments match.",
       "must", "3.6", seconds=60)  # fmt: skip
async def named(api: Api) -> None:
    # If the context holds only a few tools, these are the first ones.
    for tool in TOOLS[:2]:
        choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
        _match(await _choice(api, TOOLS, choice), [tool])


def _alone(kind: str) -> Body:
    async def run(api: Api) -> None:
        tools = [_tool(f"use_{kind}", kind)]
        _match(await _choice(api, tools, "required"), tools)

    return run


for _kind in KINDS:
    check(f"mcp.{_kind}",
          f"A tool whose schema has {_kind.replace('-', ' ')} is accepted and called.",
          "must", "3.1 3.6")(_alone(_kind))  # fmt: skip
