"""Every error as OpenAI's error object, with its status and headers (contract 1.3 and 1.4)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson
from pydantic import ValidationError

from ..backends.errors import (
    MOST_MESSAGE,
    Busy,
    ContextExceeded,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    RequestError,
    shortened,
)
from ..schemas.openai.common import ErrorReply, kind_of

Header = tuple[bytes, bytes]

# What ends a stream of events.
DONE = b"data: [DONE]\n\n"

_LATER: tuple[Header, ...] = ((b"retry-after-ms", b"1000"), (b"retry-after", b"1"))


class MethodNotAllowed(RequestError):
    """A known path, asked with a method that it does not have."""

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"Not allowed to {shortened(f'{method} on {path}')}. (HINT: Perhaps you meant to use a "
            "different HTTP method?)",
            status=405,
        )
        self.allowed = tuple(allowed)


class ShuttingDown(LatimerError):
    """The server ends, and the request with it; another server, or this one later, may answer."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down. Send the request again later.")


def render(error: LatimerError) -> tuple[int, ErrorReply, list[Header]]:
    """The status, body and extra headers that a client gets for an error."""
    headers: list[Header] = []
    if isinstance(error, RequestError):
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", ", ".join(error.allowed).encode()))
        if error.status == 413:
            headers.append((b"connection", b"close"))
        body = _body(error.message, "invalid_request_error", error.param, error.code)
        return error.status, body, headers
    if isinstance(error, Busy):
        milliseconds = max(int(error.retry_after * 1000), 1)
        headers.append((b"retry-after-ms", str(milliseconds).encode()))
        headers.append((b"retry-after", str(-(-milliseconds // 1000)).encode()))
        return 429, _body(error.message, "requests", None, "rate_limit_exceeded"), headers
    if isinstance(error, EngineUnavailable):
        body = _body(error.message, "service_unavailable_error", None, "engine_unavailable")
        return 503, body, [*_LATER]
    if isinstance(error, ShuttingDown):
        body = _body(error.message, "service_unavailable_error", None, "server_shutting_down")
        return 503, body, [*_LATER, (b"connection", b"close")]
    if isinstance(error, EngineSilent):
        return 504, _body(error.message, "server_error", None, "engine_timeout"), headers
    return 502, _body(error.message, "server_error", None, "engine_error"), headers


def error_event(error: LatimerError) -> bytes:
    """An error in mid-stream, as the SDK notices it, and the end (contract 1.7)."""
    _status, body, _headers = render(error)
    return b"data: " + orjson.dumps(body) + b"\n\n" + DONE


def unexpected() -> tuple[int, ErrorReply]:
    """The answer to a mistake of our own."""
    message = (
        "The server had an error while processing your request. Sorry about that! The server's log "
        "says more."
    )
    return 500, _body(message, "server_error", None, None)


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorReply:
    message = shortened(message, MOST_MESSAGE)
    param = None if param is None else shortened(param)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def chat_context_error(error: ContextExceeded) -> RequestError:
    """The same error in the words that the chat endpoint uses."""
    start = f"This model's maximum context length is {error.context} tokens. However, "
    more = "at least " if error.at_least else ""
    if error.max_tokens:
        message = (
            f"{start}you requested {more}{error.prompt_tokens + error.max_tokens} tokens "
            f"({more}{error.prompt_tokens} in the messages, {error.max_tokens} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    else:
        message = (
            f"{start}your messages resulted in {more}{error.prompt_tokens} tokens. Please reduce "
            "the length of the messages."
        )
    return RequestError(message, "messages", error.code)


_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a decimal number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def from_validation(error: ValidationError, body: Any) -> RequestError:
    """The first thing that is wrong with a body, in OpenAI's words (contract 1.2)."""
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "missing"), details[0])
    kind, value = first["type"], first["input"]
    context: dict[str, Any] = first.get("ctx") or {}
    path = _path(first["loc"], body, kind == "missing")
    if kind == "openai":
        path = shortened(path + context["path"])
        return RequestError(context["text"].replace("{param}", path), path, context["code"] or None)
    if kind == "missing":
        if path == "model":
            return RequestError("you must provide a model parameter")
        message = f"Missing required parameter: '{path}'."
        return RequestError(message, path, "missing_required_parameter")
    if kind in _TYPES:
        message = (
            f"Invalid type for '{path}': expected {_TYPES[kind]}, but got {kind_of(value)} instead."
        )
        return RequestError(message, path, "invalid_type")
    return _bounds(kind, path, value, context) or _choices(kind, path, value, context)


def _bounds(kind: str, path: str, value: Any, context: dict[str, Any]) -> RequestError | None:
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        number = "integer" if isinstance(value, int) else "decimal"
        low = kind.startswith("greater")
        sign = (">" if low else "<") + ("=" if kind.endswith("equal") else "")
        bound = context["ge" if "ge" in context else next(iter(context))]
        bound = int(bound) if float(bound).is_integer() else bound
        side, word = ("below", "minimum") if low else ("above", "maximum")
        return RequestError(
            f"Invalid '{path}': {number} {side} {word} value. Expected a value {sign} {bound}, but "
            f"got {value} instead.",
            path,
            f"{number}_{side}_{word[:3]}_value",
        )
    if kind in ("too_long", "string_too_long"):
        noun, article = ("string", "a") if kind == "string_too_long" else ("array", "an")
        size = len(value)
        if isinstance(value, dict):
            noun, article = "object", "an"
        code = "object_above_max_properties" if noun == "object" else f"{noun}_above_max_length"
        return RequestError(
            f"Invalid '{path}': {noun} too long. Expected {article} {noun} with maximum length "
            f"{context['max_length']}, but got {article} {noun} with length {size} instead.",
            path,
            code,
        )
    if kind == "too_short":
        return RequestError(
            f"Invalid '{path}': empty array. Expected an array with minimum length "
            f"{context['min_length']}, but got an empty array instead.",
            path,
            "empty_array",
        )
    if kind == "string_too_short":
        return RequestError(
            f"Invalid '{path}': empty string. Expected a string with minimum length "
            f"{context['min_length']}, but got an empty string instead.",
            path,
            "empty_string",
        )
    return None


def _choices(kind: str, path: str, value: Any, context: dict[str, Any]) -> RequestError:
    if kind in ("literal_error", "union_tag_invalid"):
        if kind == "union_tag_invalid":
            field = context["discriminator"].strip("'")
            path = f"{path}.{field}" if path else field
            value, listed = context["tag"], context["expected_tags"]
        else:
            listed = context["expected"].replace(" or ", ", ")
        words = re.findall(r"'[^']*'", listed)
        supported = ", ".join(words[:-1]) + f"{',' * (len(words) > 2)} and {words[-1]}"
        if len(words) == 1:
            supported = words[0]
        shown = shortened(value) if isinstance(value, str) else kind_of(value)
        return RequestError(
            f"Invalid value: '{shown}'. Supported values are: {supported}.", path, "invalid_value"
        )
    if kind == "union_tag_not_found":
        field = context["discriminator"].strip("'")
        if isinstance(value, dict):
            path = f"{path}.{field}"
            return RequestError(
                f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
            )
        return RequestError(
            f"Invalid type for '{path}': expected an object, but got {kind_of(value)} instead.",
            path,
            "invalid_type",
        )
    if kind == "string_pattern_mismatch":
        return RequestError(
            f"Invalid '{path}': string does not match pattern. Expected a string that matches the "
            f"pattern '{context['pattern']}'.",
            path,
            "invalid_value",
        )
    return RequestError(f"Invalid '{path}': the value is not allowed here.", path, "invalid_value")


def _path(loc: tuple[int | str, ...], body: Any, missing: bool) -> str:
    """The field's path as OpenAI writes it: `messages[0].content[1].type`.

    Tags of unions stand in pydantic's location too; what is not a key of the value at that place
    is one, but for the name of a missing field.
    """
    path, here = "", body
    for position, step in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(step, int) and isinstance(here, list) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
        elif isinstance(here, dict) and step in here:
            path, here = f"{path}.{step}" if path else str(step), here[step]
        elif last and missing:
            path = f"{path}.{step}" if path else str(step)
    return shortened(path)
