"""Faults in tool calls, in custom tools, and in the conversations of agents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from suite.faults.completions import counted
from suite.faults.edits import (
    Edit,
    When,
    chunks,
    drop,
    has,
    ignores,
    longer,
    put,
    refuses,
    reply,
    request,
    saying,
    swap,
    takes,
    turn,
    valid,
    values,
)
from suite.server import Fault
from suite.work import CHAT

TOOL = {"type": "function", "function": {"name": "get_weather"}}
AND = {"role": "user", "content": "And?"}
HELLO = {"role": "user", "content": "Hello"}
CALL = "choices.*.message.tool_calls.*"
ARGUMENTS = f"{CALL}.function.arguments"
PART = "*.choices.*.delta.tool_calls.*"
REQUIRED = put("tool_choice", "required")
NO_TOOLS = (put("tools", None), put("tool_choice", None))


def _called(change: Edit) -> Fault:
    """Return a fault that changes the choices with calls."""
    return reply(turn("choices.*", lambda choice: (
        change(choice) if choice["message"].get("tool_calls") else choice)), at=CHAT)  # fmt: skip


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _merged(calls: list[Any]) -> list[Any]:
    """Return calls with the arguments of all in the first one."""
    if len(calls) < 2:
        return calls
    whole = "".join(call["function"]["arguments"] for call in calls)
    return [put("function.arguments", whole)(calls[0]), *calls[1:]]


def _untold(path: str, body: Any, sent: Mapping[str, Any]) -> Any:
    """Count a prompt without its tools."""
    less = len(json.dumps(sent["tools"])) if path == CHAT and sent.get("tools") else 0
    return turn("usage", counted(-less))(body) if less else body


def _loose(path: str, body: Any, sent: Mapping[str, Any]) -> Any:
    """Return calls of strict functions without the last argument, if the model chose to call."""
    if path != CHAT or sent.get("tool_choice") != "auto":
        return body
    return turn(ARGUMENTS, lambda text: text.rpartition(",")[0] + "}")(body)


def _interleaved(path: str, found: list[Any], sent: Any) -> list[Any]:
    at = [number for number, chunk in enumerate(found)
          if values("choices.*.delta.tool_calls", chunk)]  # fmt: skip
    if len(at) > 3:
        found[at[-3]], found[at[1]] = found[at[1]], found[at[-3]]
    return found


CALLS = {
    "tools-ignored": ignores("tools", "tool_choice"),
    "tools-finish-stop": _called(put("finish_reason", "stop")),
    "tools-finish-word": _called(swap("finish_reason", "tool_calls", "function_calls")),
    "tools-content-empty": reply(swap("choices.*.message.content", None, ""), at=CHAT),
    "tools-arguments-object": reply(turn(ARGUMENTS, _loaded), at=CHAT),
    "tools-arguments-cut": reply(turn(ARGUMENTS, lambda text: text[:-1]), at=CHAT),
    "tools-arguments-free": reply(turn(ARGUMENTS, lambda text: text.replace("Paris", "Lima")),
                                  at=CHAT),
    "tools-same-id": reply(put(f"{CALL}.id", "call_1"), at=CHAT),
    "tools-id-empty": reply(put(f"{CALL}.id", ""), at=CHAT),
    "tools-id-bare": reply(turn(f"{CALL}.id", lambda name: name[5:]), at=CHAT),
    "tools-no-type": reply(drop(f"{CALL}.type"), at=CHAT),
    "tools-other-name": reply(put(f"{CALL}.function.name", "no_tool"), at=CHAT),
    "tools-none-calls": valid(swap("tool_choice", "none", "required")),
    "tools-named-ignored": valid(REQUIRED, when=has("tool_choice", dict)),
    "tools-required-ignored": valid(swap("tool_choice", "required", "none")),
    "tools-empty-calls-with-text": reply(put("choices.*.message[content].tool_calls", []), at=CHAT),
    "tools-never-length": _called(swap("finish_reason", "length", "tool_calls")),
    "tools-parallel-always": ignores("parallel_tool_calls"),
    "tools-several-merged": reply(turn("choices.*.message.tool_calls", _merged), at=CHAT),
    "tools-needs-parameters": refuses(lambda body: any(
        "parameters" not in one for one in values("tools.*.function", body)), CHAT),
    "tools-no-arguments-empty": reply(swap(ARGUMENTS, "{}", ""), at=CHAT),
    "tools-unicode-lost": reply(turn(ARGUMENTS, lambda text: (
        text.encode("ascii", "replace").decode())), at=CHAT),
    "tools-nested-flat": reply(turn(ARGUMENTS, lambda text: (
        text.replace("[", '"').replace("]", '"'))), at=CHAT),
    "tools-one-choice": valid(*NO_TOOLS, when=lambda body: (
        body.get("tools") and (body.get("n") or 1) > 1)),
    "tools-not-told": Fault(reply=_untold),
    "tools-strict-auto-loose": Fault(reply=_loose),
    "tools-results-unread": valid(put("messages.*[role=tool].content", ""), at=CHAT),
    "tools-needs-content": refuses(lambda body: any(
        "content" not in one for one in values("messages.*[tool_calls]", body)), CHAT),
    "tools-null-content-refused": refuses(has("messages.*[tool_calls].content", None), CHAT),
    "tools-result-parts-refused": refuses(has("messages.*[role=tool].content", list), CHAT),
    "tools-orphans-taken": takes(has("messages.*", AND), CHAT, messages=[AND]),
    "tools-empty-list-taken": takes(has("messages.*.tool_calls", []), CHAT, messages=[HELLO]),
    "tools-choice-word-taken": takes(has("tool_choice", "sometimes"), CHAT, tool_choice="auto"),
    "tools-choice-unknown-taken": takes(has("tool_choice", saying("no_tool")), CHAT,
                                        tool_choice="auto"),
    "tools-no-name-taken": takes(has("tools.*.function", {}), CHAT, tools=[TOOL]),
    "tools-any-name-taken": takes(has("tools", saying("no name!")), CHAT, tools=[TOOL]),
    "tools-many-taken": takes(has("tools", longer(128)), CHAT, tools=[TOOL]),
    "tools-any-type-taken": takes(has("tools", saying("no_type")), CHAT, tools=[TOOL]),
    "tools-any-parameters-taken": takes(has("tools.*.function.parameters", []), CHAT, tools=[TOOL]),
    "tools-choice-alone-taken": takes(lambda body: (
        body.get("tool_choice") and not body.get("tools")), CHAT, tool_choice=None),
    "tools-allowed-ignored": valid(REQUIRED, when=has("tool_choice", saying("allowed_tools"))),
    "tools-custom-as-function": reply(put(f"{CALL}[custom].type", "function"), at=CHAT),
    "tools-functions-ignored": ignores("functions", "function_call"),
    "tools-stream-no-index": chunks(drop(f"{PART}.index"), at=CHAT),
    "tools-stream-no-id": chunks(drop(f"{PART}.id"), at=CHAT),
    "tools-stream-no-name": chunks(drop(f"{PART}.function.name"), drop(f"{PART}.custom.name"),
                                   at=CHAT),
    "tools-stream-repeats": chunks(put(f"{PART}.type", "function"), at=CHAT),
    "tools-stream-arguments-whole": chunks(
        put(f"{PART}.function.arguments", '{"city": "Paris", "unit": "C"}'),
        put(f"{PART}.custom.input", "list all"), at=CHAT),
    "tools-stream-spaces": chunks(
        turn(f"{PART}.function.arguments", lambda text: text.replace(", ", ",  ")),
        turn(f"{PART}.custom.input", lambda text: f"{text} "), at=CHAT),
    "tools-stream-interleaved": Fault(chunks=_interleaved),
    "tools-stream-finish-stop": chunks(swap("*.choices.*.finish_reason", "tool_calls", "stop")),
    "tools-stream-content": chunks(put("*.choices.*.delta[role].content", ""), at=CHAT),
}  # fmt: skip

# Custom tools, and the many tools of MCP servers.

MANY = has("tools", lambda tools: len(tools or ()) == 50)
# A part of a schema that only one kind of tool has, by the name of the fault.
PARTS = {
    "lookahead": "(?!-)", "nested-pattern": "^(([a-z]", "escapes": "p{L}", "format": '"format": ',
    "const": '"const": 2', "condition": '"if"', "nested-refs": "#/$defs/item",
    "recursive-ref": "#/definitions/node", "type-list": '"null"], "enum"', "not": '"not"',
}  # fmt: skip


def _has_part(part: str) -> When:
    return has("tools.*", lambda tool: (
        '"$schema"' in json.dumps(tool) and part in json.dumps(tool)))  # fmt: skip


def _unformatted(syntax: str) -> Fault:
    """Return a fault that ignores the grammars of custom tools."""
    return valid(turn("tools.*.custom.format", lambda form: (
        {"type": "text"} if f"'syntax': '{syntax}'" in str(form) else form)), at=CHAT)  # fmt: skip


def _unchecked(wrong: str) -> Fault:
    """Return a fault that takes a malformed custom tool, and ignores it."""
    return request(*NO_TOOLS, when=has("tools", lambda tools: (
        "custom" in str(tools) and wrong in str(tools))))  # fmt: skip


CUSTOM = {
    **{f"mcp-{name}-refused": refuses(_has_part(part), CHAT, 400) for name, part in PARTS.items()},
    "mcp-many-refused": refuses(MANY, CHAT, 400),
    "mcp-many-ignored": valid(*NO_TOOLS, when=MANY),
    "mcp-many-unnamed": valid(REQUIRED, turn("tools", lambda tools: tools[2:]), when=lambda body: (
        MANY(body) and has("tool_choice", dict)(body))),
    "mcp-arguments-empty": reply(turn(f"{CALL}.function", lambda call: (
        {**call, "arguments": "{}"} if "mcp__" in call["name"] else call)), at=CHAT),
    "custom-regex-ignored": _unformatted("regex"),
    "custom-lark-ignored": _unformatted("lark"),
    "custom-input-object": reply(turn(f"{CALL}.custom.input", lambda text: {"input": text}),
                                 at=CHAT),
    "custom-choice-ignored": valid(REQUIRED, when=has("tool_choice.type", "custom")),
    "custom-stream-repeats": chunks(put(f"{PART}[custom].type", "custom"), at=CHAT),
    "custom-stream-function": chunks(put(f"{PART}[custom][id].type", "function"), at=CHAT),
    "custom-stream-cut": chunks(lambda found: [
        chunk for at, chunk in enumerate(found) if at != 1 or "'custom'" not in str(chunk)],
        at=CHAT),
    "custom-history-refused": refuses(has("messages.*.tool_calls.*.custom"), CHAT),
    "custom-history-unread": valid(turn("messages", lambda found: [
        one for one in found if "'custom'" not in str(one)]), at=CHAT),
    "custom-regex-unchecked": _unchecked("'(left'"),
    "custom-lark-unchecked": _unchecked("|( SIDE"),
    "custom-syntax-unchecked": _unchecked("no_syntax"),
    "custom-format-unchecked": _unchecked("no_type"),
}  # fmt: skip

# Earlier messages.

EARLIER = "messages.*.tool_calls.*.function.arguments"


def _strict(when: Callable[[list[Any]], Any]) -> Fault:
    """Return a fault that rejects roles as a strict chat template does."""
    return refuses(lambda body: when(values("messages.*.role", body)), CHAT, 400)


def _kept(keep: Callable[[int, list[Any]], bool]) -> Fault:
    """Return a fault that drops messages silently."""
    return valid(turn("messages", lambda found: [
        message for at, message in enumerate(found) if keep(at, found)]), at=CHAT)  # fmt: skip


def _asked(messages: list[Any]) -> list[Any]:
    """Return messages with each later system message at the end, as the user's."""
    later = [m for m in messages[1:] if m["role"] == "system"]
    rest = [m for m in messages if m not in later]
    return [*rest, *({**message, "role": "user"} for message in later)]


