"""The items of stored responses and conversations, as lists show them (no I/O)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ...schemas.openai.response_items import LONGEST_ID
from ..store.records import Stored, new_id
from .ids import item_id

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
_RANDOM = 34


def items_of(given: Any) -> list[dict[str, Any]]:
    """Return the items of a request's `input`, as the client sent them; a text is one message."""
    if given is None:
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
    return [normalized(item, lambda prefix: new_id(prefix, _RANDOM)[0]) for item in items]


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
