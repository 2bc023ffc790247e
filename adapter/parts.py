"""JSON in parts, so that encoding and counting its values do not block other threads for long.

orjson holds the interpreter lock until a value is complete: 10 ms for the log-probabilities of
4,000 tokens or for an image of 20 MB. Here it gets one element or a piece of a text at a time.
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


class ChunkedJson:
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


# Patterns of the parts that are read at once. All repetitions are bounded, because a match holds
# the interpreter lock, too.
_SHORT = rb'"[^"\\]{0,512}+"'
_STRING_PART = re.compile(rb'(?:[^"\\]{1,8192}+|\\.){0,64}+', re.DOTALL)
_STRUCTURE = re.compile(rb'(?:[^"]{1,8192}+|%b){0,64}+' % _SHORT)
_SHORT_STRING = re.compile(_SHORT)


def most_values(body: bytes) -> int:
    """Return an upper bound of the number of values in JSON; strings may contain their marks."""
    return sum(
        body.count(mark, start, start + PART)
        for start in range(0, len(body), PART)
        for mark in (b",", b"[", b"{")
    )


def count_values(body: bytes) -> tuple[int, int, int]:
    """Return the number of arrays and objects in JSON, that of fields, and that of all values."""
    containers = fields = commas = 0
    for part in _without_strings(body):
        containers += part.count(b"[") + part.count(b"{")
        fields += part.count(b":")
        commas += part.count(b",")
    return containers, fields, containers + commas


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
