"""Markers between reasoning, content and tool calls (sans-I/O).

Parsers take bytes, because a token may end inside a character. Each part has the number of bytes
of the text that it accounts for, which places log-probabilities and stop sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from typing_extensions import override

from ...backends.grammar.dialects import allowed, modern
from ...backends.grammar.gbnf import UnsupportedSchema
from ..generation.choice import Parser, Part

BLANKS = b" \t\r\n"


class TextParser(Parser):
    """A parser that returns all text as content."""

    in_call = False

    @override
    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        """A control token is not part of the content."""
        if is_control:
            return [Part("nothing", b"", len(data))]
        return [Part("content", data, len(data))]

    @override
    def end(self) -> list[Part]:
        return []


class MarkerFinder:
    """A search for the first of several markers in a text.

    Args:
        markers: the markers, none of which contains another.
        special: markers that are tokens of the model: text with the same spelling is not a marker.
    """

    def __init__(self, markers: Sequence[str], special: frozenset[str]) -> None:
        self.all = frozenset(marker.encode() for marker in markers)
        self._texts = [marker.encode() for marker in markers if marker not in special]

    def take_texts(self) -> None:
        """Accept text with the spelling of any marker as that marker from now on."""
        self._texts = sorted(self.all)

    def find(self, text: bytes) -> tuple[int, bytes] | None:
        """Return the position of the first marker and the marker, or None."""
        found = [(at, one) for one in self._texts if (at := text.find(one)) >= 0]
        return min(found) if found else None

    def held(self, text: bytes) -> int:
        """Return how many bytes at the end of a text may be the beginning of a marker."""
        longest = 0
        for one in self._texts:
            for size in range(min(len(one) - 1, len(text)), longest, -1):
                if text.endswith(one[:size]):
                    longest = size
                    break
        return longest


class TrailingSpace:
    """A buffer that holds back whitespace at the end of content until more content follows."""

    def __init__(self) -> None:
        self._held = b""

    def content(self, data: bytes) -> list[Part]:
        """Add content; return the known part without the whitespace at its end."""
        data = self._held + data
        sure = data.rstrip(BLANKS)
        self._held = data[len(sure) :]
        return [Part("content", sure, len(sure))] if sure else []

    def drop(self) -> list[Part]:
        """Return the held whitespace as nothing, since it is next to a marker."""
        held, self._held = self._held, b""
        return [Part("nothing", b"", len(held))] if held else []

    def flush(self) -> list[Part]:
        """Return the held whitespace as content."""
        held, self._held = self._held, b""
        return [Part("content", held, len(held))] if held else []


# The keys of a call's name and arguments in most formats.
NAME = "name"
ARGUMENTS = ("arguments", "parameters")
# The name of the only argument of a function that represents a custom tool.
INPUT = "input"
# The longest name of a function: that of a namespace, `__`, and a name in it.
LONGEST_NAME = 128 + 2 + 128
NAME_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")

_BLANK_BYTES = frozenset(BLANKS)
_DELIMITERS = _BLANK_BYTES | frozenset(b",]}")
_QUOTE, _BACKSLASH = b'"\\'
_OPEN, _CLOSE = frozenset(b"{["), frozenset(b"}]")

Bytes: TypeAlias = Generator[None, int, int]
Steps: TypeAlias = Generator[None, int, None]


class ParseFailed(Exception):
    """An error for text that is not a call.

    Attributes:
        at: the index of the first wrong byte in the data fed last.
    """

    at = 0


class CallParser:
    """A parser of an object `{"name": …, "arguments": {…}}`, or of a list of such objects.

    Arguments are returned unchanged and as they arrive, once the name is known. Subclasses parse
    other calls.

    Args:
        check: returns True if a function is offered; if given, arguments are checked, too.
        name, arguments: the keys.

    Attributes:
        complete: the number of parts so far up to the end of the last complete call.
    """

    def __init__(
        self,
        check: Callable[[str], bool] | None = None,
        name: str = NAME,
        arguments: tuple[str, ...] = ARGUMENTS,
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
            ParseFailed: the bytes are not a call.
        """
        send, position = self._steps.send, 0
        try:
            for position, byte in enumerate(data):  # noqa: B007
                self._size += 1
                send(byte)
        except StopIteration:
            self.done = True
            return position + 1, self.taken()
        except ParseFailed as error:
            error.at = position
            raise
        return len(data), self.taken()

    def end(self) -> list[Part]:
        """Return the parts that only the end of the text completes.

        Raises:
            ParseFailed: the text ends inside a call.
        """
        if not self._may_end:
            raise ParseFailed
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
            raise ParseFailed
        byte = yield from self._next()
        while True:
            key = yield from self._string(byte)
            if (yield from self._next()) != ord(":"):
                raise ParseFailed
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
            raise ParseFailed
        if given is None:
            self._fragment += b"{}"
        self._check_whole()

    def _object(self, byte: int) -> Steps:
        """Parse arguments that are an object, whose first byte is given."""
        if byte != ord("{"):
            raise ParseFailed
        yield from self._value(byte, self._fragment)
        self._check_whole()

    def _check_whole(self) -> None:
        """Finish a call's arguments; raise `ParseFailed` if checked ones are no object."""
        self._flush()
        if self._check is not None and not isinstance(_loaded(bytes(self._whole)), dict):
            raise ParseFailed
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
            raise ParseFailed
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
        byte, self._peeked = self._peeked, None
        while byte is None or byte in _BLANK_BYTES:
            byte = yield
        return byte

    def _function_name(self, byte: int, end: int) -> Generator[None, int, str]:
        """Return the name of a function up to a byte after it; its first byte is given."""
        name = bytearray()
        while byte != end:
            name.append(byte)
            if byte not in NAME_BYTES or len(name) > LONGEST_NAME:
                raise ParseFailed
            byte = yield
        return name.decode()

    def _marker(self, *markers: bytes) -> Generator[None, int, bytes]:
        """Parse whitespace and one of several markers, and return it; an empty one needs no text.

        No marker begins with another.
        """
        text = b""
        while text not in markers:
            text += bytes([(yield from self._next()) if not text else (yield)])
            for marker in markers:
                if marker.startswith(text):
                    break
            else:
                raise ParseFailed
        self._may_end = False
        return text

    def _more(self, close: int) -> Generator[None, int, bool]:
        """Return True if the list or object ends here, False if a comma follows."""
        byte = yield from self._next()
        if byte not in (close, ord(",")):
            raise ParseFailed
        return byte == close

    def _string(self, byte: int) -> Generator[None, int, str]:
        raw = bytearray()
        if byte != _QUOTE:
            raise ParseFailed
        yield from self._value(byte, raw)
        text = _loaded(bytes(raw))
        assert isinstance(text, str)
        return text

    def _value(self, byte: int, into: bytearray) -> Steps:
        """Parse a value of any kind, whose first byte is given, without checking it.

        A number or a word ends at whitespace, a comma or a closing bracket of JSON.
        """
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
                    raise ParseFailed
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
        raise ParseFailed
    return raw


