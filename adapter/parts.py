"""JSON in parts, so that encoding and parsing it do not block other threads for long.

orjson holds the interpreter lock until a value is complete: 10 ms for the log-probabilities of
4,000 tokens or for an image of 20 MB, 300 ms for an object of a million fields. Here it gets a few
elements or a piece of a text at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

# Bytes that are sent at once, and characters that are encoded at once.
PART = 262_144
# Levels of arrays and objects that are encoded element by element: from a list of completions down
# to the tokens in the log-probabilities of each choice.
LEVELS = 6


class Parts:
    """The parts of a JSON text."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._part = bytearray()

    def add(self, data: bytes) -> None:
        """Add encoded JSON."""
        self._part += data
        if len(self._part) >= PART:
            self._parts.append(bytes(self._part))
            self._part.clear()

    def add_value(self, value: Any, levels: int = LEVELS) -> None:
        """Encode a value and add it."""
        if isinstance(value, str) and len(value) > PART:
            self.add(b'"')
            for start in range(0, len(value), PART):
                self.add(orjson.dumps(value[start : start + PART])[1:-1])
            self.add(b'"')
        elif isinstance(value, dict) and levels:
            self._add_object(value, levels)
        elif isinstance(value, list) and levels:
            self._add_array(value, levels)
        else:
            self.add(orjson.dumps(value))

    def _add_object(self, value: Mapping[str, Any], levels: int) -> None:
        for index, (name, inner) in enumerate(value.items()):
            self.add((b"," if index else b"{") + orjson.dumps(name) + b":")
            self.add_value(inner, levels - 1)
        self.add(b"}" if value else b"{}")

    def _add_array(self, value: Sequence[Any], levels: int) -> None:
        for index, inner in enumerate(value):
            self.add(b"," if index else b"[")
            self.add_value(inner, levels - 1)
        self.add(b"]" if value else b"[]")

    def end(self) -> Sequence[bytes]:
        """Return all parts."""
        return [*self._parts, bytes(self._part)]


# Patterns of the parts that are parsed at once. All repetitions are bounded, because a match holds
# the interpreter lock, too.
_SPACE = rb"[ \t\r\n]{0,64}+"
_SHORT = rb'"[^"\\]{0,512}+"'
_FLAT = rb'[\[{](?:[^"\[\]{}]{1,512}+|%b){0,32}+[\]}]' % _SHORT
_VALUE = rb'(?:%b|[^ \t\r\n"\[\]{},:]{1,512}+|%b)' % (_SHORT, _FLAT)
_ELEMENTS = re.compile(rb"(?:%b%b%b,){1,64}+" % (_SPACE, _VALUE, _SPACE))
_MEMBERS = re.compile(
    rb"(?:%b%b%b:%b%b%b,){1,64}+" % (_SPACE, _SHORT, _SPACE, _SPACE, _VALUE, _SPACE)
)
_BLANK = re.compile(rb"[ \t\r\n]*+")
_LITERAL = re.compile(rb'[^ \t\r\n"\[\]{},:]*+')
_STRING_PART = re.compile(rb'(?:[^"\\]{1,8192}+|\\.){0,64}+', re.DOTALL)
_STRUCTURE = re.compile(rb'(?:[^"]{1,8192}+|%b){0,64}+' % _SHORT)
_SHORT_STRING = re.compile(_SHORT)


class Nested(ValueError):
    """A text whose arrays and objects are nested too deep."""


def most_values(body: bytes) -> int:
    """Return an upper bound of the number of values in JSON; strings may contain their marks."""
    return sum(
        body.count(mark, start, start + PART)
        for start in range(0, len(body), PART)
        for mark in (b",", b"[", b"{")
    )


def count_values(body: bytes) -> tuple[int, int]:
    """Return the number of arrays and objects in JSON, and that of all values."""
    containers = commas = 0
    for part in _without_strings(body):
        containers += part.count(b"[") + part.count(b"{")
        commas += part.count(b",")
    return containers, containers + commas


