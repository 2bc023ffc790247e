"""Stop strings in a byte stream (sans-I/O).

The stop that *completes* first wins, and among those that complete at the same byte the longest.
Decided byte by byte, so that the result does not depend on how the stream was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from .base import Generation, Matcher


class StopMatcher:
    """Lets bytes through until a stop string completes, and holds back what may still become one.

    After a match `stop` is the string that matched and everything fed later is dropped.
    Time is linear in the bytes fed, whatever the stop strings look like (Knuth, Morris and Pratt).
    """

    __slots__ = ("_failures", "_firsts", "_held", "_states", "_stops", "stop")

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops, self._firsts, self._failures = prepared(tuple(stops))
        self._states = [0] * len(self._stops)
        self._held = b""
        self.stop: str | None = None

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that no stop string can take back any more."""
        if self.stop is not None:
            return b""
        if not self._held and self._firsts.isdisjoint(data):
            return data
        buffer = self._held + data
        for position in range(len(self._held), len(buffer)):
            match = self._advance(buffer[position])
            if match is not None:
                self.stop = match.decode()
                self._held = b""
                return buffer[: position + 1 - len(match)]
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep]

    def advance(self, data: bytes, mark: bool = False) -> int:
        """See `Matcher.advance`; whatever is seen may be part of a stop."""
        return len(self.feed(data))

    def settle(self) -> int:
        """See `Matcher.settle`."""
        return len(self.flush())

    def flush(self) -> bytes:
        """Return what was held back; the stream has ended without completing a stop string."""
        held, self._held = self._held, b""
        return held

    def _advance(self, byte: int) -> bytes | None:
        """Move every automaton one byte on; the longest stop that completes, if any does."""
        match: bytes | None = None
        for index, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[index]
            while state and stop[state] != byte:
                state = failure[state - 1]
            if stop[state] == byte:
                state += 1
            if state == len(stop):
                if match is None or len(stop) > len(match):
                    match = stop
                state = failure[state - 1]
            self._states[index] = state
        return match


@lru_cache(maxsize=32)
def prepared(
    stops: tuple[str, ...],
) -> tuple[list[bytes], frozenset[int], list[list[int]]]:
    """What all choices share: stops in bytes, their first bytes, and their tables.

    64 KB of stops take about 10 ms the first time.
    """
    spelled = [stop.encode() for stop in stops if stop]
    firsts = frozenset(stop[0] for stop in spelled)
    return spelled, firsts, [_failure(stop) for stop in spelled]


def matcher_of(job: Generation) -> Matcher:
    """What finds the stop of one choice of a job."""
    return StopMatcher(job.stops.texts) if job.stops.matcher is None else job.stops.matcher()


class TokenCut:
    """Where a stop cuts a choice off, and how many of its tokens begin before that."""

    __slots__ = ("_matcher", "_released", "_size", "_starts")

    def __init__(self, job: Generation) -> None:
        self._matcher = matcher_of(job)
        self._starts: list[int] = []
        self._size = 0
        self._released = 0

    @property
    def stop(self) -> str | None:
        """See `Matcher.stop`."""
        return self._matcher.stop

    @property
    def tokens(self) -> int:
        """How many tokens belong to the completion."""
        return begun_before(self._released, self._starts)

    def add(self, data: bytes, mark: bool = False) -> None:
        """Take the next token."""
        self._starts.append(self._size)
        self._size += len(data)
        self._released += self._matcher.advance(data, mark)

    def settle(self) -> None:
        """Nothing more comes."""
        self._released += self._matcher.settle()


def begun_before(end: int, starts: Iterable[int]) -> int:
    """How many tokens have their first byte before a cut: those belong to what is kept.

    That is contract 2.5, for counts as for log-probabilities.
    """
    return sum([start < end for start in starts])


def cut(text: bytes, stops: Iterable[str]) -> tuple[int, str | None]:
    """Where a whole text ends: its length, or the start of the stop that completes first."""
    matcher = StopMatcher(stops)
    kept = matcher.feed(text)
    return (len(kept), matcher.stop) if matcher.stop is not None else (len(text), None)


def _failure(pattern: bytes) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix as well."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
