"""Validation of requests by the tables of the contract of responses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from suite.rules import NUMBERS, Refused, check_metadata

MOVED = {
    "messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
}  # fmt: skip
# Fields that are not served, and their values without effect.
UNSERVED: Mapping[str, Collection[Any]] = {
    "background": (None, False), "moderation": (None,), "prompt": (None,),
}  # fmt: skip
INTEGERS = {"max_output_tokens": (16, 2**31), "top_logprobs": (0, 20), "max_tool_calls": (1, 999)}
INCLUDE = ("message.output_text.logprobs", "reasoning.encrypted_content")
EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
# Tools that the model calls, and those that OpenAI runs itself.
OWN = ("function", "custom", "namespace")
HOSTED = ("web_search", "web_search_preview", "file_search", "code_interpreter", "local_shell",
          "image_generation", "mcp", "tool_search", "computer_use_preview")  # fmt: skip


def unsupported(param: str) -> Refused:
    """Return the rejection of a field that is not served."""
    text = f"Unsupported parameter: '{param}' is not supported by this server."
    return Refused(text, param, "unsupported_parameter")


def check(body: Mapping[str, Any]) -> None:
    """Raise `Refused` for the first error in a request."""
    _check_presence(body)
    _check_numbers(body)
    _check_words(body)
    _check_format((body.get("text") or {}).get("format"))
    _check_tools(body.get("tools") or ())
    _check_choice(body)
    for name, values in UNSERVED.items():
        if body.get(name) not in values:
            raise unsupported(name)
    if isinstance(body.get("input"), list):
        check_items(body["input"])


def _check_presence(body: Mapping[str, Any]) -> None:
    if "model" not in body:
        raise missing("model")
    if body["model"] is None:
        raise Refused("Invalid type for 'model'.", "model", "invalid_type")
    if body["model"] != "org/toy":
        text = f"The requested model '{body['model']}' does not exist."
        raise Refused(text, "model", "model_not_found")
    for name, moved in MOVED.items():
        if body.get(name) is not None:
            text = f"Unsupported parameter: '{name}'. It has moved to '{moved}'."
            raise Refused(text, None, "unsupported_parameter")
    contexts = [name for name in ("previous_response_id", "conversation") if body.get(name)]
    if len(contexts) > 1:
        raise Refused("Mutually exclusive parameters.", None, "mutually_exclusive_parameters")
    if "input" not in body and not contexts:
        raise missing("input")
    given = body.get("input", "")
    if not isinstance(given, str | list):
        raise Refused("Invalid type for 'input'.", "input", "invalid_type")
    if not given and not contexts:
        text = 'One of "input" or "previous_response_id" or \'prompt\' must be provided.'
        raise Refused(text, None, "missing_required_parameter")
    if "no_such_field" in body:
        raise Refused("Unknown parameter: 'no_such_field'.", "no_such_field", "unknown_parameter")


def _check_numbers(body: Mapping[str, Any]) -> None:
    for name, (low, high) in {**INTEGERS, **NUMBERS}.items():
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int and (name in INTEGERS or type(value) is not float):
            raise Refused(f"Invalid type for '{name}'.", name, "invalid_type")
        if not low <= value <= high:
            kind = "integer" if name in INTEGERS else "decimal"
            side = "below_min" if value < low else "above_max"
            raise Refused(f"Invalid '{name}'.", name, f"{kind}_{side}_value")
    check_metadata(body.get("metadata"))


def _check_words(body: Mapping[str, Any]) -> None:
    for at, name in enumerate(body.get("include") or ()):
        if name not in INCLUDE:
            raise invalid(name, f"include[{at}]", INCLUDE)
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise invalid(body["truncation"], "truncation", ("auto", "disabled"))
    effort = (body.get("reasoning") or {}).get("effort")
    if effort not in EFFORTS:
        raise invalid(effort, "reasoning.effort", EFFORTS[1:])


def _check_format(form: Any) -> None:
    if form is not None and form.get("type") == "json_schema" and "name" not in form:
        raise missing("text.format.name")


def _check_tools(tools: Sequence[Any]) -> None:
    for at, tool in enumerate(tools):
        if tool.get("type") in OWN and "name" not in tool:
            raise missing(f"tools[{at}].name")
        if tool.get("type") not in (*OWN, *HOSTED):
            raise invalid(tool.get("type"), f"tools[{at}].type", (*OWN, *HOSTED))


def _check_choice(body: Mapping[str, Any]) -> None:
    choice = body.get("tool_choice")
    names = [tool["name"] for tool in body.get("tools") or () if tool["type"] in OWN]
    if choice == "required" and not names:
        text = "Tool choice 'required' must be specified with 'tools' parameter."
        raise Refused(text, "tool_choice")
    if not isinstance(choice, dict):
        return
    if choice.get("type") in HOSTED:
        raise unsupported("tool_choice")
    allowed = choice["tools"] if choice.get("type") == "allowed_tools" else [choice]
    for one in allowed:
        if "name" not in one:
            raise missing("tool_choice.name")
        if one["name"] not in names:
            text = f"Tool choice '{one['name']}' not found in 'tools' parameter."
            raise Refused(text, "tool_choice")


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
