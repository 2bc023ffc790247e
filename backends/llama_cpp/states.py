"""Saved sequences outside the KV cache, and how much of a sequence a prompt can reuse.

A memory with attention alone can be cut at any length. A recurrent state cannot go back, and a
window that was saved lacks the tokens that have left it. Such a sequence can be cut where it has a
`Checkpoint`, which is a copy of the recurrent state or of the windows at one length.

With M-RoPE a picture of nx by ny embeddings takes max(nx, ny) positions, and the text after it
continues at the next one. All of its embeddings have the same first position, so llama.cpp, which
removes and copies by position, cannot take a part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray


class MediaSpan(NamedTuple):
    """The embeddings of one chunk of media in a sequence.

    Args:
        start: the number of tokens before it.
        end: the number of tokens up to its end.
        positions: the number of positions that it takes.
    """

    start: int
    end: int
    positions: int


def longest_cut(spans: Sequence[MediaSpan], length: int) -> int:
    """Return the largest length up to `length` at which a sequence can be cut."""
    for span in spans:
        if span.start < length < span.end:
            return span.start
    return length


def surplus(spans: Sequence[MediaSpan]) -> int:
    """Return how many more tokens than positions some spans have."""
    return sum(span.end - span.start - span.positions for span in spans)


def before(spans: Sequence[MediaSpan], length: int) -> tuple[MediaSpan, ...]:
    """Return the spans among the first `length` tokens, which must not end inside one."""
    return tuple(span for span in spans if span.end <= length)


class Checkpoint(NamedTuple):
    """A copy of what llama.cpp needs to cut a sequence at one length.

    Args:
        length: the number of tokens.
        data: the bytes of its recurrent state or its windows at this length.
    """

    length: int
    data: NDArray[Any]


# The fewest tokens that a prompt reuses. Logits change in their last digits if a prompt is not
# evaluated in one piece, and a few tokens are not worth that.
BLOCK = 64
# A bound on the number of states, because each prompt is compared with all of them.
MOST_STATES = 512


@dataclass(eq=False, frozen=True, slots=True)
class State:
    """A saved sequence.

    Args:
        owner: the owner of the job; only prompts of the same owner reuse the state.
        data: the bytes from `llama_state_seq_get_data_ext`.
        spans: the media among the tokens.
        checkpoints: where it can be cut, in the order of their lengths.
    """

    owner: str
    tokens: list[int]
    data: NDArray[Any]
    spans: tuple[MediaSpan, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return int(self.data.nbytes) + sum(one.data.nbytes for one in self.checkpoints)

    @property
    def points(self) -> list[int]:
        """The lengths of its checkpoints."""
        return [one.length for one in self.checkpoints]


class States:
    """A bounded store of states, which evicts the least recently used. It is thread-safe.

    Args:
        size: the bytes that all states may take; 0 disables the store.
        cuts: True if a prompt may reuse any part of a state. Otherwise (recurrent models, sliding
            windows) it reuses a whole state, or one up to a checkpoint.
        block: the fewest tokens that a prompt reuses.
        evicted: receives each state that is evicted.
    """

    def __init__(
        self,
        size: int,
        cuts: bool,
        block: int = BLOCK,
        evicted: Callable[[State], object] | None = None,
    ) -> None:
        self.size = size
        self._cuts = cuts
        self.block = block
        self._evicted = evicted
        self._lock = threading.Lock()
        # The least recently used state comes first.
        self._states: list[State] = []
        self.used = 0

    @property
    def remembers(self) -> bool:
        """True if the store is enabled."""
        return self.size > 0

    def wants(self, owner: str, tokens: list[int], points: Iterable[int] = ()) -> bool:
        """Return True if a sequence is worth saving.

        If a state already covers it, that state counts as used.

        Args:
            points: the lengths of its checkpoints.
        """
        with self._lock:
            for state in self._states:
                if state.owner == owner and self._covers(state, tokens, points):
                    self._touch(state)
                    return False
        return self.remembers

    def add(self, state: State) -> None:
        """Store a state in place of those it covers, and evict others where space is short."""
        if state.size > self.size:
            state = replace(state, checkpoints=())
        if state.size > self.size:
            return
        evicted = []
        with self._lock:
            covered = [
                one
                for one in self._states
                if one.owner == state.owner and self._covers(state, one.tokens, one.points)
            ]
            for one in covered:
                self._forget(one)
            self._states.append(state)
            self.used += state.size
            while self.used > self.size or len(self._states) > MOST_STATES:
                evicted.append(self._states[0])
                self._forget(self._states[0])
        if self._evicted is not None:
            for one in evicted:
                self._evicted(one)

    def empty(self) -> list[State]:
        """Remove all states and return them; the least recently used comes first."""
        with self._lock:
            states, self._states, self.used = self._states, [], 0
        return states

    def touch(self, state: State) -> None:
        """Mark a state as used, if it has not been evicted."""
        with self._lock:
            if state in self._states:
                self._touch(state)

    def longest(self, owner: str, tokens: list[int]) -> tuple[State | None, int]:
        """Return the state of which a prompt can reuse the most tokens, and their number."""
        best: tuple[State | None, int] = (None, 0)
        with self._lock:
            for state in self._states:
                if state.owner == owner:
                    shared = reusable(
                        state.tokens, tokens, self._cuts, self.block, state.spans, state.points
                    )
                    if shared > best[1]:
                        best = (state, shared)
        return best

    def branch(self, owner: str, tokens: list[int]) -> int:
        """Return the length of the longest prefix that a prompt has in common with a state."""
        with self._lock:
            found = [state for state in self._states if state.owner == owner]
        return branch(found, tokens, self.block)

    def _covers(self, state: State, others: list[int], points: Iterable[int]) -> bool:
        return covers(state.tokens, others, self._cuts, self.block, state.points, points)

    def _touch(self, state: State) -> None:
        self._states.remove(state)
        self._states.append(state)

    def _forget(self, state: State) -> None:
        self._states.remove(state)
        self.used -= state.size


def covers(
    tokens: list[int],
    others: list[int],
    cuts: bool,
    block: int,
    points: Collection[int] = (),
    other_points: Iterable[int] = (),
) -> bool:
    """Return True if `tokens` has everything of `others` that is worth reusing.

    Args:
        points: the lengths of the checkpoints of `tokens`.
        other_points: those of `others`; only those of the same tokens count.
    """
    length = len(others)
    if not cuts:
        wanted = other_points if len(tokens) == length else (length,)
        if not all(any(at - block < one <= at for one in points) for at in wanted):
            return False
        return tokens[:length] == others
    if tokens[:block] != others[:block]:
        return False
    return length - common(tokens, others) < block


def reusable(
    known: list[int],
    tokens: list[int],
    cuts: bool,
    block: int,
    spans: Sequence[MediaSpan] = (),
    points: Sequence[int] = (),
) -> int:
    """Return how many tokens of a prompt can be reused; its last one is always evaluated.

    Args:
        cuts: True if `known` can be cut at any length.
        spans: the media in `known`, which are reused as a whole.
        points: the lengths at which `known` can be cut otherwise.
    """
    most = len(tokens) - 1
    if not cuts and len(known) <= most and known == tokens[: len(known)]:
        return len(known)
    if not (cuts or points) or known[:block] != tokens[:block]:
        return 0
    shared = longest_cut(spans, min(common(known, tokens), most))
    if not cuts:
        return last_point(points, shared)
    return shared if shared >= block else 0


def last_point(points: Iterable[int], length: int) -> int:
    """Return the last checkpoint up to a length; 0 if there is none."""
    return max((one for one in points if one <= length), default=0)


class _Known(Protocol):
    """A sequence whose tokens were evaluated: a state or a slot."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def spans(self) -> tuple[MediaSpan, ...]: ...


def branch(sequences: Iterable[_Known], tokens: list[int], block: int) -> int:
    """Return the length of the longest prefix that a prompt has in common with a sequence."""
    found = (reusable(one.tokens, tokens, True, block, one.spans) for one in sequences)
    return max(found, default=0)


def common(one: list[int], other: list[int]) -> int:
    """Return the length of two sequences' common prefix; compares slices, not single tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
