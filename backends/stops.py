"""Stop sequences in a byte stream (sans-I/O).

The stop sequence that *completes* first wins; of those that complete at the same byte, the longest.
Matching is byte by byte, so the result does not depend on how the stream was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache


class StopMatcher:
    """A filter that cuts a stream at a stop sequence and holds back a possible beginning of one.

    After a match, `stop` is the stop sequence that matched, and all later bytes are dropped.
    Time is linear in the number of bytes for any stop sequences (Knuth, Morris and Pratt). Each
    byte is compared with every stop sequence that has begun.
    """

    __slots__ = ("_begun", "_failures", "_firsts", "_held", "_stops", "stop")

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops, self._firsts, self._failures = prepared(tuple(stops))
        # The number of matched bytes of each stop sequence that has begun, by its index.
        self._begun: dict[int, int] = {}
        self._held = b""
        self.stop: str | None = None

    def feed(self, data: bytes) -> bytes:
        """Consume bytes; return those that can no longer be part of a stop sequence."""
        if self.stop is not None:
            return b""
        if not self._held and self._firsts.keys().isdisjoint(data):
            return data
        buffer = self._held + data
        for position in range(len(self._held), len(buffer)):
            byte = buffer[position]
            if not self._begun and byte not in self._firsts:
                continue
            match = self._advance(byte)
            if match is not None:
                self.stop = match.decode()
                self._held = b""
                return buffer[: position + 1 - len(match)]
        keep = len(buffer) - max(self._begun.values(), default=0)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> bytes:
        """Return the bytes held back, where the text ends or something else interrupts it."""
        held, self._held, self._begun = self._held, b"", {}
        return held

    def _advance(self, byte: int) -> bytes | None:
        """Advance every automaton by a byte; return the longest match, or None."""
        match: bytes | None = None
        before, after = self._begun, {}
        # The other stop sequences begin with their first byte.
        for index in {*before, *self._firsts.get(byte, ())}:
            stop, failure, state = self._stops[index], self._failures[index], before.get(index, 0)
            while state and stop[state] != byte:
                state = failure[state - 1]
            if stop[state] == byte:
                state += 1
            if state == len(stop):
                if match is None or len(stop) > len(match):
                    match = stop
                state = failure[state - 1]
            if state:
                after[index] = state
        self._begun = after
        return match


@lru_cache(maxsize=32)
def prepared(
    stops: tuple[str, ...],
) -> tuple[list[bytes], Mapping[int, Sequence[int]], list[list[int]]]:
    """Return the stop sequences in bytes, their indexes by their first bytes, and their tables.

    All choices share the cached result. 64 KB of stop sequences take about 10 ms the first time.
    """
    spelled = [stop.encode() for stop in stops if stop]
    firsts: dict[int, list[int]] = {}
    for index, stop in enumerate(spelled):
        firsts.setdefault(stop[0], []).append(index)
    return spelled, firsts, [_failure(stop) for stop in spelled]


class TokenCut:
    """The stop of one choice, and the number of its tokens that begin before the cut."""

    __slots__ = ("_matcher", "_released", "_size", "_starts")

    def __init__(self, stops: Iterable[str]) -> None:
        self._matcher = StopMatcher(stops)
        self._starts: list[int] = []
        self._size = 0
        self._released = 0

    @property
    def stop(self) -> str | None:
        """The stop sequence that matched, or None."""
        return self._matcher.stop

    @property
    def tokens(self) -> int:
        """The number of tokens that belong to the completion."""
        return begun_before(self._released, self._starts)

    def add(self, data: bytes) -> None:
        """Add the next token."""
        self._starts.append(self._size)
        self._size += len(data)
        self._released += len(self._matcher.feed(data))

    def settle(self) -> None:
        """Settle the count after the last token."""
        self._released += len(self._matcher.flush())


def begun_before(end: int, starts: Iterable[int]) -> int:
    """Return how many tokens have their first byte before a cut, and so belong to the completion.

    Contract 2.5 sets this rule for counts and for log-probabilities.
    """
    return sum([start < end for start in starts])


def cut(text: bytes, stops: Iterable[str]) -> tuple[int, str | None]:
    """Return the end of a whole text and the stop sequence that cuts it, if any.

    The result is that of `StopMatcher`, but a long text takes microseconds.
    """
    spelled = [stop.encode() for stop in stops if stop]
    ends = [(at + len(one), -len(one)) for one in spelled if (at := text.find(one)) >= 0]
    if not ends:
        return len(text), None
    end, size = min(ends)
    return end + size, text[end + size : end].decode()


def _failure(pattern: bytes) -> list[int]:
    """Return, for each prefix, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
