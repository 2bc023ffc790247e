"""The messages of gpt-oss: channels for reasoning, preambles, tool calls and the answer.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from ....backends.grammar.regex import literal
from ...generation.choice import Parser, Part
from ..parsers import BLANKS, CallParser, MarkerFinder, ParseFailed, Steps, TrailingSpace
from .base import ToolCallFormat
from .base import marker as marker_of

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)
_RECIPIENT = re.compile(rb"to=(?:functions\.)?([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(rb"<\|channel\|>\s*([a-z]+)")
_OUTSIDE = {START.encode(), CHANNEL.encode()}


class BodyParser(CallParser):
    """A parser of a call's body, which contains only the arguments."""

    def __init__(self, name: str, check: Callable[[str], bool] | None) -> None:
        self._own_name = name
        super().__init__(check)

    def _run(self) -> Steps:
        self._whole.clear()
        byte = yield from self._next()
        if self._check is not None and not self._check(self._own_name):
            raise ParseFailed
        yield from self._object(byte)


class HarmonyParser(Parser):
    """A parser of an assistant turn, which the prompt begins with `<|start|>assistant`.

    Args:
        special: the markers that are tokens of the model.
        check: returns True if a function is offered.
        enforced: True if a grammar guarantees valid calls.
    """

    def __init__(
        self, special: frozenset[str], check: Callable[[str], bool], enforced: bool = False
    ) -> None:
        self._markers = MarkerFinder(MARKERS, special)
        self._check = check
        self._enforced = enforced
        self._trailing = TrailingSpace()
        self._text = b""
        # The header before a body; None inside a body, and in content without a header.
        self._header: bytes | None = b""
        self._first = True
        self._kind = "content"
        self._call: CallParser | None = None
        self._raw = b""
        self._settled = 0
        self._waiting: list[Part] = []
        self._called = False

    @property
    @override
    def in_call(self) -> bool:
        return self._call is not None

    @override
    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        out: list[Part] = []
        if is_control and data in self._markers.all:
            out += self._takes(self._text)
            self._text = b""
            return out + self._marker(data)
        self._text += data
        while (found := self._markers.find(self._text)) is not None:
            at, marker = found
            out += self._takes(self._text[:at])
            self._text = self._text[at + len(marker) :]
            out += self._marker(marker)
        keep = len(self._text) - self._markers.held(self._text)
        out += self._takes(self._text[:keep])
        self._text = self._text[keep:]
        return out

    @override
    def end(self) -> list[Part]:
        out = self._takes(self._text)
        self._text = b""
        out += self._close()
        if self._header:
            out.append(Part("nothing", b"", len(self._header)))
            self._header = b""
        return out + (self._trailing.drop() if self._called else self._trailing.flush())

    def _takes(self, data: bytes) -> list[Part]:
        """Parse text that contains no markers."""
        if not data:
            return []
        if self._header is not None:
            return self._heads(data)
        if self._call is not None:
            return self._calls(self._call, data)
        if self._kind == "content":
            return self._trailing.content(data)
        return [Part("reasoning", data, len(data))]

    def _heads(self, data: bytes) -> list[Part]:
        header = (self._header or b"") + data
        self._header = header
        bare = header.lstrip(BLANKS)
        if self._first and bare and bare[:3] != b"to=" and not b"to=".startswith(bare):
            # A turn without a header is an answer.
            self._header, self._kind = None, "content"
            return self._trailing.content(header)
        return []

    def _marker(self, marker: bytes) -> list[Part]:
        self._first = False
        if marker == MESSAGE.encode() and self._header is not None:
            return self._opens(self._header + marker)
        if self._header is not None and marker not in (END.encode(), START.encode()):
            self._header += marker
            return []
        out = self._close()
        if marker in _OUTSIDE:
            held = len(self._header or b"")
            if held:
                out.append(Part("nothing", b"", held))
            self._header = marker if marker == CHANNEL.encode() else b""
            size = len(marker) - len(self._header)
            return [*out, Part("nothing", b"", size)] if size else out
        return [*out, Part("nothing", b"", len(marker))]

    def _opens(self, header: bytes) -> list[Part]:
        """Begin a body of the kind that the header names."""
        self._header = None
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            name = recipient[1].decode()
            self._call = BodyParser(name, None if self._enforced else self._check)
            self._raw, self._settled = header, 0
            self._waiting = [Part("call", name.encode(), len(header))]
            return [*self._trailing.drop(), *(self._flush() if self._enforced else ())]
        self._kind = "reasoning" if channel is not None and channel[1] == b"analysis" else "content"
        return [Part("nothing", b"", len(header))]

    def _calls(self, call: CallParser, data: bytes) -> list[Part]:
        self._raw += data
        if call.done:
            return []
        try:
            _size, parts = call.feed(data)
        except ParseFailed:
            if not self._enforced:
                return self._dropped()
            self._waiting += call.taken()
            return self._flush() + self._dropped()
        self._waiting += parts
        return self._flush() if self._enforced else []

    def _flush(self) -> list[Part]:
        parts, self._waiting = self._waiting, []
        self._settled += sum(part.size for part in parts)
        self._called = True
        return parts

    def _dropped(self) -> list[Part]:
        self._call, self._kind, self._waiting = None, "content", []
        if self._settled:
            return [Part("nothing", b"", len(self._raw) - self._settled)]
        return self._trailing.content(self._raw)

    def _close(self) -> list[Part]:
        call, self._call = self._call, None
        if call is None:
            return []
        if not call.done:
            return self._dropped()
        parts = self._flush()
        rest = len(self._raw) - self._settled
        return [*parts, Part("nothing", b"", rest)] if rest else parts


class Harmony(ToolCallFormat):
    """The harmony format: a call is a message to a function in the commentary channel."""

    @override
    def parser(
        self, functions: Mapping[str, Any], special: frozenset[str], enforced: bool, forced: bool
    ) -> Parser:
        return HarmonyParser(frozenset() if forced else special, functions.__contains__, enforced)

    @override
    def name_spellings(self, name: str) -> tuple[str, ...]:
        return (f"functions.{name}",)

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        constrain, message = marker_of(CONSTRAIN, special), marker_of(MESSAGE, special)
        return f'{literal(name)} " "? ({constrain} "json")? {message} {arguments}'

    @override
    def envelope(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """A message with reasoning may come before the call."""
        channel, message = marker_of(CHANNEL, special), marker_of(MESSAGE, special)
        over, start = marker_of(END, special), marker_of(START, special)
        reasoning = f"!{over}*" if over.startswith("<") else "[^<]*"
        before = f'({channel} "analysis" {message} {reasoning} {over} {start} "assistant")?'
        return f'{before} {channel} "commentary to=functions."', "call"
