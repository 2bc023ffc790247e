"""Tool calls in content: each one after a marker or, if bare, as the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import override

from ..generation.parts import Parser, Part
from .json_call import Broken
from .parsing import BLANKS, Blanks, MarkerFinder


class CallParser(Protocol):
    """A parser of the text after a marker (`json_call.JsonCallParser`).

    Attributes:
        complete: the number of parts so far up to the end of the last complete call.
    """

    done: bool
    complete: int

    def feed(self, data: bytes) -> tuple[int, list[Part]]:
        """Return how many of the bytes belong to calls, and their parts."""
        ...

    def taken(self) -> list[Part]:
        """Return the parsed parts that have not been returned yet."""
        ...

    def end(self) -> list[Part]:
        """Return the parts that only the end of the text completes."""
        ...


class Calls(Parser):
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
        self._blanks = Blanks()
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
    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        out: list[Part] = []
        # Every token inside an enforced call is part of it, even a marker.
        inside = self._reader is not None and (self._enforced or data not in self._markers.all)
        is_text = inside or data in self._within or (self._ended and data == self._end)
        if mark and not is_text:
            return self._marked(data)
        self._text += data
        while self._text and self._step(out):
            pass
        return out

    @override
    def end(self) -> list[Part]:
        out = self._cut()
        return out + (self._blanks.drop() if self._called else self._blanks.flush())

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

    def _marked(self, data: bytes) -> list[Part]:
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
            blanks = self._text[: len(self._text) - len(bare)]
            self._text = bare
            self._begin(blanks)
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
        except Broken as error:
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
        before = self._blanks.drop() if parts or self._enforced else self._blanks.flush()
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
        except Broken:
            # An enforced call that was cut off is not content.
            return self._pass_on(True) if self._enforced else self._dropped()
        return self._pass_on(True)

    def _close(self, out: list[Part]) -> bool:
        """Parse the end marker of a call, if present; the next call or content follows."""
        bare = self._text.lstrip(BLANKS)
        blanks = len(self._text) - len(bare)
        end, again = self._end, self._again
        if not bare or any(bare != one and one.startswith(bare) for one in (end, again)):
            return False
        self._ended, self._looks = False, self._bare
        if end and bare.startswith(end):
            out.append(Part("nothing", b"", blanks + len(end)))
            self._text = bare[len(end) :]
        elif self._bare:
            out.append(Part("nothing", b"", blanks))
            self._text = bare
        elif again and bare.startswith(again):
            self._begin(self._text[:blanks])
            self._text = bare
        else:
            out += self._content(self._text[:blanks])
            self._text = bare
        return True

    def _content(self, data: bytes) -> list[Part]:
        return self._blanks.content(data) if data else []
