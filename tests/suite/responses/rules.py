"""Validation of requests by the tables of the contract of responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from suite.responses.items import check_items, invalid, missing
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
    if body.get("truncation") == "auto":
        raise unsupported("truncation")
    if body.get("truncation") not in (None, "disabled"):
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
