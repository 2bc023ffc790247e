"""The response object (contract, sections 3 and 6), and the events of its stream as bytes.

The events are numbered without gaps. The bytes around the text of a delta are prebuilt, so that
most tokens need no object of an event.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import orjson
from typing_extensions import override

from ...backends.errors import LatimerError
from ...schemas.openai.common import ErrorBody, FinishReason, Usage
from ...schemas.openai.messages import TextFormat
from ...schemas.openai.responses import FlatFormat, FlatSchemaFormat, ResponseRequest
from ..errors import render
from ..generation.choice import Delta
from ..generation.frames import ChunkEncoder
from ..generation.sinks import Result
from ..text_frames import frames_of, head_of, starts
from .items import item_id
from .output import DATA, END, Event, MessageItem, Output, Shape, event_frames, framed, message_of
from .prebuilt import BEGINNING, BETWEEN, prebuilt
from .tools import NO_TOOLS, Tools

# The status and the details of a response, by the reason for its end; others are complete.
_CUT: Mapping[str, tuple[str, dict[str, str]]] = {
    "length": ("incomplete", {"reason": "max_output_tokens"}),
}
# The states of a response that another one can continue.
USABLE = frozenset({"completed", "incomplete"})
# The codes of a failed response in OpenAI's published type, by the type of an error here; clients
# do not send a request with an invalid prompt again.
_FAILURES = {"requests": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
_FAILURE = "server_error"


@dataclass(slots=True)
class Draft:
    """A response that is being made.

    Args:
        begun: the response object at its beginning, with every key.
        tier: the `service_tier` at its end.
    """

    begun: Mapping[str, Any]
    shape: Shape
    tier: str

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.begun["id"])

    def whole(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        """Return the response object of a plain response."""
        output = Output(self.id, self.shape)
        for delta in results[0].deltas:
            output.add(delta)
        reason = results[0].finish_reason
        output.end(reason)
        return self.ended(output.items, reason, usage)

    def ended(
        self, items: Sequence[Mapping[str, Any]], reason: FinishReason, usage: Usage
    ) -> dict[str, Any]:
        """Return the response object with its output and its usage."""
        status, details = _CUT.get(reason, ("completed", None))
        return {
            **self.begun,
            "status": status,
            "completed_at": None if details else int(time.time()),
            "incomplete_details": details,
            "service_tier": self.tier,
            "output": items,
            "usage": usage_of(usage),
        }

    def stopped(
        self,
        status: str,
        items: Sequence[Mapping[str, Any]],
        failure: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the response object of a response that failed, or that its client cancelled."""
        end = {"status": status, "error": failure, "service_tier": self.tier, "output": items}
        return {**self.begun, **end}


# A response at its beginning, with every key, to a request without a field of its own.
_BEGUN: Mapping[str, Any] = {
    "id": "",
    "object": "response",
    "created_at": 0,
    "status": "in_progress",
    "background": False,
    "completed_at": None,
    "error": None,
    "frequency_penalty": 0.0,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "model": "",
    "output": [],
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "auto",
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
    "metadata": {},
}
# The fields of a request that its response repeats as they are.
_REPEATED = _BEGUN.keys() & ResponseRequest.model_fields.keys() - {
    "model", "reasoning", "store", "text", "tool_choice", "tools",
}  # fmt: skip


def begun(
    request: ResponseRequest, place: tuple[str, int], model: str, tools: Tools, stored: bool
) -> dict[str, Any]:
    """Return the response object at its beginning, with every key.

    Args:
        place: the id of the response, and its time in microseconds since 1970.
        stored: True if the response is stored.
    """
    found = {
        **_BEGUN,
        "id": place[0],
        "created_at": place[1] // 1_000_000,
        "model": model,
        "store": stored,
    }
    for name in _REPEATED & request.__pydantic_fields_set__:
        found[name] = getattr(request, name)
    text, reasoning = request.text, request.reasoning
    if reasoning is not None:
        found["reasoning"] = {"effort": reasoning.effort, "summary": reasoning.summary}
    if text is not None:
        found["text"] = {
            "format": _echoed(text.format), "verbosity": text.verbosity or "medium",
        }  # fmt: skip
    if tools is not NO_TOOLS:
        found["tool_choice"], found["tools"] = tools.choice_echo, tools.echo
    if request.conversation is not None:
        found["conversation"] = {"id": request.conversation.id}
    return found


