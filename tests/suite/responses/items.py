"""The items of requests: their validation, and their form in lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from suite.rules import Refused

ROLES = ("assistant", "system", "developer", "user")
# The prefix of the id of an item, by the item's type.
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
ITEMS = (*PREFIXES, "item_reference", "web_search_call", "additional_tools")
USER_PARTS = ("input_text", "input_image", "input_file", "input_audio")
ASSISTANT_PARTS = ("output_text", "refusal")
CALLS = ("function_call", "custom_tool_call")
_numbers = itertools.count(1)


def missing(param: str) -> Refused:
    """Return the rejection of a request without a field."""
    return Refused(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def invalid(value: Any, param: str, words: Sequence[Any]) -> Refused:
    """Return the rejection of a value that is not one of several words."""
    text = f"Invalid value: '{value}'. Supported values are: {', '.join(map(repr, words))}."
    return Refused(text, param, "invalid_value")


def new_id(kind: str) -> str:
    """Return the id of a new item of a type."""
    return f"{PREFIXES.get(kind, 'item')}_{next(_numbers):048x}"


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item, which a client may omit."""
    if item.get("type") is not None:
        return str(item["type"])
    return "item_reference" if "role" not in item and "id" in item else "message"


def check_items(items: Sequence[Any]) -> None:
    """Raise `Refused` for the first item that is malformed."""
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if not isinstance(item, dict):
            raise Refused(f"Invalid type for '{where}'.", where, "invalid_type")
        if kind_of(item) not in ITEMS:
            raise invalid(item["type"], where, ITEMS)
        if kind_of(item) == "message":
            _check_message(item, where)


def _check_message(item: Mapping[str, Any], where: str) -> None:
    if item.get("role") not in ROLES:
        raise invalid(item.get("role"), where, ROLES)
    if item.get("content") is None:
        raise missing(f"{where}.content")
    allowed = ASSISTANT_PARTS if item["role"] == "assistant" else USER_PARTS
    for at, part in enumerate(item["content"] if isinstance(item["content"], list) else ()):
        here = f"{where}.content[{at}]"
        if part.get("type") not in (*USER_PARTS, *ASSISTANT_PARTS):
            raise invalid(part.get("type"), f"{here}.type", (*USER_PARTS, *ASSISTANT_PARTS))
        if part["type"] not in allowed:
            raise invalid(part["type"], here, allowed)
        if part.get("file_id"):
            text = f"Unsupported parameter: '{here}.file_id' is not supported by this server."
            raise Refused(text, f"{here}.file_id", "unsupported_parameter")


def check_calls(items: Iterable[Mapping[str, Any]]) -> None:
    """Raise `Refused` for a call without output, or an output without call."""
    listed = [*items]
    calls = {item["call_id"] for item in listed if kind_of(item) in CALLS}
    outputs = {item["call_id"]: item for item in listed if kind_of(item).endswith("_output")}
    for name, item in outputs.items():
        if name not in calls:
            what = "custom tool" if kind_of(item).startswith("custom") else "function"
            text = f"No tool call found for {what} call output with call_id {name}."
            raise Refused(text, "input")
    for name in calls - outputs.keys():
        raise Refused(f"No tool output found for function call {name}.", "input")


def items_of(given: Any) -> list[dict[str, Any]]:
    """Return the items of an input; a text is one message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}] if given else []
    return [*given]


def listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as lists show it: with its type, an id, a status and parts."""
    kind = kind_of(item)
    name = item.get("id") or new_id(kind)
    found = {"status": "completed", **item, "type": kind, "id": name}
    if kind == "message":
        found["content"] = parts_of(item)
    if kind == "reasoning":
        found.setdefault("summary", [])
    return found


def parts_of(item: Mapping[str, Any]) -> list[Any]:
    """Return the content of a message as parts."""
    said = item["role"] == "assistant"
    content = item["content"]
    if isinstance(content, str):
        content = [{"type": "output_text" if said else "input_text", "text": content}]
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if said else {}
    return [{**more, **part} for part in content]


def replaced(
    items: Iterable[dict[str, Any]], find: Callable[[str], dict[str, Any] | None], store: Any
) -> list[dict[str, Any]]:
    """Return items with stored items instead of references to them."""
    found = []
    for item in items:
        if kind_of(item) != "item_reference":
            found.append(item)
            continue
        target = find(item["id"])
        if target is None:
            text = f"Item with id '{item['id']}' not found."
            if store is False:
                text += " Items are not persisted when `store` is set to false."
            raise Refused(text, "input", None, 404)
        found.append(target)
    return found
