"""JSON in parts, which are sent one by one; encoding them does not block other threads for long.

orjson holds the interpreter lock until a value is complete: 10 ms for the log-probabilities of
4,000 tokens, or for an image of 20 MB. Here it gets one element or one piece of a text at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
