"""The parts of generated text: content, reasoning and tool calls (sans-I/O)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from ...backends.stops import StopMatcher
from ...schemas.openai.common import FinishReason

Kind: TypeAlias = Literal["content", "reasoning", "call", "arguments", "nothing"]


class Part(NamedTuple):
    """A part of the generated text.

    Args:
        kind: `call` begins a tool call, with the function's name as data. `arguments` continues
            the JSON arguments of the latest call. `nothing` is never shown: markers, whitespace.
        size: the number of bytes that the part has in the generated text.
    """

    kind: Kind
    data: bytes
    size: int


class Parser(Protocol):
    """A parser of generated text; its result does not depend on how the text was cut."""

    @property
    def in_call(self) -> bool:
        """True if the text so far ends inside a tool call."""
        ...

    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """Parse more text; `mark` is True if the data spells a control token."""
        ...

    def end(self) -> list[Part]:
        """Return the parts that were held back, at the end of the text."""
        ...


class MessageFormat(NamedTuple):
    """The rules for splitting a choice into parts.

    Args:
        parser: makes the parser of a choice.
        called: the finish reason of a choice with tool calls.
        parallel: True to show all tool calls; otherwise only the first is shown.
    """

    parser: Callable[[], Parser]
    called: FinishReason = "tool_calls"
    parallel: bool = True


class Cutter:
    """A parser that cuts content at stop sequences, but not reasoning or tool calls.

    It is also a `Matcher`, which ends the choice in an engine.
    """

    def __init__(self, parser: Parser, stops: Sequence[str]) -> None:
        self._parser = parser
        self._matcher = StopMatcher(stops)
        self.released = 0

    @property
    def stop(self) -> str | None:
        """See `Matcher.stop`."""
        return self._matcher.stop

    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """Return the parts that no stop sequence can cut off any more."""
        return self._cut(self._parser.feed(data, mark)) if self.stop is None else []

    def end(self) -> list[Part]:
        """Return the remaining parts."""
        if self.stop is not None:
            return []
        parts = self._cut(self._parser.end())
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
                # A stop sequence does not match across a part that is not content.
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
