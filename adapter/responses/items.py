"""The items of responses and conversations: their ids, their lists, and the output of each call.

The id of an item contains that of its response, and its place. So a reference to an item needs no
table, and a stream, a plain response and the stored response have the same ids.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import orjson

from ...backends.errors import shortened
from ...schemas.openai.response_items import (
    LONGEST_ID,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
)
from ...schemas.openai.responses import ResponseRequest
from ..errors import InvalidRequest, missing
from ..store.records import Stored, new_id

# An id has 48 hexadecimal digits. Those of a response: the time, random digits, and a zero place.
_RANDOM, _PLACE = 30, 4
_NO_PLACE = "0" * _PLACE
_PREFIX = len("resp_")
# The places of a response's input items follow those of its output items.
_INPUT = 0x8000
_ITEM = re.compile(rf"[a-z]+_([0-9a-f]{{44}})([0-9a-f]{{{_PLACE}}})")
# The random digits before the place of a response may be the mark of the process that made it.
MARK = 8
_MARKED = re.compile(rf"resp_[0-9a-f]{{{44 - MARK}}}([0-9a-f]{{{MARK}}})0{{{_PLACE}}}")


class Place(NamedTuple):
    """The place of an item: its response, its index there, and if it is an item of the input."""

    response: str
    index: int  # type: ignore[assignment]
    is_input: bool


def new_response_id(mark: str = "") -> tuple[str, int]:
    """Return the id of a new response, and its time in microseconds since 1970.

    Args:
        mark: the `MARK` hexadecimal digits of this process, or empty.
    """
    start, created_at = new_id("resp_", _RANDOM - len(mark))
    return start + mark + _NO_PLACE, created_at


def mark_of(response: str) -> str:
    """Return the mark in the id of a response; it is random if the process has none.

    It is empty if the id is not one of ours.
    """
    match = _MARKED.fullmatch(response)
    return "" if match is None else match[1]


def named_mark(process: str) -> str:
    """Return the mark of a process that has a name, such as Ray Serve's id of a replica."""
    return hashlib.blake2b(process.encode(), digest_size=MARK // 2).hexdigest()


def item_id(prefix: str, response: str, index: int, is_input: bool = False) -> str:
    """Return the id of an item of a response.

    Args:
        prefix: `msg_`, `rs_`, `fc_`, `ctc_` …
        index: its index in the output, or in the input.
    """
    place = index + (_INPUT if is_input else 1)
    return f"{prefix}{response[_PREFIX:-_PLACE]}{place:04x}"


def place_of(item: str) -> Place | None:
    """Return the place of an item; None if the id is not one of ours."""
    match = _ITEM.fullmatch(item)
    place = 0 if match is None else int(match[2], 16)
    if match is None or not place:
        return None
    response = f"resp_{match[1]}{_NO_PLACE}"
    if place >= _INPUT:
        return Place(response, place - _INPUT, True)
    return Place(response, place - 1, False)


# The prefix of the id of an item that the client sent without one.
_PREFIXES: Mapping[str, str] = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
_OTHER = "item_"
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{LONGEST_ID}}}")
# Random digits of the id of an item that belongs to no response.
_RANDOM_DIGITS = 34


def items_of(given: Any) -> list[dict[str, Any]]:
    """Return the items of a request's `input`, as the client sent them.

    A text is one message, and an empty text no item.
    """
    if not given:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [*given]


def input_items(stored: Stored) -> list[dict[str, Any]]:
    """Return the input items of a stored response with ids, in their order.

    The content of a message is a list of parts (contract, section 4).
    """
    return _of_input(stored.id, stored.request.get("input"))


def _of_input(response: str, given: Any) -> list[dict[str, Any]]:
    """Return the items of an input, with an id each; a repeated id names the first item only."""
    found: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(items_of(given)):
        name_of = partial(item_id, response=response, index=index, is_input=True)
        one = normalized(item, name_of)
        if one["id"] in found:
            one = normalized({**item, "id": None}, name_of)
        found[one["id"]] = one
    return [*found.values()]


