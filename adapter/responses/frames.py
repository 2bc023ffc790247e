"""The events of a streamed response as bytes, numbered without gaps.

The bytes around the text of a delta are prebuilt, so that most tokens need no object of an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from ...backends.errors import LatimerError
from ...schemas.openai.common import FinishReason, Usage
from ..errors import render
from ..generation.choice import Delta
from ..generation.frames import Frames
from ..generation.sinks import Result
from .open_items import Event
from .output import Output
from .response import Draft, failure_of

_BEGINNING = ("response.created", "response.in_progress")
_QUEUED = ("response.created", "response.queued")
# The numbers of most events, formatted: that takes as long as the rest of a delta.
_NUMBERS = tuple(b"%d" % number for number in range(2_048))


class ResponseFrames(Frames):
    """The events of a `/v1/responses` stream.

    Args:
        draft: the response that the stream is of.
    """

    keeps = True

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._output = Output(draft.id, draft.shape)
        # The beginning has the first numbers, also if a delta is formatted before it.
        self._number = len(_BEGINNING)
        self._has_begun = False
        self._failed: dict[str, Any] | None = None
        # The kind of deltas that only add a text to the open item, its texts, and the bytes of
        # their events before the number, between it and the text, and after that.
        self._kind = ""
        self._texts: list[str] = []
        self._before = self._between = self._after = b""

    def start(self, index: int) -> bytes:
        """See `Frames.start`."""
        self._has_begun = True
        begun = {"response": self._draft.begun}
        return b"".join([_frame(at, Event(name, begun)) for at, name in enumerate(_BEGINNING)])

    def cut(self) -> Sequence[Mapping[str, Any]]:
        """Return the items so far; the one that is open is incomplete."""
        self._output.end("length")
        return self._output.items

    def delta(self, index: int, delta: Delta) -> bytes:
        """See `Frames.delta`."""
        text = delta.text
        if delta.kind == self._kind and text:
            self._texts.append(text)
            number = self._number
            self._number = number + 1
            try:
                shown = _NUMBERS[number]
            except IndexError:
                shown = b"%d" % number
            return b"".join((self._before, shown, self._between, orjson.dumps(text), self._after))
        data = self._framed(self._output.add(delta))
        self._prebuild()
        return data

    def end(self, index: int, reason: FinishReason) -> bytes:
        """See `Frames.end`."""
        data = self._framed(self._output.end(reason))
        self._prebuild()
        return data

    def close(self, usage: Usage, reply: Mapping[str, Any] | None = None) -> bytes:
        """See `Frames.close`."""
        assert reply is not None, "a response is kept"
        return self._framed([Event(f"response.{reply['status']}", {"response": reply})])

    def failed(self, error: LatimerError) -> Mapping[str, Any]:
        """See `Frames.failed`."""
        if self._failed is None:
            _status, body, _headers = render(error)
            self._failed = self._draft.failed(self._output.items, failure_of(body["error"]))
        return self._failed

    def error(self, error: LatimerError) -> bytes:
        """See `Frames.error`: the error, and the response that failed of it."""
        head = b"" if self._has_begun else self.start(0)
        _status, body, _headers = render(error)
        told = body["error"]
        # OpenAI's service nests the error, and its published type is flat; clients read either.
        flat = {"code": told["code"], "message": told["message"], "param": told["param"]}
        return head + self._framed(
            [
                Event("error", {**flat, "error": {"type": told["type"], **flat}}),
                Event("response.failed", {"response": self.failed(error)}),
            ]
        )

    def whole(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        """Return the response object at the end of the stream."""
        return self._draft.ended(self._output.items, results[0].finish_reason, usage)

    def _framed(self, events: Iterable[Event]) -> bytes:
        out: list[bytes] = []
        for event in events:
            out.append(_frame(self._number, event))
            self._number += 1
        return b"".join(out)

    def _prebuild(self) -> None:
        """Prepare the events of deltas that only add a text to the open item."""
        item = self._output.open
        if item is None or not item.is_simple:
            self._kind = ""
            return
        if item.texts is self._texts:
            return
        self._kind, self._texts = item.kind, item.texts
        name = item.delta.encode()
        at, after = orjson.dumps(item.at), orjson.dumps(item.after)
        self._before = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
        self._between = b',%b,"delta":' % at[1:-1]
        self._after = (b"," if item.after else b"") + after[1:] + b"\n\n"


class BackgroundFrames(ResponseFrames):
    """The events of a response in the background; `queued` comes before all others."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self._number = len(_QUEUED) + 1

    def queued(self) -> bytes:
        """Return the first events, before the engine has begun."""
        begun = {"response": {**self._draft.begun, "status": "queued"}}
        return b"".join([_frame(at, Event(name, begun)) for at, name in enumerate(_QUEUED)])

    def start(self, index: int) -> bytes:
        """See `Frames.start`."""
        self._has_begun = True
        return _frame(len(_QUEUED), Event("response.in_progress", {"response": self._draft.begun}))


def _frame(number: int, event: Event) -> bytes:
    body = {"type": event.type, "sequence_number": number, **event.fields}
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), orjson.dumps(body))
