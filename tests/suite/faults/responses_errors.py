"""Faults in the rejections of requests for responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suite.faults.base import broken, take, without
from suite.server import RESPONSES

# A value for a field that is absent.
NONE = object()
USER = {"role": "user"}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
# Each row: the fault's name, the field, the invalid value that is taken, and what it becomes.
TAKEN: Sequence[tuple[str, str, Any, Any]] = (
    ("temperature", "temperature", 2.1, 1),
    ("low-temperature", "temperature", -1, 1),
    ("top-p", "top_p", 1.1, 1),
    ("top-logprobs", "top_logprobs", 21, 20),
    ("include", "include", ["no_such_thing"], []),
    ("truncation", "truncation", "no_such_word", "disabled"),
    ("limit", "max_output_tokens", "many", 16),
    ("model", "model", "no-such-model-anywhere", "org/toy"),
    ("null-model", "model", None, "org/toy"),
    ("missing-model", "model", NONE, "org/toy"),
    ("missing-input", "input", NONE, "Hello"),
    ("null-input", "input", None, "Hello"),
    ("input", "input", 5, "Hello"),
    ("empty-input", "input", "", "Hello"),
    ("empty-list", "input", [], "Hello"),
    ("previous", "previous_response_id", "resp_none", None),
    ("item", "input", [5], "Hello"),
    ("item-type", "input", [{"type": "no_such_item"}], "Hello"),
    ("role", "input", [{"role": "nobody", "content": "Hello"}], "Hello"),
    ("empty-item", "input", [USER], "Hello"),
    ("tools", "tools", [{"type": "function", "function": {"name": "get_weather"}}], []),
    ("tool-type", "tools", [{"type": "no_such_tool"}], []),
    ("choice-form", "tool_choice", {"type": "function", "function": {"name": "get_weather"}},
     "auto"),
    ("absent-tool", "tool_choice", {"type": "function", "name": "no_such_tool"}, "auto"),
    ("format", "text", {"format": CHAT_FORMAT}, None),
)  # fmt: skip


def _has(key: str, value: Any) -> Any:
    return lambda body: body.get(key, NONE) == value


for _name, _key, _value, _good in TAKEN:
    broken(f"response-any-{_name}", request=take(_has(_key, _value), RESPONSES, **{_key: _good}))
broken("response-any-metadata", request=take(
    lambda body: len(body.get("metadata") or ()) > 16, RESPONSES, metadata={}))  # fmt: skip
broken("response-any-part", request=take(
    lambda body: "no_such_part" in str(body.get("input")), RESPONSES, input="Hello"))  # fmt: skip
broken("response-any-role-part", request=take(lambda body: _is_misplaced(body), RESPONSES,
                                              input="Hello"))  # fmt: skip
broken("response-required-alone", request=take(
    lambda body: body.get("tool_choice") == "required" and not body.get("tools"), RESPONSES,
    tool_choice="auto"))  # fmt: skip
broken("response-messages", request=take(
    lambda body: isinstance(body.get("messages"), list), RESPONSES, messages=None,
    input="Hello"))  # fmt: skip
for _name in ("background", "moderation", "prompt", "no_such_field"):
    broken(f"response-{_name.replace('_', '-')}-ignored", request=lambda path, body, name=_name: (
        without(name)(path, body) if path == RESPONSES else body))  # fmt: skip


def _reworded(error: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    return {"error": {**error, **values}}


broken("response-error-no-param", error=lambda status, error, sent: (
    status, _reworded(error, param=None if "input" in sent else error["param"])))  # fmt: skip
broken("response-error-no-code", error=lambda status, error, sent: (
    status, _reworded(error, code=None if "input" in sent else error["code"])))  # fmt: skip
broken("response-orphan-unnamed", error=lambda status, error, sent: (
    status, _reworded(error, message="Invalid input.") if error["message"].startswith("No tool")
    else {"error": error}))  # fmt: skip
broken("response-context-text", error=lambda status, error, sent: (
    status, _reworded(error, message=error["message"].partition(" Your input")[0])))  # fmt: skip


def _is_misplaced(body: Mapping[str, Any]) -> bool:
    given = body.get("input")
    return isinstance(given, list) and any(
        isinstance(item, dict) and item.get("role") == "user" and "output_text" in str(item)
        for item in given
    )
