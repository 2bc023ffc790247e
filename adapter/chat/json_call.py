"""Tool calls written as JSON, parsed byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias

import orjson

from ..generation.parts import Part
from .parsing import BLANKS

# The keys of a call's name and arguments in most formats.
NAME = "name"
ARGUMENTS = ("arguments", "parameters")
# The name of the only argument of a function that represents a custom tool.
INPUT = "input"
# The longest name of a function: that of a namespace, `__`, and a name in it.
LONGEST_NAME = 128 + 2 + 128

_BLANKS = frozenset(BLANKS)
_DELIMITERS = _BLANKS | frozenset(b",]}")
_QUOTE, _BACKSLASH = b'"\\'
_OPEN, _CLOSE = frozenset(b"{["), frozenset(b"}]")

Bytes: TypeAlias = Generator[None, int, int]
Steps: TypeAlias = Generator[None, int, None]


class Broken(Exception):
    """An error for text that is not a call.

    Attributes:
        at: the index of the first wrong byte in the data fed last.
    """

    at = 0


class JsonCallParser:
    """A parser of an object `{"name": …, "arguments": {…}}`, or of a list of such objects.

    Arguments are returned unchanged and as they arrive, once the name is known.

    Args:
        name, arguments: the keys.
        check: returns True if a function is offered; if given, arguments are checked, too.

    Attributes:
        complete: see `CallParser`.
    """

    def __init__(
        self,
        name: str = NAME,
        arguments: tuple[str, ...] = ARGUMENTS,
        check: Callable[[str], bool] | None = None,
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._check = check
        self._parts: list[Part] = []
        self._count = 0
        self.complete = 0
        self._size = 0
        self._fragment = bytearray()
        self._whole = bytearray()
        self._peeked: int | None = None
        # True if the calls so far are complete, so that the text may end.
        self._may_end = False
        self._steps = self._run()
        next(self._steps)
        self.done = False

    def feed(self, data: bytes) -> tuple[int, list[Part]]:
        """Return how many of the bytes belong to calls, and their parts.

        Raises:
            Broken: the bytes are not a call.
        """
        for position, byte in enumerate(data):
            self._size += 1
            try:
                self._steps.send(byte)
            except StopIteration:
                self.done = True
                return position + 1, self.taken()
            except Broken as error:
                error.at = position
                raise
        return len(data), self.taken()

    def end(self) -> list[Part]:
        """Return the parts that only the end of the text completes.

        Raises:
            Broken: the text ends inside a call.
        """
        if not self._may_end:
            raise Broken
        return self.taken()

    def taken(self) -> list[Part]:
        """Return the parsed parts that have not been returned yet."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def _run(self) -> Steps:
        byte = yield from self._next()
        if byte != ord("["):
            yield from self._call(byte)
            return
        byte = yield from self._next()
        while True:
            yield from self._call(byte)
            if (yield from self._more(ord("]"))):
                return
            byte = yield from self._next()

    def _call(self, byte: int) -> Steps:
        """Parse the object of a call, whose first byte is given."""
        name: str | None = None
        given: bytes | None = None
        if byte != ord("{"):
            raise Broken
        byte = yield from self._next()
        while True:
            key = yield from self._string(byte)
            if (yield from self._next()) != ord(":"):
                raise Broken
            byte = yield from self._next()
            if key == self._name and name is None:
                name = yield from self._string(byte)
                self._begin(name)
                if given is not None:
                    self._fragment += given
                    self._flush()
            elif key in self._arguments and given is None:
                given = yield from self._given(byte, name is not None)
                # What follows is not part of the arguments, at any cut of the text.
                self._flush()
            else:
                other = bytearray()
                yield from self._value(byte, other)
                _loaded(bytes(other))
            if (yield from self._more(ord("}"))):
                break
            byte = yield from self._next()
        if name is None:
            raise Broken
        if given is None:
            self._fragment += b"{}"
        self._check_whole()

    def _check_whole(self) -> None:
        """Finish a call's arguments; raise `Broken` for checked arguments other than an object."""
        self._flush()
        if self._check is not None and not isinstance(_loaded(bytes(self._whole)), dict):
            raise Broken
        self._settle()

    def _settle(self) -> None:
        """Account for all bytes so far: they are complete calls, and what is between them."""
        if self._size:
            self._put("nothing", b"")
        self.complete = self._count

    def _given(self, byte: int, named: bool) -> Generator[None, int, bytes]:
        """Parse the arguments; an object after the name is returned as it arrives."""
        if named and byte == ord("{"):
            yield from self._value(byte, self._fragment)
            return b""
        raw = bytearray()
        yield from self._value(byte, raw)
        arguments = _as_object(bytes(raw))
        if named:
            self._fragment += arguments
        return arguments

    def _begin(self, name: str) -> None:
        if self._check is not None and not self._check(name):
            raise Broken
        self._put("call", name.encode())
        self._whole.clear()

    def _flush(self) -> None:
        if self._fragment:
            self._whole += self._fragment
            self._put("arguments", bytes(self._fragment))
            self._fragment.clear()

    def _put(self, kind: str, data: bytes) -> None:
        self._parts.append(Part(kind, data, self._size))  # type: ignore[arg-type]
        self._count += 1
        self._size = 0

    def _next(self) -> Bytes:
        """Return the next byte that is not blank."""
        byte, self._peeked = self._peeked, None
        while byte is None or byte in _BLANKS:
            byte = yield
        return byte

    def _marker(self, *markers: bytes) -> Generator[None, int, bytes]:
        """Parse whitespace and one of several markers, and return it; an empty one needs no text.

        No marker begins with another.
        """
        text = b""
        while text not in markers:
            text += bytes([(yield from self._next()) if not text else (yield)])
            if not any(marker.startswith(text) for marker in markers):
                raise Broken
        self._may_end = False
        return text

    def _more(self, close: int) -> Generator[None, int, bool]:
        """Return True if the list or object ends here, False if a comma follows."""
        byte = yield from self._next()
        if byte not in (close, ord(",")):
            raise Broken
        return byte == close

    def _string(self, byte: int) -> Generator[None, int, str]:
        raw = bytearray()
        if byte != _QUOTE:
            raise Broken
        yield from self._value(byte, raw)
        text = _loaded(bytes(raw))
        assert isinstance(text, str)
        return text

    def _value(self, byte: int, into: bytearray) -> Steps:
        """Parse a value of any kind, whose first byte is given, without checking it."""
        depth = 0
        while True:
            into.append(byte)
            if byte == _QUOTE:
                yield from self._quoted(into)
            elif byte in _OPEN:
                depth += 1
            elif byte in _CLOSE:
                depth -= 1
                if depth < 0:
                    raise Broken
            elif not depth:
                yield from self._scalar(into)
                return
            if not depth:
                return
            byte = yield

    def _quoted(self, into: bytearray) -> Steps:
        while True:
            byte = yield
            into.append(byte)
            if byte == _QUOTE:
                return
            if byte == _BACKSLASH:
                into.append((yield))

    def _scalar(self, into: bytearray) -> Steps:
        """Parse a number or a literal, which ends at the byte after it."""
        while True:
            byte = yield
            if byte in _DELIMITERS:
                self._peeked = byte
                return
            into.append(byte)


def _as_object(raw: bytes) -> bytes:
    """Return arguments as an object; they may also be null, or a string of JSON."""
    value = _loaded(raw)
    if isinstance(value, str):
        raw = value.encode()
        value = _loaded(raw) if value.strip() else None
    if value is None:
        return b"{}"
    if not isinstance(value, dict):
        raise Broken
    return raw


def _loaded(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise Broken from None
