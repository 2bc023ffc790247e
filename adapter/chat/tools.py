"""The tools of a chat request, and the rules for calling them (contract 3.1 and 3.2)."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from ...backends.base import Grammar
from ...backends.errors import shortened
from ...backends.grammar import Unenforced, check_schema
from ...schemas.openai.common import FinishReason
from ...schemas.openai.messages import Function
from ..errors import InvalidRequest

Mode = Literal["auto", "required", "named"]


class ToolSet(NamedTuple):
    """The tools that a model may call.

    Args:
        functions: the functions that may be called, each with its index in the request.
        listed: all functions that the model sees.
        parallel: True if one message may contain several calls.
        legacy: True if the request has the deprecated `functions`.
        paths: the path of each listed function in the request.
        custom: the custom tools, which the model sees as functions with one string argument, by
            name; each with the grammar of its input, or None.
    """

    functions: Sequence[tuple[int, Function]]
    listed: Sequence[Function]
    mode: Mode
    parallel: bool
    legacy: bool
    paths: Sequence[str]
    custom: Mapping[str, Grammar | None] = MappingProxyType({})

    @property
    def called(self) -> FinishReason:
        """The finish reason of a message with calls (measured: contract 3.3)."""
        if self.mode == "named":
            return "stop"
        return "function_call" if self.legacy else "tool_calls"


class Offered(NamedTuple):
    """A tool of a request, as the model sees it.

    Args:
        path: its path in the request.
        is_custom: True for a custom tool.
        input: the grammar of a custom tool's input, or None.
    """

    function: Function
    path: str
    is_custom: bool = False
    input: Grammar | None = None


def tool_set_of(
    offered: Sequence[Offered],
    mode: Mode,
    chosen: Container[str] | None = None,
    parallel: bool = True,
    legacy: bool = False,
) -> ToolSet:
    """Return the tools that a model may call.

    Args:
        chosen: the names of the tools that may be called; None for all.

    Raises:
        InvalidRequest: parameters are not a valid JSON schema.
    """
    for one in offered:
        if one.function.parameters is not None and not one.is_custom:
            _check(one.function, f"{one.path}.parameters")
    listed = [one.function for one in offered]
    return ToolSet(
        [(i, own) for i, own in enumerate(listed) if chosen is None or own.name in chosen],
        listed,
        mode,
        parallel and mode != "named",
        legacy,
        [one.path for one in offered],
        {one.function.name: one.input for one in offered if one.is_custom},
    )


def _check(function: Function, param: str) -> None:
    try:
        check_schema(function.parameters)
    except Unenforced as error:
        raise wrong_schema(function.name, error, param) from None
    kind = (function.parameters or {}).get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        # OpenAI's message.
        reason = "schema must be a JSON Schema of 'type: \"object\"'"
        raise _wrong(function.name, f"{reason}, got 'type: {json.dumps(kind)}'", param)


def wrong_schema(name: str, error: Unenforced, param: str) -> InvalidRequest:
    """Return the error for parameters that are not a valid schema, or cannot be enforced."""
    return _wrong(name, f"In context={error.context}, {error.reason}", param)


def _wrong(name: str, reason: str, param: str) -> InvalidRequest:
    message = f"Invalid schema for function '{shortened(name)}': {reason}."
    return InvalidRequest(message, param, "invalid_function_parameters")
