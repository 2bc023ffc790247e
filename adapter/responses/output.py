"""The output items of a response, and the events of its stream, from the deltas of a choice.

A plain response and a stream come from the same code, so that they cannot differ (sans-I/O).
Sections 4 and 5 of the contract define the items and the order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from ...schemas.openai.common import FinishReason
from ..generation.choice import Delta
from ..generation.logprobs import Entry
from .ids import item_id
from .open_items import Call, CustomCall, Event, MessageItem, OpenItem, ReasoningItem
from .tools import CalledTool

# Reasoning is omitted, shown, or also shown as a summary.
Thoughts: TypeAlias = Literal["hidden", "shown", "summarised"]

_NO_TOOLS: Mapping[str, CalledTool] = MappingProxyType({})


class Shape(NamedTuple):
    """The shape of a response's output.

    Args:
        names: the tools that the model may call, by the names that it sees.
        show: formats tokens; None if the request does not ask for log-probabilities.
        seal: seals reasoning for the client; None if the request does not ask for it.
    """

    names: Mapping[str, CalledTool] = _NO_TOOLS
    thoughts: Thoughts = "shown"
    show: Callable[[Sequence[Entry]], list[Any]] | None = None
    seal: Callable[[str], str] | None = None


class Output:
    """The output of one response. Items follow one after another, in the model's order.

    Attributes:
        items: the finished items.
        open: the item that grows, or None.
    """

    __slots__ = ("_id", "_shape", "items", "open")

    def __init__(self, response_id: str, shape: Shape) -> None:
        self._id = response_id
        self._shape = shape
        self.items: list[dict[str, Any]] = []
        self.open: OpenItem | None = None

    def add(self, delta: Delta) -> list[Event]:
        """Return the events of a delta."""
        text, entries, kind, _ = delta
        item = self.open
        if kind == "reasoning" and self._shape.thoughts == "hidden":
            return []
        if kind == "call":
            return self._begin(self._call(delta))
        if item is not None and item.kind == kind:
            return item.add(text, entries)
        if kind == "reasoning":
            summarised = self._shape.thoughts == "summarised"
            events = self._begin(ReasoningItem(self._place("rs_"), summarised, self._shape.seal))
        elif text:
            events = self._begin(MessageItem(self._place("msg_"), self._shape.show))
        else:
            # The end decides whether there is an empty message.
            return []
        assert self.open is not None
        return events + self.open.add(text, entries)

    def end(self, reason: FinishReason) -> list[Event]:
        """Return the last events; a limit leaves the open item incomplete.

        There is always an item: an empty answer is a message without text, unless a limit cut it
        off while the model was still reasoning.
        """
        is_cut = reason == "length"
        events: list[Event] = []
        thinks = self.open is not None and self.open.kind == "reasoning"
        if self.open is None or (thinks and not is_cut):
            events = self._begin(MessageItem(self._place("msg_"), self._shape.show))
        return events + self._close("incomplete" if is_cut else "completed")

    def _call(self, delta: Delta) -> OpenItem:
        called = self._shape.names.get(delta.text) or CalledTool(delta.text)
        head = {"call_id": delta.call_id, "name": called.name}
        if called.namespace is not None:
            head["namespace"] = called.namespace
        if called.is_custom:
            return CustomCall(self._place("ctc_"), head)
        return Call(self._place("fc_"), head)

    def _place(self, prefix: str) -> tuple[str, int]:
        """Return the id and the index of the next item."""
        index = len(self.items) + (self.open is not None)
        return item_id(prefix, self._id, index), index

    def _begin(self, item: OpenItem) -> list[Event]:
        events = self._close("completed")
        self.open = item
        return events + item.begin()

    def _close(self, status: str) -> list[Event]:
        item = self.open
        if item is None:
            return []
        events = item.end(status)
        self.open = None
        self.items.append(item.value)
        return events