def _echoed(form: FlatFormat | None) -> dict[str, Any]:
    """Return `text.format` as the response has it."""
    if not isinstance(form, FlatSchemaFormat):
        return {"type": "text" if form is None or isinstance(form, TextFormat) else form.type}
    return {
        "type": form.type,
        "name": form.name,
        "schema": form.schema_,
        "strict": bool(form.strict),
        "description": form.description,
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the token counts of a chat response as those of a response."""
    prompt, completion = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cache_write_tokens": prompt["cache_write_tokens"],
            "cached_tokens": prompt["cached_tokens"],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


def failure_of(error: ErrorBody) -> dict[str, str]:
    """Return the `error` of a failed response, which has fewer codes than other errors."""
    return {"code": _FAILURES.get(error["type"], _FAILURE), "message": error["message"]}


_QUEUED = ("response.created", "response.queued")
# The numbers of most events, formatted: that takes as long as the rest of a delta.
_NUMBERS = tuple(b"%d" % number for number in range(2_048))


def _numbers(start: int, end: int) -> Sequence[bytes]:
    """Return numbers that are not kept."""
    return [b"%d" % number for number in range(start, end)]


def _error(error: LatimerError) -> Event:
    """Return the event of an error.

    OpenAI's service nests the error, and its published type is flat. Clients read either.
    """
    _status, body, _headers = render(error)
    fields = body["error"]
    flat = {"code": fields["code"], "message": fields["message"], "param": fields["param"]}
    return "error", {**flat, "error": {"type": fields["type"], **flat}}


def fault(error: LatimerError) -> bytes:
    """Return the event of an error before there is a response: its model could not be loaded."""
    return framed([_error(error)], 0)


class ResponseEncoder(ChunkEncoder):
    """The events of a `/v1/responses` stream.

    Args:
        draft: the response that the stream is of.

    Attributes:
        is_named: True if events have a line with their name.
        in_frames: True if they are frames of a WebSocket instead of lines.
    """

    keeps = True
    is_named = True
    in_frames = False
    # The number of the event after the beginning.
    _first = len(BEGINNING)
    _has_begun = False
    _failed: dict[str, Any] | None = None
    # The id of the message that was opened without `Output`.
    _message = ""
    # The kind of deltas that only add a text to the open item, and the bytes of their events before
    # the number, between it and the text, after that, and between two.
    _kind = ""
    _before = _between = _after = _next = b""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._output = Output(draft.begun["id"], draft.shape)
        self.is_plain = draft.shape.show is None
        self._events = prebuilt(self._first, self.is_named, self.in_frames)
        # The beginning has the numbers before, also if a delta is formatted before it.
        self._number = self._first
        # The texts of the open item.
        self._texts: list[str] = []

    @override
    def start(self, index: int) -> bytes:
        if self.begins_early and self._has_begun:
            return b""
        self._has_begun = True
        data = self._events.beginning % {b"response": orjson.dumps(self._draft.begun)}
        if self.in_frames:
            one, two = data.split(BETWEEN)
            data = head_of(len(one)) + one + head_of(len(two)) + two
        return data

    def cut(self) -> Sequence[Mapping[str, Any]]:
        """Return the items so far; the one that is open is incomplete."""
        output = self._made()
        if output.open is not None or not output.items:
            output.end("length")
        return output.items

    @override
    def texts(self, index: int, texts: Sequence[str]) -> bytes:
        """The events of a burst are put together without a loop in Python."""
        first = b""
        if texts and self._kind != "content":
            first, texts = self._begun(index, texts)
        if not texts:
            return first
        self._texts += texts
        number, count = self._number, len(texts)
        self._number = end = number + count
        numbers = _NUMBERS[number:end] if end <= len(_NUMBERS) else _numbers(number, end)
        if not self.in_frames:
            parts = [self._next, b"", self._between, b""] * count
            parts[0] = first + self._before
            parts[1::4] = numbers
            parts[3::4] = map(orjson.dumps, texts)
            parts.append(self._after)
            return b"".join(parts)
        # A token takes 0.15 microseconds less than with frames that are made of lines.
        added = [*map(orjson.dumps, texts)]
        size, sizes = len(self._between) + len(self._after), map(len, added)
        if len(numbers[0]) == len(numbers[-1]):
            size += len(numbers[0])
        else:
            sizes = map(add, sizes, map(len, numbers))
        parts = [b"", b"", self._between, b"", self._after] * count
        parts[::5] = map(starts(self._before, size), sizes)
        parts[1::5] = numbers
        parts[3::5] = added
        return first + b"".join(parts)

    @override
    def delta(self, index: int, delta: Delta) -> bytes:
        text = delta.text
        if delta.kind == self._kind and text:
            self._texts.append(text)
            number = self._number
            self._number = number + 1
            try:
                shown = _NUMBERS[number]
            except IndexError:
                shown = b"%d" % number
            data = b"".join((self._before, shown, self._between, orjson.dumps(text), self._after))
            return head_of(len(data)) + data if self.in_frames else data
        if delta.kind == "content" and text and self.is_plain and self._number == self._first:
            return self._opened() + self.delta(index, delta)
        data = self._framed(self._made().add(delta))
        self._prebuild()
        return data

    @override
    def end(self, index: int, reason: FinishReason) -> bytes:
        # No item is open then.
        self._kind = ""
        if self._message:
            return self._ended("incomplete" if reason == "length" else "completed")
        return self._framed(self._output.end(reason))

    @override
    def close(self, usage: Usage, reply: Mapping[str, Any] | None = None) -> bytes:
        assert reply is not None, "a response is kept"
        data = self._events.last % {
            b"status": reply["status"].encode(),
            b"n0": self._number,
            b"response": orjson.dumps(reply),
        }
        return head_of(len(data)) + data if self.in_frames else data

    @override
    def failed(self, error: LatimerError) -> Mapping[str, Any]:
        if self._failed is None:
            _status, body, _headers = render(error)
            failure = failure_of(body["error"])
            self._failed = self._draft.stopped("failed", self._output.items, failure)
        return self._failed

    @override
    def error(self, error: LatimerError) -> bytes:
        """The error, and the response that failed of it."""
        head = b"" if self._has_begun else self.start(0)
        failed: Event = ("response.failed", {"response": self.failed(error)})
        return head + self._framed([_error(error), failed])

    def whole(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        """Return the response object at the end of the stream."""
        return self._draft.ended(self._output.items, results[0].finish_reason, usage)

    def _begun(self, index: int, texts: Sequence[str]) -> tuple[bytes, Sequence[str]]:
        """Open a message with texts; return its first events, and the texts that are left."""
        if self.is_plain and self._number == self._first:
            return self._opened(), texts
        # The event of the first text is one of several.
        return self.delta(index, Delta(texts[0])), texts[1:]

    def _opened(self) -> bytes:
        """Open a message of text, the first item; return the events before its first delta."""
        self._number += 2
        self._message = name = item_id("msg_", self._draft.begun["id"], 0)
        self._kind, gap, events = "content", {b"id": name.encode()}, self._events
        self._before, self._after = events.before, events.after
        self._between = events.between % gap
        self._next = events.after + events.before
        data = events.opening % gap
        if self.in_frames:
            one, two = data.split(BETWEEN)
            data = head_of(len(one)) + one + head_of(len(two)) + two
        return data

    def _ended(self, status: str) -> bytes:
        """End the message that was opened without `Output`; return its last events."""
        text, number = "".join(self._texts), self._number
        self._number = number + 3
        name, self._message = self._message, ""
        self._output.items.append(message_of(name, text, status))
        data = self._events.ending % {
            b"id": name.encode(),
            b"text": orjson.dumps(text)[1:-1],
            b"status": status.encode(),
            b"n0": number,
            b"n1": number + 1,
            b"n2": number + 2,
        }
        return frames_of(data.split(BETWEEN)) if self.in_frames else data

    def _made(self) -> Output:
        """Return the output, with the message that was opened without it."""
        if self._message:
            self._output.open = item = MessageItem((self._message, 0), None)
            item.texts, self._message = self._texts, ""
        return self._output

    def _framed(self, events: Sequence[Event]) -> bytes:
        number = self._number
        self._number = number + len(events)
        if self.in_frames:
            return event_frames(events, number)
        return framed(events, number, self.is_named)

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
        line = b"event: %b\n" % name if self.is_named else b""
        start, end = (b"", b"") if self.in_frames else (line + DATA, END)
        self._before = b'%b{"type":"%b","sequence_number":' % (start, name)
        self._between = b',%b,"delta":' % at[1:-1]
        self._after = (b"," if item.after else b"") + after[1:] + end
        self._next = self._after + self._before


class BackgroundEncoder(ResponseEncoder):
    """The events of a response in the background; `queued` comes before all others."""

    _first = len(_QUEUED) + 1

    def queued(self) -> bytes:
        """Return the first events, before the engine has begun."""
        begun = {"response": {**self._draft.begun, "status": "queued"}}
        return framed([(name, begun) for name in _QUEUED], 0)

    @override
    def start(self, index: int) -> bytes:
        self._has_begun = True
        begun = {"response": self._draft.begun}
        return framed([("response.in_progress", begun)], len(_QUEUED))


class SocketEncoder(ResponseEncoder):
    """The events of a response over a WebSocket; the first ones may be sent early.

    Frames have no names, and a body in which each event is one line is split in one step.
    """

    begins_early = True
    is_named = False


class FrameEncoder(SocketEncoder):
    """The events of a response as frames of a WebSocket, for servers that write them so."""

    in_frames = True


class WarmUpEncoder(SocketEncoder):
    """The events of a response for which nothing is generated."""

    @override
    def texts(self, index: int, texts: Sequence[str]) -> bytes:
        return b""

    @override
    def delta(self, index: int, delta: Delta) -> bytes:
        return b""

    @override
    def end(self, index: int, reason: FinishReason) -> bytes:
        return b""

    @override
    def whole(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        return self._draft.ended((), "stop", usage)
