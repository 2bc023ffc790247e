"""The message object (contract of messages, section 6), and the events of its stream as bytes.

The bytes around the text of a delta are prebuilt, so that most tokens need no object of an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from typing_extensions import override

from ...backends.errors import LatimerError
from ...schemas.openai.common import FinishReason, Usage
from ..generation.choice import Delta
from ..generation.frames import ChunkEncoder
from ..generation.sinks import Result
from .errors import error_event
from .output import PING, Event, Output, Shape, content_of, ending_of, usage_of

# Nothing is charged for what the prompt cache keeps.
_CREATION: Mapping[str, int] = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
_TIER = "standard"
_OPEN: Mapping[str, None] = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
_STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@dataclass(slots=True)
class Draft:
    """A message that is being made.

    Args:
        id: its id.
        model: the name of the model.
        request_id: the id of the request, for errors.
    """

    id: str
    model: str
    shape: Shape
    request_id: str

    def whole(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        """Return the message of a plain response."""
        result, shape = results[0], self.shape
        content, has_calls = content_of(result.deltas, shape)
        counts = usage_of(usage, shape)
        ending = ending_of(
            result.finish_reason, result.stop, has_calls, usage["completion_tokens"], shape
        )
        return self.message(content, ending, counts)

    def begun(self, tokens: int) -> dict[str, Any]:
        """Return the message at its beginning.

        Args:
            tokens: the tokens of the prompt, cached ones included; the end of the stream corrects
                that.
        """
        counts = {
            "input_tokens": tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        }
        return self.message([], _OPEN, counts)

    def message(
        self, content: Sequence[Any], ending: Mapping[str, Any], counts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the message object, with its keys in Anthropic's order."""
        return {
            "model": self.model,
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            **ending,
            "usage": {
                "input_tokens": counts["input_tokens"],
                "cache_creation_input_tokens": counts["cache_creation_input_tokens"],
                "cache_read_input_tokens": counts["cache_read_input_tokens"],
                "cache_creation": _CREATION,
                "output_tokens": counts["output_tokens"],
                "output_tokens_details": counts["output_tokens_details"],
                "service_tier": _TIER,
            },
        }


class MessageEncoder(ChunkEncoder):
    """The events of a `/v1/messages` stream.

    Args:
        draft: the message that the stream is of.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._output = Output(draft.shape)
        self.is_plain = draft.shape.is_plain and bool(draft.shape.most)
        self._ending: dict[str, Any] = {}
        # The kind of deltas that only add a text to the open block, its texts, and the bytes of
        # their events before the text, between two texts and after the last one.
        self._kind = ""
        self._texts: list[str] = []
        self._before = self._between = self._after = b""

    @override
    def start(self, index: int) -> bytes:
        """The engine has read the prompt by then, and most engines say its size."""
        self.comment = PING
        tokens = 0 if self.ticket is None else self.ticket.input
        return Event("message_start", {"message": self._draft.begun(tokens)}).framed()

    @override
    def texts(self, index: int, texts: Sequence[str]) -> bytes:
        if not texts:
            return b""
        data = self._before + self._between.join(map(orjson.dumps, texts)) + self._after
        if self._kind:
            return data
        # The first text opens the block, and its event is one of several.
        first = self.delta(index, Delta(texts[0]))
        return first + self.texts(index, texts[1:])

    @override
    def delta(self, index: int, delta: Delta) -> bytes:
        text = delta.text
        if delta.kind == self._kind and text:
            self._texts.append(text)
            return self._before + orjson.dumps(text) + self._after
        is_first = not self._output.content and self._output.open is None
        events = self._output.add(delta)
        self._prebuild()
        if is_first and events:
            return events[0].framed() + PING + self._framed(events[1:])
        return self._framed(events)

    @override
    def end(self, index: int, reason: FinishReason) -> bytes:
        choice = self.choices[0]
        generated = 0 if choice.finish is None else choice.finish.completion_tokens
        has_calls = self._output.has_calls
        self._ending = ending_of(reason, choice.stop, has_calls, generated, self._draft.shape)
        return self._framed(self._output.end())

    @override
    def close(self, usage: Usage, reply: Mapping[str, Any] | None = None) -> bytes:
        counts = usage_of(usage, self._draft.shape)
        return Event("message_delta", {"delta": self._ending, "usage": counts}).framed() + _STOPPED

    @override
    def error(self, error: LatimerError) -> bytes:
        return error_event(error, self._draft.request_id)

    def _framed(self, events: Iterable[Event]) -> bytes:
        return b"".join([event.framed() for event in events])

    def _prebuild(self) -> None:
        """Prepare the events of deltas that only add a text to the open block."""
        block = self._output.open
        if block is None or not block.is_simple:
            self._kind = ""
            return
        if block.texts is self._texts:
            return
        self._kind, self._texts = block.kind, block.texts
        self._before = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
            b'{"type":"%b","%b":' % (block.index, block.delta.encode(), block.name.encode())
        )
        self._after = b"}}\n\n"
        self._between = self._after + self._before
