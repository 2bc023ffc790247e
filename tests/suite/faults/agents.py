"""Faults in what agents need: conversations, schemas, custom tools, constraints, long waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from suite.faults.base import broken, calls, only, parts, refuse, without
from suite.rules import Refused
from suite.work import CHAT


def _messages(body: Any) -> list[dict[str, Any]]:
    found = body.get("messages")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _roles(body: Any) -> list[Any]:
    return [message.get("role") for message in _messages(body)]


def _strict(when: Callable[[list[Any]], Any]) -> Any:
    """Return a request hook that rejects roles as a strict chat template does."""

    def hook(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == CHAT and when(_roles(body)):
            raise Refused("The template refuses these roles.", "messages")
        return body

    return hook


def _kept(keep: Callable[[int, list[dict[str, Any]]], bool]) -> Any:
    """Return a request hook that drops messages silently."""

    def hook(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != CHAT:
            return body
        messages = body["messages"]
        return {**body, "messages": [m for at, m in enumerate(messages) if keep(at, messages)]}

    return hook


def _pairs(role: str, roles: list[Any]) -> bool:
    return (role, role) in pairwise(roles)


def _last_of(role: str, at: int, messages: list[Any]) -> bool:
    """Return True if a message is the last of consecutive ones of a role, or of another role."""
    return not _pairs(role, [one["role"] for one in messages[at : at + 2]])


broken("history-system-middle-refused", request=_strict(
    lambda roles: "system" in roles[1:-1] and "assistant" in roles))  # fmt: skip
broken("history-system-middle-dropped", valid=_kept(
    lambda at, found: at == 0 or found[at]["role"] != "system"))  # fmt: skip
broken("history-developer-middle-refused", request=_strict(
    lambda roles: "developer" in roles[1:]))  # fmt: skip
broken("history-developer-middle-dropped", valid=_kept(
    lambda at, found: at == 0 or found[at]["role"] != "developer"))  # fmt: skip
broken("history-two-systems-refused", request=_strict(lambda roles: roles.count("system") > 1))
broken("history-system-last-refused", request=_strict(
    lambda roles: roles[1:] and roles[-1] == "system"))  # fmt: skip
broken("history-system-asked", valid=lambda path, body: (
    {**body, "messages": _asked(body["messages"])} if path == CHAT else body))  # fmt: skip
for _role in ("user", "assistant"):
    broken(f"history-{_role}-pairs-refused", request=_strict(partial(_pairs, _role)))
    broken(f"history-{_role}-pairs-dropped", valid=_kept(partial(_last_of, _role)))
broken("history-assistant-first-refused", request=_strict(
    lambda roles: roles[:1] == ["assistant"]))  # fmt: skip
broken("history-assistant-first-dropped", valid=_kept(
    lambda at, found: at > 0 or found[at]["role"] != "assistant"))  # fmt: skip


def _asked(messages: list[Any]) -> list[Any]:
    """Return messages with each later system message at the end, as the user's."""
    later = [m for m in messages[1:] if m["role"] == "system"]
    rest = [m for m in messages if m not in later]
    return [*rest, *({**message, "role": "user"} for message in later)]


