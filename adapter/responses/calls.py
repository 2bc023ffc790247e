"""Find the output of each call among the items of a conversation (contract of responses, 2.2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import orjson

from ...backends.errors import shortened
from ...schemas.openai.response_items import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
)
from ..errors import InvalidRequest

Call: TypeAlias = FunctionCallItem | CustomCallItem
Output: TypeAlias = FunctionOutputItem | CustomOutputItem


class Placed(NamedTuple):
    """An item and its path in the request; that of the field that names it if it is stored."""

    item: Item
    path: str


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
            raise _no_call(item)
        open_ = [place for place in places if not found[place]]
        found[open_[0] if open_ else places[-1]].append(Answer(item, path))
    for index, answer in unnamed:
        found[_oldest(items, found, index, answer)].append(answer)
    for index, answers in found.items():
        if not answers:
            raise _no_output(items[index].item)
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
    for index in _open(found):
        call = items[index].item
        assert isinstance(call, Call)
        if index < before and call.name == answer.item.name:
            return index
    path = f"{answer.path}.call_id"
    raise InvalidRequest(
        f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
    )


def _open(found: Mapping[int, list[Answer]]) -> Iterator[int]:
    return (index for index in sorted(found) if not found[index])


def _no_call(item: Output) -> InvalidRequest:
    kind = "function call" if isinstance(item, FunctionOutputItem) else "custom tool call"
    return InvalidRequest(
        f"No tool call found for {kind} output with call_id {shortened(item.call_id or '')}.",
        "input",
    )


def _no_output(item: object) -> InvalidRequest:
    assert isinstance(item, Call)
    kind = "function call" if isinstance(item, FunctionCallItem) else "custom tool call"
    return InvalidRequest(f"No tool output found for {kind} {shortened(item.call_id)}.", "input")
