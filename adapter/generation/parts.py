"""What generated text is made of: content, thoughts, calls (sans-I/O)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from ...backends.stops import StopMatcher
from ...schemas.openai.common import FinishReason

Kind: TypeAlias = Literal["content", "reasoning", "call", "arguments", "nothing"]


class Part(NamedTuple):
    """A part of what was generated.

    Args:
        kind: `call` begins a call, and its data is the function's name; `arguments` goes on with
            the JSON of the call begun last; `nothing` is seen by nobody: markers, blanks.
        size: how many bytes of the text it stands for.
    """

    kind: Kind
    data: bytes
    size: int


class Parser(Protocol):
    """Takes generated text apart; what comes out does not depend on how it was cut."""

    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """Take some more; `mark` is for the spelling of a token that is no text."""
        ...

    def end(self) -> list[Part]:
        """What was held back, when nothing more comes."""
        ...


class MessageFormat(NamedTuple):
    """How a choice is taken apart.

    Args:
        reader: makes what does it.
        called: the finish reason of a choice that made calls.
        parallel: whether more calls than one are shown.
    """

    parser: Callable[[], Parser]
    called: FinishReason = "tool_calls"
    parallel: bool = True


class Cutter:
    """Takes text apart, and cuts its content at stops; thoughts and calls have none.

    As a `Matcher` it tells an engine where to end.
    """

    def __init__(self, parser: Parser, stops: Sequence[str]) -> None:
        self._reader = parser
        self._matcher = StopMatcher(stops)
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
            if data:
                out.append(Part("content", data, len(data)))
                self.released += len(data)
            if self.stop is not None:
                break
        return out

    def _flush(self) -> list[Part]:
        data = self._matcher.flush()
        self.released += len(data)
        return [Part("content", data, len(data))] if data else []
