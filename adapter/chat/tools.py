"""The tools of a chat request, and the rules for calling them (contract 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from ...backends.base import Grammar
from ...backends.errors import shortened
from ...backends.grammar import Unenforced
from ...schemas.openai.common import FinishReason
from ...schemas.openai.messages import (
    AssistantMessage,
    Function,
    FunctionMessage,
    Message,
    ToolMessage,
)
from ..errors import InvalidRequest

Mode = Literal["auto", "required", "named"]


class ToolSet(NamedTuple):
    """The tools that a model may call.

    Args:
        functions: the functions that may be called, each with its index in the request.
        listed: all functions that the model sees.
        parallel: True if one message may contain several calls.
        legacy: True if the request has the deprecated `functions`.
        custom: the custom tools, which the model sees as functions with one string argument, by
            name; each with the grammar of its input, or None.
    """

    functions: Sequence[tuple[int, Function]]
    listed: Sequence[Function]
    mode: Mode
    parallel: bool
    legacy: bool
    custom: Mapping[str, Grammar | None] = MappingProxyType({})

    @property
    def called(self) -> FinishReason:
        """The finish reason of a message with calls (measured: contract 3.3)."""
        if self.mode == "named":
            return "stop"
        return "function_call" if self.legacy else "tool_calls"

    def path(self, index: int) -> str:
        """Return the path of a function in the request."""
        if self.legacy:
            return f"functions[{index}]"
        kind = "custom" if self.listed[index].name in self.custom else "function"
        return f"tools[{index}].{kind}"


def wrong_schema(name: str, error: Unenforced, param: str) -> InvalidRequest:
    """Return the error for parameters that are not a valid schema, or cannot be enforced."""
    return InvalidRequest(
        f"Invalid schema for function '{shortened(name)}': In context={error.context}, "
        f"{error.reason}.",
        param,
    )


def check_calls(messages: Sequence[Message]) -> None:
    """Check that every call has its result, and every result its call (contract 3.2).

    Raises:
        InvalidRequest: a call or a result is missing; the message is OpenAI's.
    """
    open_ids: list[str] = []
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in open_ids:
                before = _call_before(messages, index)
                if before is None or message.tool_call_id not in _ids(before):
                    raise InvalidRequest(
                        "Invalid parameter: messages with role 'tool' must be a response to a "
                        "preceeding message with 'tool_calls'.",
                        f"messages.[{index}].role",
                    )
            else:
                open_ids.remove(message.tool_call_id)
            continue
        if open_ids:
            raise _unanswered(open_ids, index)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            open_ids = list(dict.fromkeys(_ids(message)))
    if open_ids:
        raise _unanswered(open_ids, len(messages))


def _unanswered(ids: Sequence[str], index: int) -> InvalidRequest:
    return InvalidRequest(
        "An assistant message with 'tool_calls' must be followed by tool messages responding "
        "to each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        f"{shortened(', '.join(ids))}",
        f"messages.[{index}].role",
    )


def _ids(message: AssistantMessage) -> list[str]:
    return [call.id for call in message.tool_calls or ()]


def _call_before(messages: Sequence[Message], index: int) -> AssistantMessage | None:
    """Return the message whose calls a run of results answers, or None."""
    while index and isinstance(messages[index - 1], ToolMessage | FunctionMessage):
        index -= 1
    found = messages[index - 1] if index else None
    return found if isinstance(found, AssistantMessage) and found.tool_calls else None
