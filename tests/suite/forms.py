"""Validation of tools and response formats by the contract's tables."""

from __future__ import annotations

import re
from typing import Any

from suite import calls, schema
from suite.rules import Refused

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FORMS = ("text", "json_object", "json_schema", "regex", "grammar")
CHOICES = ("none", "auto", "required")


def check(body: dict[str, Any]) -> None:
    """Raise `Refused` for the first error in a request."""
    _check_tools(body.get("tools"))
    _check_choice(body)
    _check_form(body.get("response_format"))


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if len(tools) > 128:
        raise Refused("Invalid 'tools': array too long.", "tools", "array_above_max_length")
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            raise Refused("Invalid value.", f"tools[{at}].type", "invalid_value")
        function = tool.get(kind) or {}
        if not NAME.fullmatch(str(function.get("name", ""))):
            raise Refused("Invalid name.", f"tools[{at}].{kind}.name", "invalid_value")
        _check_custom(function.get("format"), at)
        parameters = function.get("parameters")
        if parameters is not None and schema.problem(parameters):
            raise Refused("Invalid schema.", f"tools[{at}].function.parameters", "invalid_type")


def _check_custom(form: Any, at: int) -> None:
    """Raise `Refused` unless the format of a custom tool is text or a valid grammar."""
    if form is None or form.get("type") == "text":
        return
    where = f"tools[{at}].custom.format"
    if form.get("type") != "grammar":
        raise Refused("Invalid value.", f"{where}.type", "invalid_value")
    if form["grammar"].get("syntax") not in ("lark", "regex"):
        raise Refused("Invalid value.", f"{where}.grammar.syntax", "invalid_value")
    try:
        calls.input_of(form)
    except ValueError as error:
        raise Refused(f"Invalid grammar: {error}.", f"{where}.grammar.definition") from None


def _check_choice(body: dict[str, Any]) -> None:
    choice = body.get("tool_choice")
    if choice is None:
        return
    if not body.get("tools"):
        raise Refused("'tool_choice' is only allowed with 'tools'.", "tool_choice")
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise Refused("Invalid 'tool_choice'.", "tool_choice", "invalid_value")
        return
    if choice.get("type") == "allowed_tools":
        return
    names = [tool[tool["type"]]["name"] for tool in body["tools"]]
    if choice[choice["type"]]["name"] not in names:
        raise Refused("'tool_choice' names no tool.", "tool_choice", "invalid_value")


def _check_form(form: Any) -> None:
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") not in FORMS:
        raise Refused("Invalid 'response_format'.", "response_format", "invalid_value")
    if form["type"] != "json_schema" or "schema" in form:
        return
    inner = form.get("json_schema")
    if not isinstance(inner, dict) or not NAME.fullmatch(str(inner.get("name", ""))):
        raise Refused("Invalid name.", "response_format.json_schema.name", "invalid_value")
    problem = schema.problem(inner.get("schema", {}))
    if problem:
        raise Refused(f"Invalid schema: {problem}.", "response_format")
