"""The content of a message, and the events of its stream, from the deltas of a choice.

A plain response and a stream come from the same code, so that they cannot differ (sans-I/O).
Section 6 of the contract defines the blocks and the order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import orjson
from pydantic_core import from_json, to_json
from typing_extensions import override

from ...schemas.openai.common import FinishReason, Usage
from ..generation.choice import Delta, Kind
from .thinking import ReasoningDisplay

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_KIND, _TEXT = attrgetter("kind"), attrgetter("text")
# The prefixes of ids of calls: of chat, and here.
_CALL, _TOOL_USE = "call_", "toolu_"


class Shape(NamedTuple):
    """The shape of a response.

    Args:
        seal: seals reasoning for the client; None if the model has none.
        stops: the stop sequences of the request.
        most: the `max_tokens` of the request; a response of 0 tokens has no content.
        is_plain: True if all of the output is text.
    """

    reasoning: ReasoningDisplay
    seal: Callable[[str], str] | None
    stops: Sequence[str]
    most: int
    is_plain: bool


class Event(NamedTuple):
    """An event of a stream.

    Args:
        fields: the fields after `type`.
    """

    type: str
    fields: dict[str, Any]

    def framed(self) -> bytes:
        """Return the event as bytes."""
        body = {"type": self.type, **self.fields}
        return b"event: %b\ndata: %b\n\n" % (self.type.encode(), orjson.dumps(body))


class OpenBlock:
    """A block that is not finished.

    Attributes:
        kind: the kind of deltas that the block takes.
        delta, name: the type of the block's deltas, and the member with their text.
        is_simple: True if a delta with text has one event. Such a text may be added to `texts`
            without `add`.
        texts: the parts of the block's text.
        value: the block as a client gets it; complete after `end`.
    """

    kind: Kind
    delta: str
    name: str
    is_simple = True

    def __init__(self, index: int, value: dict[str, Any]) -> None:
        self.index = index
        self.value = value
        self.texts: list[str] = []

    def begin(self) -> list[Event]:
        """Return the events before the first delta."""
        fields = {"index": self.index, "content_block": {**self.value}}
        return [Event("content_block_start", fields)]

    def add(self, text: str) -> list[Event]:
        """Return the events of a delta."""
        if not text:
            return []
        self.texts.append(text)
        return [self._grown(self.delta, self.name, text)]

    def end(self) -> list[Event]:
        """Return the last events."""
        self.value[self.name] = "".join(self.texts)
        return [Event("content_block_stop", {"index": self.index})]

    def _grown(self, delta: str, name: str, text: str) -> Event:
        fields = {"index": self.index, "delta": {"type": delta, name: text}}
        return Event("content_block_delta", fields)


class TextBlock(OpenBlock):
    """Text."""

    kind = "content"
    delta, name = "text_delta", "text"

    def __init__(self, index: int) -> None:
        super().__init__(index, {"type": "text", "text": ""})


class ThinkingBlock(OpenBlock):
    """Reasoning, with its seal as the signature.

    Args:
        omitted: True if only the signature has the reasoning.
    """

    kind = "reasoning"
    delta, name = "thinking_delta", "thinking"

    def __init__(self, index: int, omitted: bool, seal: Callable[[str], str]) -> None:
        super().__init__(index, {"type": "thinking", "thinking": "", "signature": ""})
        self._omitted = omitted
        self._seal = seal
        self.is_simple = not omitted

    @override
    def add(self, text: str) -> list[Event]:
        events = super().add(text)
        return [] if self._omitted else events

    @override
    def end(self) -> list[Event]:
        signature = self._seal("".join(self.texts))
        if self._omitted:
            self.texts.clear()
        events = super().end()
        self.value["signature"] = signature
        return [self._grown("signature_delta", "signature", signature), *events]


class ToolUseBlock(OpenBlock):
    """A call; its input is an object, also if a limit has cut it off."""

    kind = "arguments"
    delta, name = "input_json_delta", "partial_json"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        id_ = _TOOL_USE + call_id.removeprefix(_CALL)
        super().__init__(index, {"type": "tool_use", "id": id_, "name": name, "input": {}})

    @override
    def begin(self) -> list[Event]:
        return [*super().begin(), self._grown(self.delta, self.name, "")]

    @override
    def end(self) -> list[Event]:
        self.value["input"] = _object("".join(self.texts))
        return [Event("content_block_stop", {"index": self.index})]


_NUMBER = "0123456789+-.eE"


def _object(text: str) -> dict[str, Any] | orjson.Fragment:
    """Return the arguments of a call: of incomplete ones, the members that are complete.

    They are JSON already if they have an integer of more than 64 bits, which orjson does not write.
    """
    try:
        found = from_json(text)
    except ValueError:
        try:
            # A number at the end may be the beginning of a longer one.
            found = from_json(text.rstrip(_NUMBER), allow_partial=True)
        except ValueError:
            return {}
    if not isinstance(found, dict):
        return {}
    try:
        orjson.dumps(found)
    except TypeError:
        return orjson.Fragment(to_json(found, inf_nan_mode="null"))
    return found


class Output:
    """The content of one message. Blocks follow one after another, in the model's order.

    Attributes:
        content: the finished blocks.
        open: the block that grows, or None.
        has_calls: True if there is a call.
    """

    __slots__ = ("_shape", "content", "has_calls", "open")

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.content: list[dict[str, Any]] = []
        self.open: OpenBlock | None = None
        self.has_calls = False

    def add(self, delta: Delta) -> list[Event]:
        """Return the events of a delta."""
        text, _entries, kind, call_id = delta
        block, shape = self.open, self._shape
        if not shape.most:
            return []
        if kind == "call":
            self.has_calls = True
            return self._begin(ToolUseBlock(self._next(), call_id, text))
        if block is not None and block.kind == kind:
            return block.add(text)
        if not text:
            return []
        events: list[Event] = []
        if kind == "content":
            events = self._begin(TextBlock(self._next()))
        elif shape.reasoning == "hidden" or shape.seal is None:
            return []
        else:
            omitted = shape.reasoning == "omitted"
            events = self._begin(ThinkingBlock(self._next(), omitted, shape.seal))
        assert self.open is not None
        return events + self.open.add(text)

    def end(self) -> list[Event]:
        """Return the events that end the open block."""
        block, self.open = self.open, None
        if block is None:
            return []
        events = block.end()
        self.content.append(block.value)
        return events

    def _next(self) -> int:
        return len(self.content) + (self.open is not None)

    def _begin(self, block: OpenBlock) -> list[Event]:
        events = self.end()
        self.open = block
        return events + block.begin()


def content_of(deltas: Sequence[Delta], shape: Shape) -> tuple[list[dict[str, Any]], bool]:
    """Return the content of a message, and True if it has calls."""
    if shape.is_plain:
        text = "".join([delta.text for delta in deltas]) if shape.most else ""
        return [{"type": "text", "text": text}] if text else [], False
    output = Output(shape)
    # A long answer has thousands of deltas, which the event loop would wait for.
    for kind, group in groupby(deltas, _KIND):
        if kind == "call":
            for delta in group:
                output.add(delta)
        else:
            output.add(Delta("".join(map(_TEXT, group)), kind=kind))
    output.end()
    return output.content, output.has_calls


def ending_of(
    reason: FinishReason, stop: str | None, has_calls: bool, generated: int, shape: Shape
) -> dict[str, Any]:
    """Return how a message ended.

    Args:
        stop: the stop sequence that matched; that of an instruct format ends the turn.
        generated: the number of tokens that the model has generated.
    """
    if not shape.most:
        why = "max_tokens"
    elif reason == "length":
        why = "max_tokens" if generated >= shape.most else "model_context_window_exceeded"
    elif stop is not None and stop in shape.stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop, "stop_details": None}
    else:
        why = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": why, "stop_sequence": None, "stop_details": None}


def usage_of(usage: Usage, shape: Shape) -> dict[str, Any]:
    """Return the token counts of a chat response as those of a message."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    details = usage["completion_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"] if shape.most else 0,
        "output_tokens_details": {
            "thinking_tokens": details["reasoning_tokens"] if shape.most else 0
        },
    }
