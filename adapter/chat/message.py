"""The chat deltas of a choice, and the message that they add up to (sans-I/O).

Sections 3.5 and 3.6 of the contract define the order of deltas.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import orjson
from typing_extensions import override

from ...schemas.openai.chat import ChatMessage
from ...schemas.openai.common import FinishReason
from ..generation.choice import Delta
from ..generation.frames import ChunkEncoder
from ..generation.logprobs import Entry
from ..model_entry import REASONING_FIELDS, ReasoningField
from .tools import InputReader

Deltas: TypeAlias = list[tuple[dict[str, Any], Sequence[Entry]]]


class Shape(NamedTuple):
    """The shape of a message in a response.

    Args:
        apart: True if the output is split into parts; the role is then sent with the first delta,
            not when the choice begins.
        legacy: True if a call is returned as the deprecated `function_call`.
        custom: the custom tools, by name.
        reasoning: the field for reasoning; None to omit it.
    """

    apart: bool = False
    legacy: bool = False
    custom: Container[str] = ()
    reasoning: ReasoningField | None = "reasoning_content"


class MessageDeltas:
    """The chat deltas of one choice."""

    __slots__ = ("_begun", "_calls", "_input", "_shape")

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._calls = 0
        # The parser of an open custom tool call, and its tokens whose text is not complete yet.
        self._input: tuple[InputReader, list[Entry]] | None = None
        self._begun = not shape.apart

    @property
    def has_calls(self) -> bool:
        """True if a tool call has begun."""
        return self._calls > 0

    @property
    def takes_text(self) -> bool:
        """True if a content delta is sent alone and unchanged."""
        return self._begun and self._input is None

    def add(self, delta: Delta) -> Deltas:
        """Return the chat deltas for a delta, after the custom tool input that it completes."""
        text, entries, kind, call_id = delta
        if kind == "content":
            return [*self.end(), *self._first({"content": text}, entries)]
        if kind == "reasoning":
            return self._reasoning(text, entries)
        if kind == "call":
            return [*self.end(), *self._first(self._call(text, call_id), entries)]
        if self._input is not None:
            reader, waiting = self._input
            waiting.extend(entries)
            shown = reader.feed(text)
            return self._input_deltas(shown, waiting) if shown else []
        return self._first(self._call_delta({"arguments": text}), entries)

    def end(self) -> Deltas:
        """Return the rest of an open custom tool call."""
        if self._input is None:
            return []
        (reader, waiting), self._input = self._input, None
        return self._input_deltas(reader.end(), waiting)

    def _input_deltas(self, text: str, waiting: list[Entry]) -> Deltas:
        """Return a part of a custom tool's input, or only its tokens, if any."""
        entries = waiting.copy()
        waiting.clear()
        if not text:
            return [({}, entries)] if entries else []
        call = {"index": self._calls - 1, "custom": {"input": text}}
        return [({"tool_calls": [call]}, entries)]

    def _reasoning(self, text: str, entries: Sequence[Entry]) -> Deltas:
        name = self._shape.reasoning
        if name is not None:
            return self._first({name: text}, entries)
        # The role and the log-probabilities are sent without the text.
        return self._first({}, entries) if entries or not self._begun else []

    def _call(self, name: str, call_id: str) -> dict[str, Any]:
        self._calls += 1
        if name in self._shape.custom:
            self._input = (InputReader(), [])
            head = {"index": self._calls - 1, "id": call_id, "type": "custom"}
            return {"tool_calls": [{**head, "custom": {"name": name, "input": ""}}]}
        function = {"name": name, "arguments": ""}
        return self._call_delta(function, {"id": call_id, "type": "function"})

    def _call_delta(
        self, function: dict[str, str], head: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        if self._shape.legacy:
            return {"function_call": function}
        return {"tool_calls": [{"index": self._calls - 1, **(head or {}), "function": function}]}

    def _first(self, fields: dict[str, Any], entries: Sequence[Entry]) -> Deltas:
        """Return fields as deltas, with the role if they are the first.

        The role has its own delta before content, and shares the delta of reasoning or a call.
        """
        if self._begun:
            return [(fields, entries)]
        self._begun = True
        if "content" not in fields:
            role = {"role": "assistant", "content": None, **fields, "refusal": None}
            return [(role, entries)]
        return [(_ROLE, ()), (fields, entries)] if fields["content"] or entries else [(_ROLE, ())]


_ROLE: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
_PLAIN = Shape()
_TEXT = attrgetter("text")


class ChatEncoder(ChunkEncoder):
    """The chunks of a `/v1/chat/completions` stream."""

    def __init__(
        self,
        head: Mapping[str, Any],
        include_usage: bool,
        show: Callable[[Sequence[Entry]], Any] | None = None,
        shape: Shape = _PLAIN,
    ) -> None:
        super().__init__(head, include_usage, show)
        self._shape = shape
        self.is_plain = not shape.apart
        self._messages: dict[int, MessageDeltas] = {}

    @override
    def start(self, index: int) -> bytes:
        """The role, unless the first delta sends it."""
        return b"" if self._shape.apart else self._choice(index, _ROLE, ())

    @override
    def delta(self, index: int, delta: Delta) -> bytes:
        if self.is_plain and self._show is None:
            return self.texts(index, (delta.text,))
        message = self._message(index)
        if self._show is None and delta.kind == "content" and message.takes_text:
            return self.texts(index, (delta.text,))
        return self._shown(index, message.add(delta))

    @override
    def end(self, index: int, reason: FinishReason) -> bytes:
        """The last chunk has no log-probabilities (contract 3.5)."""
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
        rest = self._shown(index, self._message(index).end())
        return rest + self._head + orjson.dumps(last) + self._tail

    def _message(self, index: int) -> MessageDeltas:
        message = self._messages.get(index)
        if message is None:
            message = self._messages[index] = MessageDeltas(self._shape)
        return message

    def _shown(self, index: int, deltas: Deltas) -> bytes:
        return b"".join([self._choice(index, fields, entries) for fields, entries in deltas])

    def _choice(self, index: int, fields: Mapping[str, Any], entries: Sequence[Entry]) -> bytes:
        logprobs = None if self._show is None else self._show(entries)
        choice = {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": None}
        return self._head + orjson.dumps(choice) + self._tail

    def _around(self, index: int) -> tuple[bytes, bytes]:
        return (
            self._head + b'{"index":%d,"delta":{"content":' % index,
            b'},"logprobs":null,"finish_reason":null}' + self._tail,
        )


class SpokenEncoder(ChatEncoder):
    """The chunks of a stream whose content is spoken (contract of audio, 1.3).

    Content is the transcript in `delta.audio`, whose first part has the id. A choice ends with
    `last`, when its audio is complete; `end` only ends its text.

    Args:
        id_of: returns the id of the audio of a choice.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        include_usage: bool,
        show: Callable[[Sequence[Entry]], Any] | None,
        shape: Shape,
        id_of: Callable[[int], str],
    ) -> None:
        super().__init__(head, include_usage, show, shape._replace(apart=True))
        self._id_of = id_of
        self._begun: set[int] = set()
        self._reasons: dict[int, FinishReason] = {}

    @override
    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.kind != "content" or index in self._begun:
            return super().delta(index, delta)
        *before, (fields, entries) = self._message(index).add(delta)
        if before and before[-1][0] is _ROLE:
            fields = before.pop()[0] | fields
        return self._shown(index, [*before, (fields, entries)])

    @override
    def end(self, index: int, reason: FinishReason) -> bytes:
        self._reasons[index] = reason
        message = self._message(index)
        data = self._shown(index, message.end())
        if index not in self._begun and not message.has_calls:
            # An answer without text has audio, too.
            data += self.delta(index, Delta(""))
        return data

    def audio(self, index: int, samples: bytes) -> bytes:
        """Return the frame of a part of the audio."""
        data = b2a_base64(samples, newline=False).decode()
        return self._choice(index, {"audio": {"data": data}}, ())

    def last(self, index: int, expires_at: int | None) -> bytes:
        """Return the frames that end a choice, when its audio is complete.

        Args:
            expires_at: when the id is forgotten, in seconds since 1970; None if there is no audio.
        """
        data = b""
        if expires_at is not None:
            data = self._choice(index, {"audio": {"expires_at": expires_at}}, ())
        return data + super().end(index, self._reasons[index])

    def _choice(self, index: int, fields: Mapping[str, Any], entries: Sequence[Entry]) -> bytes:
        if "content" in fields:
            text = fields["content"]
            fields = {name: value for name, value in fields.items() if name != "content"}
            if text is not None:
                begins = index not in self._begun
                self._begun.add(index)
                own = {"id": self._id_of(index)} if begins else {}
                fields["audio"] = {**own, "transcript": text}
        return super()._choice(index, fields, entries)

    def _around(self, index: int) -> tuple[bytes, bytes]:
        return (
            self._head + b'{"index":%d,"delta":{"audio":{"transcript":' % index,
            b'}},"logprobs":null,"finish_reason":null}' + self._tail,
        )


def message_of(deltas: Sequence[Delta], shape: Shape) -> ChatMessage:
    """Return the message that a choice's deltas add up to (contract 3.3)."""
    if not shape.apart:
        text = "".join(map(_TEXT, deltas))
        return {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    message = MessageDeltas(shape)
    shown = [fields for delta in deltas for fields, _ in message.add(delta)]
    return _folded([*shown, *(fields for fields, _ in message.end())])


def _folded(deltas: Iterable[Mapping[str, Any]]) -> ChatMessage:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    parts: dict[str, list[str]] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", *REASONING_FIELDS):
            if delta.get(name) is not None:
                parts.setdefault(name, []).append(delta[name])
        for call in delta.get("tool_calls", ()):
            _fold_call(calls, call)
        if "function_call" in delta:
            call = message.setdefault("function_call", {"name": "", "arguments": ""})
            for key, text in delta["function_call"].items():
                call[key] += text
    message |= {name: "".join(texts) for name, texts in parts.items()}
    message |= {"refusal": None, "annotations": []}
    if calls:
        message["tool_calls"] = calls
    return message  # type: ignore[return-value]


def _fold_call(calls: list[dict[str, Any]], call: Mapping[str, Any]) -> None:
    kind, text = ("custom", "input") if "custom" in call else ("function", "arguments")
    if "id" in call:
        own = {key: value for key, value in call.items() if key != "index"}
        calls.append({**own, kind: {**call[kind]}})
    else:
        calls[-1][kind][text] += call[kind][text]
