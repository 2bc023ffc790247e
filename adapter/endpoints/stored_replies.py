"""Responses about stored chat completions, made from what the store returns (no I/O)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import orjson

from ...backends.errors import RequestError
from ...schemas.openai.chat import ChatRequest
from ...schemas.openai.stored import ListedMessage, StoredCompletion
from .. import dialects
from ..parts import LEVELS, Parts
from ..store.records import Stored

# The parameters of a request that its chat completion has, with OpenAI's defaults.
_PARAMETERS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "tools": None,
    "tool_choice": None,
    "response_format": None,
}
# The fields of a message that are only listed if the request has them.
_MORE = ("refusal", "tool_calls", "function_call", "tool_call_id")


def completion(stored: Stored) -> Sequence[bytes]:
    """Return a stored chat completion as JSON in parts."""
    return as_json(completion_of(stored))


def as_json(value: Mapping[str, Any]) -> Sequence[bytes]:
    """Return an object as JSON in parts."""
    parts = Parts()
    parts.add_value(value, LEVELS - 1)
    return parts.end()


class Listed(NamedTuple):
    """An element of a list: its id, and its JSON in parts."""

    id: str
    parts: Sequence[bytes]


def listed_completion(stored: Stored) -> Listed:
    """Return a stored chat completion as an element of a list."""
    return Listed(stored.id, completion(stored))


def joined(found: Sequence[Listed], has_more: bool) -> Sequence[bytes]:
    """Return OpenAI's envelope of a list of encoded elements as JSON in parts."""
    parts = Parts()
    parts.add(b'{"object":"list","data":[')
    for index, one in enumerate(found):
        parts.add(b"," if index else b"")
        for part in one.parts:
            parts.add(part)
    parts.add(b"]")
    parts.add(_ends([one.id for one in found], has_more, None))
    return parts.end()


def messages(stored: Stored, after: int | None, limit: int, descending: bool) -> Sequence[bytes]:
    """Return a list of the messages of a request as JSON in parts.

    Args:
        after: the number of the message before the page; None for the first page.
    """
    sent = stored.request["messages"]
    order = range(len(sent))[::-1] if descending else range(len(sent))
    if after is not None:
        order = order[order.index(after) + 1 :]
    page = [message_of(stored.id, number, sent[number]) for number in order[:limit]]
    return page_of(page, len(order) > limit)


def message_number(stored: Stored, name: str) -> int | None:
    """Return the number of the message with an id; None if the request has no such message."""
    count = len(stored.request["messages"])
    start, _, digits = name.rpartition("-")
    if start != stored.id or not digits.isdecimal() or len(digits) > len(str(count)):
        return None
    number = int(digits)
    return number if number < count and str(number) == digits else None


def completion_of(stored: Stored) -> StoredCompletion:
    """Return a stored chat completion with the parameters of its request."""
    sent = _translated(stored.request)
    parameters = {
        name: default if sent.get(name) is None else sent[name]
        for name, default in _PARAMETERS.items()
    }
    reply = stored.reply
    shown = {
        **reply,
        "choices": [{**one, "message": _with_calls(one["message"])} for one in reply["choices"]],
        "service_tier": reply.get("service_tier", "default"),
        "request_id": stored.request_id,
        **parameters,
        "input_user": sent.get("user"),
        "metadata": stored.metadata,
    }
    return cast(StoredCompletion, shown)


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of a response in which a call that it lacks is null."""
    return {**message, **{name: message.get(name) for name in ("tool_calls", "function_call")}}


def message_of(name: str, number: int, message: Mapping[str, Any]) -> ListedMessage:
    """Return a message of the request for a chat completion with the id `name`."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        texts = [part["text"] for part in parts if part.get("type") == "text"]
        content = "".join(texts) if texts else None
    listed = {
        "id": f"{name}-{number}",
        "role": message["role"],
        "content": content,
        "name": message.get("name"),
        "content_parts": parts,
        **{name: message[name] for name in _MORE if name in message},
    }
    return cast(ListedMessage, listed)


def _translated(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request with Latimer's own fields instead of those of other servers."""
    extra = {name: request[name] for name in request.keys() - ChatRequest.model_fields.keys()}
    try:
        draft = dialects.replaced(request, extra, "chat") if extra else None
    except RequestError:
        # An earlier version of the server accepted the request.
        return request
    return request if draft is None else draft.body


def page_of(items: Sequence[Any], has_more: bool, empty: str | None = None) -> Sequence[bytes]:
    """Return OpenAI's envelope of a list as JSON in parts.

    Args:
        empty: the first and the last id of an empty list.
    """
    parts = Parts()
    parts.add(b'{"object":"list","data":')
    parts.add_value(items)
    parts.add(_ends([item["id"] for item in items], has_more, empty))
    return parts.end()


def _ends(ids: Sequence[str], has_more: bool, empty: str | None) -> bytes:
    """Return the end of the envelope of a list with these ids."""
    ends = {
        "first_id": ids[0] if ids else empty,
        "last_id": ids[-1] if ids else empty,
        "has_more": has_more,
    }
    return b"," + orjson.dumps(ends)[1:]
