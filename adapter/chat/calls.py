"""Calls among content, each behind a marker or, bare, as all that an answer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..generation.parts import Part
from .json_call import Broken
from .parsing import BLANKS, Blanks, MarkerFinder


class CallParser(Protocol):
    """Reads what stands behind a marker (`json_call.JsonCallParser`)."""

    done: bool

    def feed(self, data: bytes) -> tuple[int, list[Part]]:
        """How many of the bytes belong to calls, and the parts that they make."""
        ...

    def taken(self) -> list[Part]:
        """The parts that are read and were not told yet."""
        ...

    def end(self) -> list[Part]:
        """What only the text's end completes."""
        ...


class Calls:
    """Takes calls out of content.

    Args:
        make: makes a reader for what stands behind a marker; told whether it has to check it.
        begin: markers that begin a call.
        end: what stands behind one; it may be missing.
        bare: whether a text that begins with JSON is a call; others then follow after `;`.
        special: markers that are tokens of the model's: text that is spelled like them is none.
        enforced: whether a grammar keeps calls whole: then they are told as they come. Others are
            told when they are complete, and what is broken is content.
    """

    def __init__(
        self,
        make: Callable[[bool], CallParser],
        begin: Sequence[str] = (),
        end: str = "",
        bare: bool = False,
        special: frozenset[str] = frozenset(),
        enforced: bool = False,
    ) -> None:
        self._make = make
        self._markers = MarkerFinder(begin, special)
        self._end = b";" if bare else end.encode()
        self._bare = bare
        self._enforced = enforced
        self._blanks = Blanks()
        self._text = b""
        # The call that is being read: its bytes, how many of them parts were told of, and the
        # parts that wait until it is complete.
        self._reader: CallParser | None = None
        self._raw = b""
        self._settled = 0
        # Bytes of its marker, which the first part stands for, too.
        self._before = 0
        self._waiting: list[Part] = []
        self._looks = bare
        self._ended = False
        self._called = self._broke = False

    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """See `Parser.feed`."""
        out: list[Part] = []
        # In a call that is sure a token is part of it, whatever it is.
        inside = self._reader is not None and (self._enforced or data not in self._markers.all)
        if mark and not inside and not (self._ended and data == self._end):
            return self._marked(data)
        self._text += data
        while self._text and self._step(out):
            pass
        return out

    def end(self) -> list[Part]:
        """See `Parser.end`."""
        out = self._cut()
        return out + (self._blanks.drop() if self._called else self._blanks.flush())

    def _cut(self) -> list[Part]:
        """All that is held; the text ends here, or a marker cuts it off."""
        out: list[Part] = []
        if self._reader is not None:
            out += self._unfinished(self._reader)
        elif self._ended:
            out.append(Part("nothing", b"", len(self._text)))
        else:
            out += self._content(self._text)
        self._text, self._ended, self._reader = b"", False, None
        return out

    def _marked(self, data: bytes) -> list[Part]:
        """A token that is no text: the beginning of a call, or nothing to be seen."""
        out = self._cut()
        self._looks = False
        if data in self._markers.all:
            return out + self._begin(data)
        if self._broke and data == self._end:
            # Its beginning was content too.
            self._broke = False
            return out + self._content(data)
        return [*out, Part("nothing", b"", len(data))]

    def _step(self, out: list[Part]) -> bool:
        """Read some of what is there; whether there may be more to do."""
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
        out += self._begin(marker)
        return True

    def _look(self, out: list[Part]) -> bool:
        """Whether the text is JSON from its beginning on."""
        bare = self._text.lstrip(BLANKS)
        if not bare:
            return False
        self._looks = False
        if bare[0] in b"{[":
            blanks = self._text[: len(self._text) - len(bare)]
            self._text = bare
            out += self._begin(blanks)
        return True

    def _begin(self, marker: bytes) -> list[Part]:
        self._reader = self._make(not self._enforced)
        self._raw, self._settled, self._before = marker, 0, len(marker)
        return self._blanks.drop()

    def _read(self, parser: CallParser, out: list[Part]) -> bool:
        try:
            size, parts = parser.feed(self._text)
        except Broken as error:
            # The byte that broke it is read once more.
            self._raw += self._text[: error.at]
            self._text = self._text[error.at :]
            if self._enforced:
                self._waiting += parser.taken()
                out += self._told(False)
            out += self._dropped()
            return True
        self._raw += self._text[:size]
        self._text = self._text[size:]
        self._waiting += parts
        if self._enforced or parser.done:
            out += self._told(parser.done)
        if parser.done:
            self._reader, self._ended = None, True
        return parser.done

    def _told(self, whole: bool) -> list[Part]:
        """The parts of a call; where it is whole they stand for all of its bytes."""
        parts, self._waiting = self._waiting, []
        if parts and self._before:
            parts[0] = parts[0]._replace(size=parts[0].size + self._before)
            self._before = 0
        self._settled += sum(part.size for part in parts)
        self._called = self._called or bool(parts)
        if whole and self._enforced:
            self._markers.take_texts()
        if whole and len(self._raw) > self._settled:
            parts.append(Part("nothing", b"", len(self._raw) - self._settled))
        return parts

    def _dropped(self) -> list[Part]:
        """What is no call after all: content, but for what was told already."""
        self._reader, self._waiting = None, []
        if self._settled:
            return [Part("nothing", b"", len(self._raw) - self._settled)]
        self._broke = True
        return self._content(self._raw)

    def _unfinished(self, parser: CallParser) -> list[Part]:
        try:
            self._waiting += parser.end()
        except Broken:
            # A call that is sure was cut off: its beginning is no content.
            return self._told(True) if self._enforced else self._dropped()
        return self._told(True)

    def _close(self, out: list[Part]) -> bool:
        """Behind a call: its end marker, if it comes, and then the next one or content."""
        bare = self._text.lstrip(BLANKS)
        blanks = len(self._text) - len(bare)
        end = self._end
        if not bare or (bare != end and end.startswith(bare)):
            return False
        self._ended, self._looks = False, self._bare
        if end and bare.startswith(end):
            out.append(Part("nothing", b"", blanks + len(end)))
            self._text = bare[len(end) :]
        elif self._bare:
            out.append(Part("nothing", b"", blanks))
            self._text = bare
        else:
            out += self._content(self._text[:blanks])
            self._text = bare
        return True

    def _content(self, data: bytes) -> list[Part]:
        return self._blanks.content(data) if data else []
