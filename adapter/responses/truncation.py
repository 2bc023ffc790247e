"""The items that `truncation: "auto"` drops (contract of responses, 9.5).

Whole turns are dropped from the start of the conversation, and then what follows the last message
of the user. That message, the last item and all instructions stay, and no call loses its output.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ...schemas.openai.response_items import InputMessage
from .items import Placed, answers_of

T = TypeVar("T")


def droppable(items: Sequence[Placed]) -> list[list[int]]:
    """Return the places of the items that may be dropped together, in the order of dropping."""
    places = {id(placed.item): index for index, placed in enumerate(items)}
    pairs = {
        call: [call, *(places[id(answer.item)] for answer in answers)]
        for call, answers in answers_of(items).items()
    }
    answered = {place for call, *outputs in pairs.values() for place in outputs}
    roles = [item.role if isinstance(item, InputMessage) else "" for item, _ in items]
    question = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
    found: list[list[int]] = []
    for index, role in enumerate(roles):
        if index == question or index in answered or role in ("system", "developer"):
            continue
        if not found or role == "user" or index > question:
            found.append([])
        found[-1] += pairs.get(index, [index])
    return [some for some in found if len(items) - 1 not in some]


async def fewest(most: int, attempt: Callable[[int], Awaitable[T | None]]) -> T | None:
    """Return the result of an attempt with the smallest number from 1 that has one, or None.

    Args:
        most: the largest number. An attempt with a larger number than one that has a result has
            a result, too.
    """
    low, high = 1, most + 1
    found: T | None = None
    while low < high:
        middle = (low + high) // 2
        result = await attempt(middle)
        if result is None:
            low = middle + 1
        else:
            found, high = result, middle
    return found