def _is_malformed(text: str) -> bool:
    try:
        return not isinstance(json.loads(text), dict)
    except ValueError:
        return True


HISTORY = {
    "history-system-middle-refused": _strict(lambda roles: (
        "system" in roles[1:-1] and "assistant" in roles)),
    "history-system-middle-dropped": _kept(lambda at, found: (
        at == 0 or found[at]["role"] != "system")),
    "history-developer-middle-refused": _strict(lambda roles: "developer" in roles[1:]),
    "history-developer-middle-dropped": _kept(lambda at, found: (
        at == 0 or found[at]["role"] != "developer")),
    "history-two-systems-refused": _strict(lambda roles: roles.count("system") > 1),
    "history-system-last-refused": _strict(lambda roles: roles[1:] and roles[-1] == "system"),
    "history-system-asked": valid(turn("messages", _asked), at=CHAT),
    **{f"history-{role}-pairs-refused": _strict(lambda roles, role=role: (  # type: ignore[misc]
        (role, role) in pairwise(roles))) for role in ("user", "assistant")},
    **{f"history-{role}-pairs-dropped": _kept(lambda at, found, role=role: (  # type: ignore[misc]
        [one["role"] for one in found[at : at + 2]] != [role, role]))
       for role in ("user", "assistant")},
    "history-assistant-first-refused": _strict(lambda roles: roles[:1] == ["assistant"]),
    "history-assistant-first-dropped": _kept(lambda at, found: (
        at > 0 or found[at]["role"] != "assistant")),
    "history-malformed-500": refuses(has(EARLIER, _is_malformed), CHAT),
    "history-malformed-emptied": valid(put(EARLIER, "{}"), at=CHAT,
                                       when=has(EARLIER, _is_malformed)),
    "history-list-refused": refuses(has(EARLIER, lambda text: text.startswith("[")), CHAT, 400),
    "history-empty-refused": refuses(has(EARLIER, ""), CHAT, 400),
    "history-reasoning-refused": refuses(has("messages.*.reasoning"), CHAT, 422),
    "history-reasoning-content-refused": refuses(has("messages.*.reasoning_content"), CHAT, 422),
    "history-null-reasoning-refused": refuses(has("messages.*.reasoning", None), CHAT, 400),
    "history-reasoning-read": valid(turn("messages.*[reasoning][content]", lambda message: (
        {**message, "content": message["reasoning"] + message["content"]})), at=CHAT),
}  # fmt: skip
FAULTS = CALLS | CUSTOM | HISTORY
