"""Saved states of finished sequences, kept outside the KV cache for later prompts.

Idle cells make attention slower for all sequences, because it covers every cell up to the last one
in use. Outside the KV cache there is also room for many more sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .spans import Span, whole

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
        data: the bytes from `llama_state_seq_get_data`.
        spans: the media among the tokens.
    """

    owner: str
    tokens: list[int]
    data: NDArray[Any]
    spans: tuple[Span, ...] = ()


class States:
    """A bounded store of states, which evicts the least recently used.

    Args:
        size: the bytes that all states may take; 0 disables the store.
        cuts: True if a prompt may reuse a part of a state. Otherwise (recurrent models, sliding
            windows) it reuses a whole state or nothing.
        block: the fewest tokens that a prompt reuses.
    """

    def __init__(self, size: int, cuts: bool, block: int = BLOCK) -> None:
        self._size = size
        self._cuts = cuts
        self.block = block
        # The least recently used state comes first.
        self._states: list[State] = []
        self.used = 0

    @property
    def remembers(self) -> bool:
        """True if the store is enabled."""
        return self._size > 0

    def wants(self, owner: str, tokens: list[int]) -> bool:
        """Return True if a sequence is worth saving.

        If a state already covers it, that state counts as used.
        """
        for state in self._states:
            if state.owner == owner and self._covers(state.tokens, tokens):
                self.touch(state)
                return False
        return self.remembers

    def add(self, state: State) -> None:
        """Store a state in place of those it covers, and evict others where space is short."""
        if state.data.nbytes > self._size:
            return
        covered = [
            one
            for one in self._states
            if one.owner == state.owner and self._covers(state.tokens, one.tokens)
        ]
        for one in covered:
            self._forget(one)
        self._states.append(state)
        self.used += state.data.nbytes
        while self.used > self._size or len(self._states) > MOST_STATES:
            self._forget(self._states[0])

    def touch(self, state: State) -> None:
        """Mark a state as used."""
        self._states.remove(state)
        self._states.append(state)

    def longest(self, owner: str, tokens: list[int]) -> tuple[State | None, int]:
        """Return the state of which a prompt can reuse the most tokens, and their number."""
        best: tuple[State | None, int] = (None, 0)
        for state in self._states:
            if state.owner == owner:
                shared = reusable(state.tokens, tokens, self._cuts, self.block, state.spans)
                if shared > best[1]:
                    best = (state, shared)
        return best

    def _covers(self, tokens: list[int], others: list[int]) -> bool:
        """Return True if `tokens` has everything of `others` that is worth reusing."""
        if not self._cuts:
            return tokens == others
        if tokens[: self.block] != others[: self.block]:
            return False
        return len(others) - common(tokens, others) < self.block

    def _forget(self, state: State) -> None:
        self._states.remove(state)
        self.used -= state.data.nbytes


def reusable(
    known: list[int],
    tokens: list[int],
    cuts: bool,
    block: int,
    spans: Sequence[Span] = (),
) -> int:
    """Return how many tokens of a prompt can be reused; its last one is always evaluated.

    Args:
        spans: the media in `known`, which are reused as a whole.
    """
    most = len(tokens) - 1
    if not cuts:
        return len(known) if len(known) <= most and known == tokens[: len(known)] else 0
    if known[:block] != tokens[:block]:
        return 0
    shared = whole(spans, min(common(known, tokens), most))
    return shared if shared >= block else 0


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
