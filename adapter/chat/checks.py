"""Checks of messages that the schema cannot express (contract 3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...backends.errors import Unsupported, shortened
from ...schemas import limits
from ...schemas.openai.messages import (
    NO_CONTENT,
    THOUGHTS,
    AssistantMessage,
    FunctionMessage,
    Message,
    ToolMessage,
)
from .. import dialects
from ..errors import InvalidRequest

_LEAVE_OUT = "Omit it."


def check_messages(messages: Sequence[Message], engine: str) -> None:
    """Reject messages that a chat template would silently omit, or that are too many.

    Raises:
        InvalidRequest: a message has no content, a call has no result, or the parts are too many.
        Unsupported: a message has audio of the assistant.
    """
    for index, message in enumerate(messages):
        if message.__pydantic_extra__:
            _check_extra(message.__pydantic_extra__, f"messages[{index}]")
        if isinstance(message, AssistantMessage):
            here = f"messages[{index}]"
            if message.audio is not None:
                raise Unsupported(f"{here}.audio", engine, _LEAVE_OUT)
            thought = message.thought
            if thought:
                _check_thoughts(message, here)
            said = (
                message.content, message.refusal, message.tool_calls or None,
                message.function_call, thought,
            )  # fmt: skip
            if all(one is None for one in said):
                if "content" in message.__pydantic_fields_set__:
                    raise InvalidRequest(NO_CONTENT, f"messages.[{index}].content")
                raise InvalidRequest(
                    f"Missing required parameter: '{here}.content'.",
                    f"{here}.content",
                    "missing_required_parameter",
                )
    check_count([message.content for message in messages], "messages")
    check_calls(messages)


def _check_extra(extra: Mapping[str, Any], here: str) -> None:
    """Reject fields of other servers that would change the answer."""
    for name, hint in dialects.REFUSED_IN_MESSAGES.items():
        if extra.get(name):
            raise dialects.unsupported(f"{here}.{name}", hint)


def _check_thoughts(message: AssistantMessage, here: str) -> None:
    """Reject reasoning that differs between the fields of one message."""
    given = [name for name in THOUGHTS if getattr(message, name)]
    for name in given[1:]:
        if getattr(message, name) != getattr(message, given[0]):
            raise InvalidRequest(
                f"Invalid '{here}.{name}': it differs from '{given[0]}' of the same message. Send "
                "only one of them.",
                f"{here}.{name}",
                "invalid_value",
            )


def check_count(contents: Iterable[object], field: str) -> None:
    """Reject more content parts than are allowed in a request.

    Args:
        contents: the content of each message: a string, or a list of parts.
    """
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > limits.PARTS.most:
        raise InvalidRequest(
            f"Invalid '{field}': it has {parts} content parts; at most {limits.PARTS.most} "
            "are allowed. Send fewer, larger parts.",
            field,
            "array_above_max_length",
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