def turn_items(
    response: str, given: Any, output: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the items that a response adds to its conversation: of its input, then its output.

    Args:
        response: the id of the response.
        given: the `input` of its request.
    """
    return [*_of_input(response, given), *output]


def named(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that a client adds to a conversation, with ids."""
    return [normalized(item, lambda prefix: new_id(prefix, _RANDOM_DIGITS)[0]) for item in items]


def normalized(item: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """Return an item as lists show it: with its type, an id, a status, and parts.

    Args:
        name_of: returns the id, with a prefix, of an item whose client gave it none, or one that
            a path cannot have.
    """
    given = {name: value for name, value in item.items() if value is not None}
    kind = given.get("type") or "message"
    prefix = _PREFIXES.get(kind, _OTHER)
    name = given.pop("id", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        name = name_of(prefix)
    found: dict[str, Any] = {"id": name, "type": kind}
    if kind == "reasoning":
        found["summary"] = []
    else:
        found["status"] = "completed"
    found |= given
    if kind == "message":
        found["content"] = _parts(given["role"], given["content"])
    return found


def _parts(role: str, content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as parts."""
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
    return [
        {
            **_DEFAULTS.get(part["type"], {}),
            **{name: value for name, value in part.items() if value is not None},
        }
        for part in parts
    ]


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "output_text": {"annotations": [], "logprobs": []},
    "input_image": {"detail": "auto"},
}


def history(chain: Sequence[Stored]) -> list[dict[str, Any]]:
    """Return the items of stored responses: of each its input, and then its output."""
    return [
        item
        for stored in chain
        for item in (*items_of(stored.request.get("input")), *stored.reply["output"])
    ]


Call: TypeAlias = FunctionCallItem | CustomCallItem
Output: TypeAlias = FunctionOutputItem | CustomOutputItem


class Placed(NamedTuple):
    """An item and its path in the request; that of the field that names it if it is stored."""

    item: Item
    path: str


def stored_path(request: ResponseRequest, item: Item) -> str:
    """Return the path of a stored item, for errors: it begins with the field that names it."""
    context = "previous_response_id" if request.conversation is None else "conversation"
    return f"{context}[{getattr(item, 'id', None) or '?'}]"


class Answer(NamedTuple):
    """An output, and the path of its item."""

    item: Output
    path: str


def answers_of(items: Sequence[Placed]) -> Mapping[int, list[Answer]]:
    """Return the outputs of each call, by the call's index among the items.

    An output belongs to the call with its `call_id`, wherever that is. An output without one
    belongs to the oldest call of its function that has none yet. If several calls have one id, each
    gets one output.

    Raises:
        InvalidRequest: a call has no output, or an output has no call.
    """
    calls: dict[str, list[int]] = defaultdict(list)
    for index, (item, _) in enumerate(items):
        if isinstance(item, Call) and not is_cut(item):
            calls[item.call_id].append(index)
    found: dict[int, list[Answer]] = {index: [] for places in calls.values() for index in places}
    unnamed: list[tuple[int, Answer]] = []
    for index, (item, path) in enumerate(items):
        if not isinstance(item, Output):
            continue
        if item.call_id is None:
            unnamed.append((index, Answer(item, path)))
            continue
        places = calls.get(item.call_id)
        if not places:
            raise InvalidRequest(
                f"No tool call found for {_kind(item)} output with call_id "
                f"{shortened(item.call_id)}.",
                "input",
            )
        open_ = [place for place in places if not found[place]]
        found[open_[0] if open_ else places[-1]].append(Answer(item, path))
    for index, answer in unnamed:
        found[_oldest(items, found, index, answer)].append(answer)
    for index, answers in found.items():
        if not answers:
            call = items[index].item
            assert isinstance(call, Call)
            raise InvalidRequest(
                f"No tool output found for {_kind(call)} {shortened(call.call_id)}.", "input"
            )
    return found


def is_cut(call: Call) -> bool:
    """Return True for a call that the limit of tokens cut, so that it cannot be answered.

    The arguments of a function may be whole JSON nevertheless (contract, section 7).
    """
    if call.status != "incomplete":
        return False
    if not isinstance(call, FunctionCallItem):
        return True
    try:
        orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return True
    return False


def _oldest(
    items: Sequence[Placed], found: Mapping[int, list[Answer]], before: int, answer: Answer
) -> int:
    for index in sorted(found):
        call = items[index].item
        assert isinstance(call, Call)
        if not found[index] and index < before and call.name == answer.item.name:
            return index
    raise missing(f"{answer.path}.call_id")


def _kind(item: Call | Output) -> str:
    is_function = isinstance(item, FunctionCallItem | FunctionOutputItem)
    return "function call" if is_function else "custom tool call"
