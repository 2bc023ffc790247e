"""Anthropic's error object and its words (contract of messages, 2.2, 2.3 and 11.1).

An error names a field by its path with dots, `messages.0.content.1`, at the start of its message.
Clients read some of the messages: Claude Code compacts a conversation only after `_TOO_LONG`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import orjson
from starlette.types import Scope

from ...backends.errors import (
    MOST_MESSAGE,
    Busy,
    ContextExceeded,
    LatimerError,
    RequestError,
    shortened,
)
from ..errors import Header, InvalidRequest, UnknownModel, render, with_names

if TYPE_CHECKING:
    from ...schemas.openai.common import ErrorReply

# The header that every client of Anthropic's API sends.
VERSION = b"anthropic-version"
_PATH = re.compile(r"(?:.*/v1)?/+messages(?:/.*)?")
# OpenAI's path of the messages of a stored chat completion.
_OF_CHAT = "/chat/completions/"

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Anthropic's statuses for those of OpenAI: an engine that is not available, and one that failed.
_STATUSES: Mapping[int, int] = {503: 529, 502: 500}
_OVERLOADED, _UNEXPECTED = 529, 500

_TOO_LONG = "prompt is too long: {count} tokens > {most} maximum"
_NO_KEY = "invalid x-api-key"

# The names that fields of chat have here.
NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
# The starts of OpenAI's messages, which name the field first.
_STARTS = (
    (re.compile(r"Missing required parameter: '[^']*'\."), "Field required"),
    (re.compile(r"Invalid (?:value|type) for '[^']*': "), ""),
    (re.compile(r"Invalid '[^']*': "), ""),
    (re.compile(r"Unsupported parameter: '[^']*' is "), ""),
    (re.compile(r"Unknown parameter: '[^']*'\."), "Extra inputs are not permitted."),
)
# The same of messages about the body, which have no field.
_OF_BODY = (
    (
        re.compile(r"We could not parse the JSON body of your request\. \(HINT: [^)]*\) "),
        "The request body is not a valid JSON object. ",
    ),
)
_INDEX = re.compile(r"\.?\[(\d+)\]")
_SCHEMA = re.compile(r"^(tools\.\d+)\.parameters")
_NOTHING: Mapping[str, str] = MappingProxyType({})


class ThreadRefused(InvalidRequest):
    """A request that continues another one; the client sends the whole conversation instead."""

    details: Mapping[str, str] = {"error_code": "thread_unsupported_request"}

    def __init__(self) -> None:
        super().__init__("thread: This server keeps no threads. Send all messages instead.")


def speaks_anthropic(scope: Scope) -> bool:
    """Return True if the client of a request reads Anthropic's errors."""
    path: str = scope["path"]
    if _PATH.fullmatch(path) and _OF_CHAT not in path:
        return True
    return any(name == VERSION for name, _ in scope["headers"])


def render_as(scope: Scope, error: LatimerError, request_id: str) -> tuple[int, Any, list[Header]]:
    """Return the status, the body and the headers of an error, in the form of a request's API."""
    if not speaks_anthropic(scope):
        return render(error)
    status, body, headers = anthropic_error(error, request_id)
    return status, body, [_id_header(request_id), *headers]


def anthropic_error(
    error: LatimerError, request_id: str
) -> tuple[int, dict[str, Any], list[Header]]:
    """Return the status, the body and the headers of an error."""
    status, reply, headers = render(error)
    status = _OVERLOADED if isinstance(error, Busy) else _STATUSES.get(status, status)
    message = reply["error"]["message"]
    if isinstance(error, UnknownModel):
        message = f"model: {error.name}"
    elif status == 401:
        message = _NO_KEY
    else:
        message = _worded(message, reply["error"]["param"])
    body = body_of(status, message, request_id)
    if isinstance(error, ThreadRefused):
        body["error"]["details"] = error.details
    return status, body, headers


def _id_header(request_id: str) -> Header:
    return b"request-id", request_id.encode()


def in_api_of(
    scope: Scope, status: int, reply: ErrorReply, request_id: str
) -> tuple[Any, list[Header]]:
    """Return the body and the headers of an unexpected error, in the form of a request's API."""
    if not speaks_anthropic(scope):
        return reply, []
    headers = [_id_header(request_id)]
    if status == _UNEXPECTED:
        # Anthropic's clients would send the request again.
        headers.append((b"x-should-retry", b"false"))
    return body_of(status, reply["error"]["message"], request_id), headers


def body_of(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = shortened(message, MOST_MESSAGE)
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def error_event(error: LatimerError, request_id: str) -> bytes:
    """Return the event that ends a stream with an error."""
    _status, body, _headers = anthropic_error(error, request_id)
    del body["request_id"]
    return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"


def in_messages(error: LatimerError, names: Mapping[str, str] = _NOTHING) -> LatimerError:
    """Return an error that names the fields of a Messages request.

    Args:
        names: the path in the request for each path in chat's messages that differs.
    """
    if isinstance(error, ContextExceeded):
        count = error.prompt_tokens
        if count >= error.context:
            # A prompt that fills the context leaves no room for an answer.
            most = min(error.context, count - 1)
            return InvalidRequest(_TOO_LONG.format(count=count, most=most))
        total = f"{count} + {error.max_tokens} > {error.context}"
        return InvalidRequest(f"input length and `max_tokens` exceed context limit: {total}")
    if not isinstance(error, RequestError) or isinstance(error, UnknownModel):
        return error
    return with_names(error, {**names, **NAMES})


def dotted(path: str) -> str:
    """Return a path as Anthropic writes it: `messages.0.content.1`."""
    return _SCHEMA.sub(r"\1.input_schema", _INDEX.sub(r".\1", path))


def _worded(message: str, param: str | None) -> str:
    """Return a message with the path of its field, if it has one, in front."""
    for start, instead in _STARTS if param else _OF_BODY:
        match = start.match(message)
        if match is not None:
            message = instead + message[match.end() :]
            break
    return f"{dotted(param)}: {message}" if param else message
