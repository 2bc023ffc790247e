"""One choice of a chat, taken apart: its deltas, its finish reason, its tokens (sans-I/O).

The order of deltas is contract 3.5 and 3.6.
"""

from __future__ import annotations

import codecs
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson

from ..backends.base import Finish, Piece, PromptTokens
from ..backends.stops import StopMatcher
from ..schemas.openai.common import FinishReason
from .choice import Delta
from .logprobs import Entry, Placer
from .readers.parts import Part, Reader
from .tools import INPUT

_ALPHABET = string.ascii_letters + string.digits
Deltas: TypeAlias = list[tuple[dict[str, Any], Sequence[Entry]]]

_decoder = codecs.getincrementaldecoder("utf-8")


class Form(NamedTuple):
    """How a choice is read and shown.

    Args:
        reader: makes what takes its text apart.
        stops: strings that end it where they stand in its content.
        called: the finish reason where it made calls.
        parallel: whether more calls than one are shown.
        legacy: whether a call is shown as the deprecated `function_call`.
        custom: tools that take text, which is told when it is complete.
    """

    reader: Callable[[], Reader]
    stops: tuple[str, ...] = ()
    called: FinishReason = "tool_calls"
    parallel: bool = True
    legacy: bool = False
    custom: frozenset[str] = frozenset()


class Message:
    """Takes text apart, and cuts its content at stops; thoughts and calls have none.

    As a `Matcher` it tells an engine where to end.
    """

    def __init__(self, form: Form) -> None:
        self._reader = form.reader()
        self._matcher = StopMatcher(form.stops)
        self._held = 0
        self.released = 0

    @property
    def stop(self) -> str | None:
        """See `Matcher.stop`."""
        return self._matcher.stop

    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """The parts that nothing can take back any more."""
        return self._cut(self._reader.feed(data, mark)) if self.stop is None else []

    def end(self) -> list[Part]:
        """The rest of them."""
        if self.stop is not None:
            return []
        parts = self._cut(self._reader.end())
        return parts if self.stop is not None else parts + self._flush()

    def advance(self, data: bytes, mark: bool = False) -> int:
        """See `Matcher.advance`."""
        before = self.released
        self.feed(data, mark)
        return self.released - before

    def settle(self) -> int:
        """See `Matcher.settle`."""
        before = self.released
        self.end()
        return self.released - before

    def _cut(self, parts: Sequence[Part]) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if part.kind != "content":
                # A stop does not reach across a call.
                out += [*self._flush(), part]
                self.released += part.size
                continue
            data = self._matcher.feed(part.data)
            self._held += len(part.data) - len(data)
            if data:
                out.append(Part("content", data, len(data)))
                self.released += len(data)
            if self.stop is not None:
                break
        return out

    def _flush(self) -> list[Part]:
        data, self._held = self._matcher.flush(), 0
        self.released += len(data)
        return [Part("content", data, len(data))] if data else []


