"""The output items of a response, and the events of its stream, from the deltas of a choice.

A plain response and a stream come from the same code, so that they cannot differ (sans-I/O).
Sections 4 and 5.3 of the contract define the items and the order of events. A stored response is
streamed again by the same items, with one delta per text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson
from typing_extensions import override

from ...schemas.openai.common import FinishReason
from ..chat.tools import InputReader
from ..generation.choice import Delta, Kind
from ..generation.logprobs import Entry
from ..text_frames import head_of
from .items import item_id
from .tools import CalledTool

# An event of a stream without its number: its type, and the fields after `type` and
# `sequence_number`. A class of its own would take a response sixteen calls more.
Event: TypeAlias = tuple[str, Mapping[str, Any]]

# Reasoning is omitted, shown, or also shown as a summary.
ReasoningDisplay: TypeAlias = Literal["hidden", "shown", "summarised"]

# What is before and after the JSON of an event.
DATA, END = b"data: ", b"\n\n"

_NO_TOOLS: Mapping[str, CalledTool] = MappingProxyType({})


class Shape(NamedTuple):
    """The shape of a response's output.

    Args:
        names: the tools that the model may call, by the names that it sees.
        show: formats tokens; None if the request does not ask for log-probabilities.
        seal: seals reasoning for the client; None if the request does not ask for it.
    """

    names: Mapping[str, CalledTool] = _NO_TOOLS
    reasoning: ReasoningDisplay = "shown"
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
        if kind == "reasoning" and self._shape.reasoning == "hidden":
            return []
        if kind == "call":
            return self._begin(self._call(delta))
        if item is not None and item.kind == kind:
            return item.add(text, entries)
        if kind == "reasoning":
            summarised = self._shape.reasoning == "summarised"
            events = self._begin(ReasoningItem(self._place("rs_"), summarised, self._shape.seal))
        elif text or (entries and self._shape.show is not None):
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
        if self.open is None:
            self.open = item
            return item.begin()
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


def framed(events: Iterable[Event], number: int, is_named: bool = True) -> bytes:
    """Return events as bytes, numbered from `number` on.

    Args:
        is_named: True for a line with the name of each event, which is its type.
    """
    out: list[bytes] = []
    for name, fields in events:
        if is_named:
            out += (b"event: ", name.encode(), b"\n")
        body = orjson.dumps({"type": name, "sequence_number": number, **fields})
        out += (DATA, body, END)
        number += 1
    return b"".join(out)


def event_frames(events: Iterable[Event], number: int) -> bytes:
    """Return events as frames of a WebSocket, numbered from `number` on."""
    out: list[bytes] = []
    for name, fields in events:
        text = orjson.dumps({"type": name, "sequence_number": number, **fields})
        out += (head_of(len(text)), text)
        number += 1
    return b"".join(out)


class OpenItem:
    """An output item that is not finished.

    Args:
        place: the item's id, and its index in the output.

    Attributes:
        kind: the kind of deltas that the item takes.
        delta: the type of the event of a delta.
        at: the fields that the item's events begin with.
        within: those of them that name the place in the item.
        is_simple: True if a delta with text has one event, whose `delta` is the text. Such a text
            may be added to `texts` without `add`.
        after: further fields of the event of a delta.
        texts: the parts of the item's text.
        value: the item as a client gets it; complete after `end`.
    """

    kind: Kind
    delta: str
    is_simple = True
    within: Mapping[str, Any] = {}
    after: Mapping[str, Any] = {}

    def __init__(self, place: tuple[str, int], head: Mapping[str, Any]) -> None:
        self.id, self.index = place
        self.texts: list[str] = []
        self.at: dict[str, Any] = {
            "item_id": self.id, "output_index": self.index, **self.within,
        }  # fmt: skip
        self.value: dict[str, Any] = {"id": self.id, **head}

    def begin(self) -> list[Event]:
        """Return the events before the first delta."""
        item = {**self.value, "status": "in_progress"}
        return [("response.output_item.added", {"output_index": self.index, "item": item})]

    def add(self, text: str, entries: Sequence[Entry]) -> list[Event]:
        """Return the events of a delta."""
        if not text:
            return []
        self.texts.append(text)
        return [(self.delta, {**self.at, "delta": text, **self.after})]

    def end(self, status: str) -> list[Event]:
        """Return the last events, the last of which has the finished item."""
        events = self._finish("".join(self.texts))
        self.value["status"] = status
        fields = {"output_index": self.index, "item": self.value}
        return [*events, ("response.output_item.done", fields)]

    def _finish(self, text: str) -> list[Event]:
        """Complete the item with its text; return the events about it."""
        raise NotImplementedError


class _InParts(OpenItem):
    """An item whose text is its only content part."""

    within: Mapping[str, Any] = {"content_index": 0}
    done: str
    # The keys of a part without text.
    empty: Mapping[str, Any]

    @override
    def begin(self) -> list[Event]:
        part = {**self.at, "part": {**self.empty, "text": ""}}
        return [*super().begin(), ("response.content_part.added", part)]

    def _finish(self, text: str) -> list[Event]:
        part = {**self.empty, **self.after, "text": text}
        self.value["content"] = [part]
        return [
            (self.done, {**self.at, "text": text, **self.after}),
            ("response.content_part.done", {**self.at, "part": part}),
        ]


class MessageItem(_InParts):
    """A message.

    Args:
        show: formats tokens; None if the request does not ask for log-probabilities.
    """

    kind = "content"
    delta, done = "response.output_text.delta", "response.output_text.done"
    empty: Mapping[str, Any] = {"type": "output_text", "annotations": [], "logprobs": []}
    after: Mapping[str, Any] = {"logprobs": []}

    def __init__(
        self, place: tuple[str, int], show: Callable[[Sequence[Entry]], list[Any]] | None
    ) -> None:
        head = {"type": "message", "status": "", "content": [], "role": "assistant"}
        super().__init__(place, head)
        self._show = show
        self._logprobs: list[Any] = []
        self.is_simple = show is None

    @override
    def add(self, text: str, entries: Sequence[Entry]) -> list[Event]:
        """Tokens without text have an event, too."""
        if self._show is None:
            return super().add(text, entries)
        if not text and not entries:
            return []
        self.texts.append(text)
        shown = self._show(entries)
        self._logprobs += shown
        return [(self.delta, {**self.at, "delta": text, "logprobs": shown})]

    def _finish(self, text: str) -> list[Event]:
        self.after = {"logprobs": self._logprobs}
        return super()._finish(text)


def message_of(name: str, text: str, status: str) -> dict[str, Any]:
    """Return a finished message of text, as `MessageItem` makes it of its deltas.

    Args:
        name: its id.
    """
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
    return {
        "id": name, "type": "message", "status": status, "content": [part], "role": "assistant",
    }  # fmt: skip


class ReasoningItem(_InParts):
    """Reasoning; a summary of it is the reasoning itself, and its events come in step.

    Args:
        seal: seals the text for the client; None to omit the sealed text.
    """

    kind = "reasoning"
    delta, done = "response.reasoning_text.delta", "response.reasoning_text.done"
    empty: Mapping[str, Any] = {"type": "reasoning_text"}

    def __init__(
        self,
        place: tuple[str, int],
        summarised: bool,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__(place, {"type": "reasoning", "status": "", "summary": [], "content": []})
        self.is_simple = not summarised
        self._seal = seal
        self._summary_at = {"item_id": self.id, "output_index": self.index, "summary_index": 0}

    @override
    def begin(self) -> list[Event]:
        return [*super().begin(), *self._summary("part.added", part=_summary(""))]

    @override
    def add(self, text: str, entries: Sequence[Entry]) -> list[Event]:
        events = super().add(text, entries)
        return [*events, *self._summary("text.delta", delta=text)] if events else events

    def _finish(self, text: str) -> list[Event]:
        events = super()._finish(text)
        if not self.is_simple:
            self.value["summary"] = [_summary(text)]
        if self._seal is not None:
            self.value["encrypted_content"] = self._seal(text)
        return [
            *events,
            *self._summary("text.done", text=text),
            *self._summary("part.done", part=_summary(text)),
        ]

    def _summary(self, name: str, **fields: Any) -> Sequence[Event]:
        if self.is_simple:
            return ()
        return ((f"response.reasoning_summary_{name}", {**self._summary_at, **fields}),)


def _summary(text: str) -> dict[str, str]:
    return {"type": "summary_text", "text": text}


class Call(OpenItem):
    """A call of a function.

    Args:
        head: `call_id`, `name`, and `namespace` if it has one.
    """

    kind = "arguments"
    delta = "response.function_call_arguments.delta"

    def __init__(self, place: tuple[str, int], head: Mapping[str, str]) -> None:
        super().__init__(place, {"type": "function_call", "status": "", "arguments": "", **head})

    def _finish(self, text: str) -> list[Event]:
        self.value["arguments"] = text
        fields = {**self.at, "name": self.value["name"], "arguments": text}
        return [("response.function_call_arguments.done", fields)]


class CustomCall(OpenItem):
    """A call of a custom tool, whose input is read from its JSON while that arrives."""

    kind = "arguments"
    delta = "response.custom_tool_call_input.delta"
    is_simple = False

    def __init__(self, place: tuple[str, int], head: Mapping[str, str]) -> None:
        call_id, rest = head["call_id"], {k: v for k, v in head.items() if k != "call_id"}
        start = {"type": "custom_tool_call", "status": "", "call_id": call_id, "input": ""}
        super().__init__(place, {**start, **rest})
        self._reader = InputReader()

    @override
    def add(self, text: str, entries: Sequence[Entry]) -> list[Event]:
        return super().add(self._reader.feed(text), entries)

    @override
    def end(self, status: str) -> list[Event]:
        return [*super().add(self._reader.end(), ()), *super().end(status)]

    def _finish(self, text: str) -> list[Event]:
        self.value["input"] = text
        return [("response.custom_tool_call_input.done", {**self.at, "input": text})]


# The values of a response at its beginning that differ from those at its end.
_BEGUN: Mapping[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}


def replayed(reply: Mapping[str, Any], after: int, tier: str = "auto") -> list[bytes]:
    """Return the events of a stored response as bytes.

    Args:
        after: the number of the event before the first one that is returned; -1 for all.
        tier: the `service_tier` of the request.
    """
    return [
        framed((event,), number)
        for number, event in enumerate(_events(reply, tier))
        if number > after
    ]


def _events(reply: Mapping[str, Any], tier: str) -> Iterator[Event]:
    begun = {"response": {**reply, **_BEGUN, "service_tier": tier}}
    yield ("response.created", begun)
    yield ("response.in_progress", begun)
    for index, value in enumerate(reply["output"]):
        item, text, tokens = _item(value, index)
        yield from item.begin()
        yield from (
            OpenItem.add(item, text, ()) if isinstance(item, CustomCall) else item.add(text, tokens)
        )
        yield from item.end(value["status"])
    yield (f"response.{reply['status']}", {"response": reply})


def _item(value: Mapping[str, Any], index: int) -> tuple[OpenItem, str, Sequence[Any]]:
    """Return an item without its text, the text, and its tokens as they are shown."""
    place = value["id"], index
    kind = value["type"]
    if kind in ("message", "reasoning"):
        (part,) = value["content"]
        if kind == "reasoning":
            sealed = value.get("encrypted_content")
            seal = None if sealed is None else (lambda _: sealed)
            return ReasoningItem(place, bool(value["summary"]), seal), part["text"], ()
        logprobs = part["logprobs"]
        return MessageItem(place, list if logprobs else None), part["text"], logprobs
    head = {name: value[name] for name in ("call_id", "name", "namespace") if name in value}
    if kind == "custom_tool_call":
        return CustomCall(place, head), value["input"], ()
    return Call(place, head), value["arguments"], ()