def _earlier(body: Any) -> list[str]:
    return [
        call["function"]["arguments"]
        for message in _messages(body)
        for call in message.get("tool_calls") or ()
        if "function" in call
    ]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _emptied(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Replace malformed arguments by an empty object."""
    if path != CHAT or all(map(_is_object, _earlier(body))):
        return body
    copy = json.loads(json.dumps(body))
    for message in copy["messages"]:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = "{}"
    return copy  # type: ignore[no-any-return]


broken("history-malformed-500", request=refuse(
    lambda body: not all(map(_is_object, _earlier(body))), CHAT))  # fmt: skip
broken("history-malformed-emptied", valid=_emptied)
broken("history-list-refused", request=refuse(
    lambda body: any(text.startswith("[") for text in _earlier(body)), CHAT, 400))  # fmt: skip
broken("history-empty-refused", request=refuse(lambda body: "" in _earlier(body), CHAT, 400))


def _have(name: str, body: Any) -> bool:
    return any(name in message for message in _messages(body))


for _name in ("reasoning", "reasoning_content"):
    broken(f"history-{_name.replace('_', '-')}-refused", request=refuse(
        partial(_have, _name), CHAT, 422))  # fmt: skip
broken("history-null-reasoning-refused", request=refuse(
    lambda body: any(message.get("reasoning", "") is None for message in _messages(body)),
    CHAT, 400))  # fmt: skip
broken("history-reasoning-read", valid=lambda path, body: (
    {**body, "messages": [{**m, "content": m["reasoning"] + m["content"]}
                          if m.get("reasoning") and m.get("content") else m
                          for m in body["messages"]]} if path == CHAT else body))  # fmt: skip


def _schemas(body: Any) -> list[str]:
    return [json.dumps(one) for one in body.get("tools") or () if isinstance(one, dict)]


# A part of a schema that only one kind of tool has, by the name of the fault.
PARTS = {
    "lookahead": "(?!-)", "nested-pattern": "^(([a-z]", "escapes": "p{L}", "format": '"format": ',
    "const": '"const": 2', "condition": '"if"', "nested-refs": "#/$defs/item",
    "recursive-ref": "#/definitions/node", "type-list": '"null"], "enum"', "not": '"not"',
}  # fmt: skip


def _has_part(part: str, body: Any) -> bool:
    return any('"$schema"' in one and part in one for one in _schemas(body))


for _name, _part in PARTS.items():
    broken(f"mcp-{_name}-refused", request=refuse(partial(_has_part, _part), CHAT, 400))
broken("mcp-many-refused", request=refuse(lambda body: len(_schemas(body)) == 50, CHAT, 400))
broken("mcp-many-ignored", valid=lambda path, body: (
    {**body, "tools": None, "tool_choice": None} if len(_schemas(body)) == 50 else body
))  # fmt: skip
broken("mcp-many-unnamed", valid=lambda path, body: (
    {**body, "tool_choice": "required", "tools": [*body["tools"][2:]]}
    if len(_schemas(body)) == 50 and isinstance(body.get("tool_choice"), dict) else body
))  # fmt: skip
broken("mcp-arguments-empty", reply=calls(lambda call: _no_arguments(call)))


def _no_arguments(call: dict[str, Any]) -> None:
    if "mcp__" in call.get("function", {}).get("name", ""):
        call["function"]["arguments"] = "{}"


def _unformatted(syntax: str) -> Any:
    """Return a hook that ignores the grammars of custom tools."""

    def hook(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != CHAT or f'"syntax": "{syntax}"' not in json.dumps(body.get("tools")):
            return body
        tools = [
            {**one, "custom": {**one["custom"], "format": {"type": "text"}}}
            if "custom" in one and syntax in str(one["custom"].get("format")) else one
            for one in body["tools"]
        ]  # fmt: skip
        return {**body, "tools": tools}

    return hook


broken("custom-regex-ignored", valid=_unformatted("regex"))
broken("custom-lark-ignored", valid=_unformatted("lark"))
broken("custom-input-object", reply=calls(
    lambda call: call["custom"].update(input={"input": call["custom"]["input"]})
    if "custom" in call else None))  # fmt: skip
broken("custom-choice-ignored", valid=lambda path, body: (
    {**body, "tool_choice": "required"}
    if isinstance(body.get("tool_choice"), dict) and body["tool_choice"]["type"] == "custom"
    else body))  # fmt: skip
broken("custom-stream-repeats", chunks=parts(
    lambda part: part.update(type="custom") if "custom" in part else None))  # fmt: skip
broken("custom-stream-function", chunks=parts(
    lambda part: part.update(type="function")
    if "custom" in part and "id" in part else None))  # fmt: skip
broken("custom-stream-cut", chunks=only(CHAT, lambda chunks: [
    chunk for at, chunk in enumerate(chunks) if at != 1 or '"custom"' not in json.dumps(chunk)
]))  # fmt: skip
broken("custom-history-refused", request=refuse(
    lambda body: any("custom" in call for message in _messages(body)
                     for call in message.get("tool_calls") or ()), CHAT))  # fmt: skip
broken("custom-history-unread", valid=lambda path, body: (
    {**body, "messages": [m for m in body["messages"] if '"custom"' not in json.dumps(m)]}
    if path == CHAT else body))  # fmt: skip
for _name, _wrong in (
    ("regex", "'(left'"), ("lark", "|( SIDE"), ("syntax", "no_syntax"), ("format", "no_type"),
):  # fmt: skip
    broken(f"custom-{_name}-unchecked", request=lambda path, body, wrong=_wrong: (
        {**body, "tools": None, "tool_choice": None}
        if "custom" in str(body.get("tools")) and wrong in str(body.get("tools"))
        else body))  # fmt: skip

for _name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice",
              "guided_grammar", "grammar", "json_schema", "format", "min_tokens", "ignore_eos",
              "include_stop_str_in_output"):  # fmt: skip
    broken(f"drops-{_name.replace('_', '-')}", valid=without(_name))


def _form(path: str, body: dict[str, Any], dropped: Callable[[Any], bool]) -> dict[str, Any]:
    form = body.get("response_format")
    return {**body, "response_format": None} if isinstance(form, dict) and dropped(form) else body


broken("drops-schema-of-object", valid=lambda path, body: (
    {**body, "response_format": {"type": "json_object"}}
    if (body.get("response_format") or {}).get("type") == "json_object" else body))  # fmt: skip
broken("drops-direct-schema", valid=lambda path, body: _form(
    path, body, lambda form: form["type"] == "json_schema" and "schema" in form))  # fmt: skip
broken("drops-other-formats", valid=lambda path, body: _form(
    path, body, lambda form: form["type"] in ("regex", "grammar")))  # fmt: skip
broken("drops-completion-format", valid=lambda path, body: (
    {**body, "response_format": None} if path != CHAT else body))  # fmt: skip
broken("drops-in-streams", valid=lambda path, body: (
    {**body, "guided_regex": None} if body.get("stream") else body))  # fmt: skip

broken("keepalive-none", comment=b"")
broken("keepalive-joined", comment=b": keep-alive ")
broken("keepalive-events", comment=b"data: {}\n\n")
broken("models-no-context", reply=lambda path, body, sent: _listed(
    path, body, lambda one: {k: v for k, v in one.items() if k != "context_length"}))  # fmt: skip
broken("models-other-context", reply=lambda path, body, sent: _listed(
    path, body, lambda one: {**one, "context_length": 4096}))  # fmt: skip
broken("detail-original-refused", request=refuse(
    lambda body: '"original"' in json.dumps(body.get("messages")), CHAT, 422))  # fmt: skip
broken("detail-original-unread", valid=lambda path, body: (
    {**body, "messages": [{**m, "content": "Describe it."} for m in body["messages"]]}
    if '"original"' in json.dumps(body.get("messages")) else body))  # fmt: skip


def _listed(path: str, body: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    if path == "/models":
        return {**body, "data": [change(one) for one in body["data"]]}
    return change(body) if path == "/models/" else body