def _loaded(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ParseFailed from None


class ToolCallParser(Parser):
    """A parser that separates calls from content.

    Args:
        make: makes a parser of the text after a marker; its argument is True if the parser must
            check the call.
        begin: the markers that begin a call.
        end: the marker after a call, which may be missing.
        bare: True if text that begins with JSON is a call; further calls then follow after `;`.
        special: markers that are tokens of the model: text with the same spelling is not a marker.
        enforced: True if a grammar guarantees valid calls, which are then returned as they arrive.
            Otherwise a call is returned when it is complete, and an invalid one is content.
        tokens: all strings of the format that can be tokens of the model.
        again: text after a call that begins another one, without a marker between them.
        forced: True if the answer has only calls, so that a part of a marker at its end is not
            content.
    """

    def __init__(
        self,
        make: Callable[[bool], CallParser],
        begin: Sequence[str] = (),
        end: str = "",
        bare: bool = False,
        special: frozenset[str] = frozenset(),
        enforced: bool = False,
        tokens: Sequence[str] = (),
        again: str = "",
        forced: bool = False,
    ) -> None:
        self._make = make
        self._markers = MarkerFinder(begin, special)
        self._end = b";" if bare else end.encode()
        self._again = again.encode()
        self._tokens = frozenset(token.encode() for token in tokens)
        # Tokens that are only a part of a marker.
        markers = (*self._markers.all, self._end)
        self._within = {
            one for one in self._tokens if one not in markers and any(one in own for own in markers)
        }
        self._bare = bare
        self._forced = forced
        self._enforced = enforced
        self._trailing = TrailingSpace()
        self._text = b""
        # The current call: its bytes, how many of them the returned parts account for, and the
        # parts that are held back until it is complete.
        self._reader: CallParser | None = None
        self._raw = b""
        self._settled = 0
        # Bytes of the marker, which the first part accounts for, too.
        self._before = 0
        self._waiting: list[Part] = []
        # The number of returned parts of the reader.
        self._passed = 0
        self._singly = False
        self._looks = bare
        self._ended = False
        self._called = self._broke = False

    @property
    @override
    def in_call(self) -> bool:
        return self._reader is not None

    @override
    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        out: list[Part] = []
        # Every token inside an enforced call is part of it, even a marker.
        inside = self._reader is not None and (self._enforced or data not in self._markers.all)
        is_text = inside or data in self._within or (self._ended and data == self._end)
        if is_control and not is_text:
            return self._control_token(data)
        self._text += data
        while self._text and self._step(out):
            pass
        return out

    @override
    def end(self) -> list[Part]:
        out = self._cut()
        return out + (self._trailing.drop() if self._called else self._trailing.flush())

    def _cut(self) -> list[Part]:
        """Return everything held back, at the end of the text or at a marker that cuts it off."""
        out: list[Part] = []
        if self._reader is not None:
            out += self._unfinished(self._reader)
        elif self._is_in_marker():
            out.append(Part("nothing", b"", len(self._text)))
        else:
            out += self._content(self._text)
        self._text, self._ended, self._reader = b"", False, None
        return out

    def _is_in_marker(self) -> bool:
        """Return True if the text is the beginning of a marker, and so is not content."""
        if self._ended and self._end.startswith(self._text.lstrip(BLANKS)):
            return True
        is_sure = self._text and (self._forced or any(one in self._text for one in self._within))
        return bool(is_sure) and any(one.startswith(self._text) for one in self._markers.all)

    def _control_token(self, data: bytes) -> list[Part]:
        """Parse a preserved token, which begins a call or is not shown."""
        out = self._cut()
        self._looks = False
        if data in self._markers.all:
            self._begin(data)
            return out
        if self._broke and data in self._tokens:
            # The marker at the beginning was content, too.
            self._broke = data != self._end
            return out + self._content(data)
        return [*out, Part("nothing", b"", len(data))]

    def _step(self, out: list[Part]) -> bool:
        """Parse some of the text; return True if there may be more to do."""
        if self._reader is not None:
            return self._read(self._reader, out)
        if self._ended:
            return self._close(out)
        if self._looks:
            return self._look(out)
        found = self._markers.find(self._text)
        if found is None:
            keep = len(self._text) - self._markers.held(self._text)
            out += self._content(self._text[:keep])
            self._text = self._text[keep:]
            return False
        at, marker = found
        out += self._content(self._text[:at])
        self._text = self._text[at + len(marker) :]
        self._begin(marker)
        return True

    def _look(self, out: list[Part]) -> bool:
        """Begin a call if the text begins with JSON; return False if that is not known yet."""
        bare = self._text.lstrip(BLANKS)
        if not bare:
            return False
        self._looks = False
        if bare[0] in b"{[":
            whitespace = self._text[: len(self._text) - len(bare)]
            self._text = bare
            self._begin(whitespace)
        return True

    def _begin(self, marker: bytes) -> None:
        self._reader = self._make(not self._enforced)
        self._raw, self._settled, self._before = marker, 0, len(marker)
        self._passed = 0
        # Bare JSON is a call only as a whole.
        self._singly = marker in self._markers.all

    def _read(self, parser: CallParser, out: list[Part]) -> bool:
        try:
            size, parts = parser.feed(self._text)
        except ParseFailed as error:
            # The first wrong byte is parsed again.
            self._raw += self._text[: error.at]
            self._text = self._text[error.at :]
            self._waiting += parser.taken()
            out += self._complete(parser)
            out += self._dropped()
            return True
        self._raw += self._text[:size]
        self._text = self._text[size:]
        self._waiting += parts
        out += self._pass_on(True) if parser.done else self._complete(parser)
        if parser.done:
            self._reader, self._ended = None, True
        return parser.done

    def _complete(self, parser: CallParser) -> list[Part]:
        """Return the parts of complete calls, or all if a grammar guarantees the rest."""
        if self._enforced:
            return self._pass_on(False)
        count = parser.complete - self._passed if self._singly else 0
        if count <= 0:
            return []
        rest, self._waiting = self._waiting[count:], self._waiting[:count]
        self._passed = parser.complete
        out = self._pass_on(False)
        self._waiting = rest
        return out

    def _pass_on(self, whole: bool) -> list[Part]:
        """Return the waiting parts of a call; if it is complete, they account for all its bytes."""
        parts, self._waiting = self._waiting, []
        # Whitespace before a call is not content; it is if the marker begins no call.
        before = self._trailing.drop() if parts or self._enforced else self._trailing.flush()
        if parts and self._before:
            parts[0] = parts[0]._replace(size=parts[0].size + self._before)
            self._before = 0
        self._settled += sum(part.size for part in parts)
        self._called = self._called or bool(parts)
        if whole and self._enforced:
            self._markers.take_texts()
        if whole and len(self._raw) > self._settled:
            parts.append(Part("nothing", b"", len(self._raw) - self._settled))
        return before + parts

    def _dropped(self) -> list[Part]:
        """Drop a call that is invalid: it is content, unless some of its parts were returned."""
        self._reader, self._waiting = None, []
        if self._settled and self._enforced:
            return [Part("nothing", b"", len(self._raw) - self._settled)]
        self._broke = True
        return self._content(self._raw[self._settled :])

    def _unfinished(self, parser: CallParser) -> list[Part]:
        try:
            self._waiting += parser.end()
        except ParseFailed:
            # An enforced call that was cut off is not content.
            return self._pass_on(True) if self._enforced else self._dropped()
        return self._pass_on(True)

    def _close(self, out: list[Part]) -> bool:
        """Parse the end marker of a call, if present; the next call or content follows."""
        bare = self._text.lstrip(BLANKS)
        whitespace = len(self._text) - len(bare)
        end, again = self._end, self._again
        if not bare or any(bare != one and one.startswith(bare) for one in (end, again)):
            return False
        self._ended, self._looks = False, self._bare
        if end and bare.startswith(end):
            out.append(Part("nothing", b"", whitespace + len(end)))
            self._text = bare[len(end) :]
        elif self._bare:
            out.append(Part("nothing", b"", whitespace))
            self._text = bare
        elif again and bare.startswith(again):
            self._begin(self._text[:whitespace])
            self._text = bare
        else:
            out += self._content(self._text[:whitespace])
            self._text = bare
        return True

    def _content(self, data: bytes) -> list[Part]:
        return self._trailing.content(data) if data else []


class StrictCallParser(Parser):
    """A parser whose calls of strict functions match their schemas; other such calls are content.

    It checks the calls where no grammar guarantees them.

    Args:
        own: a parser that returns the parts of a call when the call is complete.
        schemas: the schemas of the strict functions' arguments, by name; None allows any.
    """

    def __init__(self, own: Parser, schemas: Mapping[str, Any]) -> None:
        self._own = own
        self._schemas = schemas
        # The bytes that no returned part accounts for.
        self._raw = b""

    @property
    @override
    def in_call(self) -> bool:
        return self._own.in_call

    @override
    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        self._raw += data
        return self._checked(self._own.feed(data, is_control))

    @override
    def end(self) -> list[Part]:
        return self._checked(self._own.end())

    def _checked(self, parts: Sequence[Part]) -> list[Part]:
        out: list[Part] = []
        start = 0
        while start < len(parts):
            end = start + 1
            if parts[start].kind == "call":
                while end < len(parts) and parts[end].kind == "arguments":
                    end += 1
            group = parts[start:end]
            size = sum(part.size for part in group)
            raw, self._raw = self._raw[:size], self._raw[size:]
            out += group if self._is_valid(group) else [Part("content", raw, size)]
            start = end
        return out

    def _is_valid(self, parts: Sequence[Part]) -> bool:
        name, *arguments = parts
        if name.kind != "call":
            return True
        schema = self._schemas.get(name.data.decode())
        if schema is None:
            return True
        try:
            value = orjson.loads(b"".join(part.data for part in arguments) or b"{}")
            return bool(allowed(modern(schema), [value], ()))
        except (orjson.JSONDecodeError, UnsupportedSchema):
            return False