class MessageChoice:
    """A choice whose text is taken apart; the same as `Choice` to those who run it."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._message = Message(form)
        self._decoders = {kind: _decoder("replace") for kind in ("content", "reasoning")}
        self._arguments = _decoder("replace")
        self._placer: Placer | None = None
        # Tokens of markers, which are shown with the call that they begin, if with any.
        self._marker: list[Entry] = []
        # Those of which no text is complete yet.
        self._incomplete: list[Entry] = []
        self._begun = self._said = False
        self._calls = 0
        # The arguments of a custom tool's call, None in a function's.
        self._input: str | None = None
        self._position = 0
        self._starts: list[tuple[int, int]] = []
        self._answer_start = 0
        self.reasoning = ""
        self.reasoning_tokens: int | None = 0
        self.finish: Finish | None = None

    def start(self) -> Delta:
        """See `Choice.start`: nothing, for what comes first is not known yet."""
        return Delta("")

    def prompt(self, event: PromptTokens) -> Delta:
        """See `Choice.prompt`: chat shows no prompt."""
        raise NotImplementedError

    def take(self, pieces: Sequence[Piece]) -> Delta:
        """What may be seen after some more was generated."""
        return Delta("", (), [delta for piece in pieces for delta in self._fed(piece)])

    def _fed(self, piece: Piece) -> Deltas:
        if piece.tokens:
            if self._placer is None:
                self._placer = Placer(0)
            self._placer.add(piece.tokens)
        if self._begun_answer:
            pass
        elif piece.tokens:
            at = self._position
            for token in piece.tokens:
                self._starts.append((at, 1))
                at += len(token.data)
        else:
            self._starts.append((self._position, piece.token_count))
        self._position += len(piece.data)
        return self._shown(self._message.feed(piece.data, piece.mark))

    def end(self, event: Finish) -> tuple[Delta, FinishReason]:
        """The rest, and why it ended."""
        self.finish = event
        deltas = self._shown(self._message.end())
        deltas += self._told_input()
        if self._incomplete and not self._calls:
            # A character that the limit cut off: its tokens were generated all the same.
            deltas += self._first({"content": ""}, self._incomplete)
        if not self._said and not self._calls:
            deltas += self._first({"content": ""}, ())
        self._count_reasoning()
        reason: FinishReason = "stop"
        if self._message.stop is None and event.reason == "length":
            reason = "length"
        elif self._calls:
            reason = self._form.called
        return Delta("", (), deltas), reason

    @property
    def _begun_answer(self) -> bool:
        return self._said or self._calls > 0

    def _shown(self, parts: Sequence[Part]) -> Deltas:
        deltas: Deltas = []
        released = self._message.released - sum(part.size for part in parts)
        for part in parts:
            released += part.size
            entries = self._placer.take(released) if self._placer is not None else []
            if part.kind == "nothing":
                self._marker += entries
                continue
            if part.kind in ("call", "arguments"):
                entries = self._marker + entries
            self._marker = []
            if part.kind in ("call", "content"):
                deltas += self._told_input()
            entries = self._incomplete + entries if part.kind != "reasoning" else []
            delta = self._delta(part, released - part.size)
            self._incomplete = entries if delta is None else []
            if delta is not None:
                deltas += self._first(delta, entries)
        return deltas

    def _delta(self, part: Part, start: int) -> dict[str, Any] | None:
        """What a part adds, None where nobody sees it."""
        if part.kind == "reasoning":
            text = self._decoders["reasoning"].decode(part.data)
            self.reasoning += text
            return {"reasoning_content": text} if text else None
        if not self._begun_answer:
            self._answer_start = start
        if part.kind == "content":
            self._said = True
            text = self._decoders["content"].decode(part.data)
            return {"content": text} if text else None
        if part.kind == "call":
            self._calls += 1
            self._arguments = _decoder("replace")
        if self._calls > 1 and not self._form.parallel:
            return None
        if part.kind == "call":
            return self._call(part.data.decode(errors="replace"))
        text = self._arguments.decode(part.data)
        if self._input is not None:
            self._input += text
            return None
        return self._call_delta({"arguments": text}) if text else None

    def _told_input(self) -> Deltas:
        """The text that a custom tool is called with; nothing where it was cut off."""
        arguments, self._input = self._input, None
        try:
            text = orjson.loads(arguments or "null")[INPUT]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return []
        return [({"tool_calls": [{"index": self._calls - 1, "custom": {"input": text}}]}, ())]

    def _call(self, name: str) -> dict[str, Any]:
        if name in self._form.custom:
            self._input = ""
            head = {"index": self._calls - 1, "id": new_call_id(), "type": "custom"}
            return {"tool_calls": [{**head, "custom": {"name": name, "input": ""}}]}
        function = {"name": name, "arguments": ""}
        if self._form.legacy:
            return {"function_call": function}
        return self._call_delta(function, {"id": new_call_id(), "type": "function"})

    def _call_delta(
        self, function: dict[str, str], head: dict[str, str] | None = None
    ) -> dict[str, Any]:
        if self._form.legacy:
            return {"function_call": function}
        return {
            "tool_calls": [{"index": self._calls - 1, **(head or {}), "function": function}],
        }

    def _first(self, delta: dict[str, Any], entries: Sequence[Entry]) -> Deltas:
        """A delta; before content comes the role by itself, with all else in the same one."""
        if self._begun:
            return [(delta, entries)]
        self._begun = True
        if "content" not in delta:
            role = {"role": "assistant", "content": None, **delta, "refusal": None}
            return [(role, entries)]
        role = {"role": "assistant", "content": "", "refusal": None}
        return [(role, ()), (delta, entries)] if delta["content"] else [(role, ())]

    def _count_reasoning(self) -> None:
        """Tokens that begin before the answer; None where the engine does not tell how many."""
        if not self.reasoning:
            return
        end = self._answer_start if self._begun_answer else self._position
        counts = [count for start, count in self._starts if start < end]
        self.reasoning_tokens = sum(counts) if all(counts) else None


def new_call_id() -> str:
    """An id as OpenAI's calls have."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


def folded(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a choice's deltas come to (contract 3.3)."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    parts: dict[str, list[str]] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                parts.setdefault(name, []).append(delta[name])
        for call in delta.get("tool_calls", ()):
            kind, text = ("custom", "input") if "custom" in call else ("function", "arguments")
            if "id" in call:
                own = {key: value for key, value in call.items() if key != "index"}
                calls.append({**own, kind: {**call[kind]}})
            else:
                calls[-1][kind][text] += call[kind][text]
        if "function_call" in delta:
            call = message.setdefault("function_call", {"name": "", "arguments": ""})
            for key, text in delta["function_call"].items():
                call[key] += text
    message |= {name: "".join(texts) for name, texts in parts.items()}
    message |= {"refusal": None, "annotations": []}
    return {**message, "tool_calls": calls} if calls else message
