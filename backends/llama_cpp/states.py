"""What has finished and left llama.cpp's memory: states of sequences, kept outside to come back.

Cells that rest make attention slower for everyone, since it goes over all cells up to the last;
and outside there is room for many more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

# So many tokens a prompt must have in common with another to go on from it: what is evaluated
# otherwise than in one piece moves the last digits, and for a few tokens that is not worth it.
BLOCK = 64
# They are looked through for each prompt.
MOST_STATES = 512


@dataclass(eq=False, frozen=True, slots=True)
class State:
    """A sequence as it was.

    Args:
        owner: whose it is; only that owner's prompts go on from it.
        data: what `llama_state_seq_get_data` gave.
    """

    owner: str
    tokens: list[int]
    data: NDArray[Any]


class States:
    """States, those that were used last for as long as they fit.

    Args:
        size: bytes that they may take; nothing is remembered where it is zero.
        cuts: whether a prompt may go on from a part of a state; where it may not (recurrent
            models, sliding windows) it goes on from a whole one or from nothing.
    """

    def __init__(self, size: int, cuts: bool, block: int = BLOCK) -> None:
        self._size = size
        self._cuts = cuts
        self.block = block
        # The one that was used longest ago is the first.
        self._states: list[State] = []
        self.used = 0

    @property
    def remembers(self) -> bool:
        """Whether anything is kept."""
        return self._size > 0

    def wants(self, owner: str, tokens: list[int]) -> bool:
        """Whether there is something new in a sequence."""
        for state in self._states:
            if state.owner == owner and self._covers(state.tokens, tokens):
                self.touch(state)
                return False
        return self.remembers

    def add(self, state: State) -> None:
        """Keep a state; what it covers goes, and what was used longest ago where it must."""
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
        """Note that a state was used."""
        self._states.remove(state)
        self._states.append(state)

    def longest(self, owner: str, tokens: list[int]) -> tuple[State | None, int]:
        """The state that a prompt can go on from for the most tokens, and how many those are."""
        best: tuple[State | None, int] = (None, 0)
        for state in self._states:
            if state.owner == owner:
                shared = reusable(state.tokens, tokens, self._cuts, self.block)
                if shared > best[1]:
                    best = (state, shared)
        return best

    def _covers(self, tokens: list[int], others: list[int]) -> bool:
        """Whether one sequence has all that is worth going on from of another."""
        if not self._cuts:
            return tokens == others
        if tokens[: self.block] != others[: self.block]:
            return False
        return len(others) - common(tokens, others) < self.block

    def _forget(self, state: State) -> None:
        self._states.remove(state)
        self.used -= state.data.nbytes


def reusable(known: list[int], tokens: list[int], cuts: bool, block: int) -> int:
    """How many tokens of a prompt need no evaluation; at least its last one always does."""
    most = len(tokens) - 1
    if not cuts:
        return len(known) if len(known) <= most and known == tokens[: len(known)] else 0
    if known[:block] != tokens[:block]:
        return 0
    shared = min(common(known, tokens), most)
    return shared if shared >= block else 0


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences begin with alike; slices are compared, not single tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