def _without_strings(body: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        match = _STRUCTURE.match(body, at)
        if match is not None and match.end() > at:
            yield _SHORT_STRING.sub(b"", match[0])
            at = match.end()
        else:
            at = _end_of_string(body, at)


def _end_of_string(body: bytes, start: int) -> int:
    """Return the position after a string, or that of the end if it is not closed."""
    at = start + 1
    while True:
        match = _STRING_PART.match(body, at)
        if match is None or match.end() == at:
            return min(at + 1, len(body))
        at = match.end()


class _Open:
    """An array or an object that is being parsed."""

    __slots__ = ("is_array", "key", "value")

    def __init__(self, is_array: bool) -> None:
        self.is_array = is_array
        self.value: Any = [] if is_array else {}
        self.key = ""

    def add(self, value: Any) -> None:
        if self.is_array:
            self.value.append(value)
        else:
            self.value[self.key] = value


def parse(body: bytes, most_levels: int) -> Any:
    """Parse JSON as `orjson.loads` does, an array or object in parts.

    Raises:
        orjson.JSONDecodeError: the text is not JSON.
        Nested: it is nested deeper than `most_levels`, and one more.
    """
    return _Parser(body, most_levels).parse()


class _Parser:
    def __init__(self, body: bytes, most_levels: int) -> None:
        self._body = body
        self._most = most_levels
        self._at = 0
        self._open: list[_Open] = []

    def parse(self) -> Any:
        body = self._body
        self._skip()
        if body[self._at : self._at + 1] not in (b"[", b"{"):
            return orjson.loads(body)
        self._begin()
        while True:
            top = self._open[-1]
            self._add_run(top)
            self._skip()
            if not top.value and body[self._at : self._at + 1] == (b"]" if top.is_array else b"}"):
                # Only the first element may be missing.
                done = self._close()
            else:
                if not top.is_array:
                    self._read_key(top)
                if body[self._at : self._at + 1] in (b"[", b"{"):
                    self._begin()
                    continue
                top.add(self._read_scalar())
                done = self._end_element()
            if done is not None:
                self._skip()
                if self._at < len(body):
                    raise self._wrong(b"{}")
                return done.value

    def _add_run(self, top: _Open) -> None:
        """Parse short elements that a comma follows."""
        pattern, begin, end = (_ELEMENTS, b"[", b"]") if top.is_array else (_MEMBERS, b"{", b"}")
        while (match := pattern.match(self._body, self._at)) is not None:
            found = self._loads(begin + match[0][:-1] + end, self._at - 1)
            top.value.extend(found) if top.is_array else top.value.update(found)
            self._at = match.end()

    def _read_key(self, top: _Open) -> None:
        start = self._at
        if self._body[start : start + 1] != b'"':
            raise self._wrong(b"{" if not top.value else b'{"":0,')
        end = _end_of_string(self._body, start)
        top.key = self._loads(self._body[start:end], start)
        self._at = end
        self._skip()
        if self._body[self._at : self._at + 1] != b":":
            raise self._wrong(b'{""')
        self._at += 1
        self._skip()

    def _read_scalar(self) -> Any:
        start = self._at
        if self._body[start : start + 1] == b'"':
            end = _end_of_string(self._body, start)
        else:
            match = _LITERAL.match(self._body, start)
            end = start if match is None else match.end()
        if end == start:
            raise self._wrong(b"[0," if self._open[-1].is_array else b'{"":')
        self._at = end
        return self._loads(self._body[start:end], start)

    def _begin(self) -> None:
        if len(self._open) == self._most:
            raise Nested
        self._open.append(_Open(self._body[self._at : self._at + 1] == b"["))
        self._at += 1

    def _close(self) -> _Open | None:
        """End the innermost array or object, and those that end with it; return the outermost."""
        closed = self._open.pop()
        self._at += 1
        if not self._open:
            return closed
        self._open[-1].add(closed.value)
        return self._end_element()

    def _end_element(self) -> _Open | None:
        """Read a comma, or the ends of arrays and objects; return the outermost if it ends."""
        while True:
            self._skip()
            top = self._open[-1]
            mark = self._body[self._at : self._at + 1]
            if mark == b",":
                self._at += 1
                return None
            if mark != (b"]" if top.is_array else b"}"):
                raise self._wrong(b"[0" if top.is_array else b'{"":0')
            self._open.pop()
            self._at += 1
            if not self._open:
                return top
            self._open[-1].add(top.value)

    def _skip(self) -> None:
        match = _BLANK.match(self._body, self._at)
        if match is not None:
            self._at = match.end()

    def _loads(self, data: bytes, start: int) -> Any:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise self._at_place(error.msg, start + error.pos) from None

    def _wrong(self, before: bytes) -> orjson.JSONDecodeError:
        """Return the error for the text here, which cannot follow `before`."""
        try:
            orjson.loads(before + self._body[self._at : self._at + 64])
        except orjson.JSONDecodeError as error:
            return self._at_place(error.msg, self._at + max(error.pos - len(before), 0))
        return self._at_place("unexpected character", self._at)

    def _at_place(self, message: str, at: int) -> orjson.JSONDecodeError:
        if message.startswith("str is not valid UTF-8"):
            # orjson checks the whole text first, and reports its beginning.
            at = 0
        text = self._body[: max(at, 0)].decode(errors="replace")
        return orjson.JSONDecodeError(message, text, len(text))
