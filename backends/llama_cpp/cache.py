"""Which tokens llama.cpp remembers under which sequence, and how many cells that takes.

The memory is one pool of cells (`kv_unified`): a token that was evaluated takes one, and a
sequence that was copied shares those of its source until both are removed. What has finished
rests until its cells are wanted, so that a later prompt can go on from what it has in common.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

# What is gone on from is a whole number of these tokens: what is cut otherwise than in one piece
# moves the last digits, and for a few tokens that is not worth it.
BLOCK = 64


class Memory(Protocol):
    """llama.cpp's memory, as far as the cache moves it (`llama_memory_seq_*`)."""

    def remove(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence from a position on."""
        ...

    def copy(self, source: int, target: int, end: int) -> None:
        """Let a new sequence begin as another does, up to a position; no cell is taken."""
        ...


@dataclass(eq=False, slots=True)
class Slot:
    """A sequence that llama.cpp knows, and what it has evaluated of it.

    Args:
        owner: whose it is; only that owner's prompts go on from it.
        cells: for each token the cell that remembers it.
        reused: how many of its tokens were there when it was taken.
    """

    id: int
    owner: str
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    reused: int = 0


class Cache:
    """Slots and cells.

    Args:
        size: cells that there are.
        slots: sequences that llama.cpp knows at once.
        rolls_back: whether the memory can forget a sequence's end; where it cannot (recurrent
            models), a prompt goes on from a whole sequence or from nothing.
        remembers: whether what has finished is kept.
    """

    def __init__(
        self, memory: Memory, size: int, slots: int, rolls_back: bool, remembers: bool = True
    ) -> None:
        self._memory = memory
        self.size = size
        self._rolls_back = rolls_back
        self._remembers = remembers
        self._ids = list(range(slots))[::-1]
        self._running: dict[int, Slot] = {}
        # The one that was used longest ago is the first.
        self._resting: OrderedDict[int, Slot] = OrderedDict()
        self._owners: Counter[int] = Counter()
        self._next_cell = 0

    @property
    def free(self) -> int:
        """Cells that nobody uses."""
        return self.size - len(self._owners)

    def take(self, tokens: Sequence[int], owner: str, reuse: bool, spare: int) -> Slot | None:
        """A slot for a sequence that is to begin with some tokens, None if they do not fit now.

        Args:
            reuse: whether it may go on from what another has evaluated; at least the last token
                is left to evaluate.
            spare: cells that must stay free beside those of the tokens.
        """
        source, length = self._longest(tokens, owner) if reuse else (None, 0)
        wanted = len(tokens) - length + spare
        if not self._can_have(wanted, source, length):
            return None
        if source is not None and source.id in self._resting:
            self._resting.move_to_end(source.id)
        if not self._ids:
            # Its id is taken over where it is the only one that rests.
            oldest = next(iter(self._resting.values()))
            if oldest is source:
                return self._take_over(source, length, wanted)
            self.drop(oldest)
        slot = Slot(self._ids.pop(), owner, reused=length)
        self._running[slot.id] = slot
        if source is not None and length:
            self._share(source, slot, length)
        self.make_room(wanted)
        return slot

    def fork(self, source: Slot) -> Slot | None:
        """Another slot with all that a running one has evaluated, None if there is no id for it."""
        if not self._ids and self._resting:
            self.drop(next(iter(self._resting.values())))
        if not self._ids:
            return None
        slot = Slot(self._ids.pop(), source.owner, reused=source.reused)
        self._running[slot.id] = slot
        self._share(source, slot, len(source.tokens))
        return slot

    def extend(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Note tokens that are evaluated next; there must be room for them."""
        if len(tokens) > self.free:
            raise ValueError(f"{len(tokens)} tokens for {self.free} free cells")
        cells = range(self._next_cell, self._next_cell + len(tokens))
        self._next_cell += len(tokens)
        slot.tokens += tokens
        slot.cells += cells
        self._owners.update(cells)

    def make_room(self, count: int) -> bool:
        """Forget what rests, oldest first, until so many cells are free; whether they are."""
        while self.free < count and self._resting:
            self.drop(next(iter(self._resting.values())))
        return self.free >= count

    def rest(self, slot: Slot) -> None:
        """Keep a sequence that has finished, for as long as its cells are not wanted.

        One that nobody can go on from is forgotten: what is remembered makes attention slower.
        """
        least = BLOCK if self._rolls_back else 1
        if not self._remembers or len(slot.tokens) < least:
            self.drop(slot)
            return
        del self._running[slot.id]
        self._resting[slot.id] = slot

    def drop(self, slot: Slot) -> None:
        """Forget a sequence."""
        self._running.pop(slot.id, None)
        self._resting.pop(slot.id, None)
        self._memory.remove(slot.id)
        self._disown(slot.cells)
        slot.tokens, slot.cells = [], []
        self._ids.append(slot.id)

    def _take_over(self, slot: Slot, length: int, wanted: int) -> Slot:
        """Go on in a slot that rests, from a position on."""
        del self._resting[slot.id]
        if length < len(slot.tokens):
            self._memory.remove(slot.id, length)
            self._disown(slot.cells[length:])
            del slot.tokens[length:], slot.cells[length:]
        slot.reused = length
        self._running[slot.id] = slot
        self.make_room(wanted)
        return slot

    def _share(self, source: Slot, slot: Slot, length: int) -> None:
        self._memory.copy(source.id, slot.id, length)
        slot.tokens, slot.cells = source.tokens[:length], source.cells[:length]
        self._owners.update(slot.cells)

    def _disown(self, cells: Sequence[int]) -> None:
        self._owners.subtract(cells)
        for cell in cells:
            if not self._owners[cell]:
                del self._owners[cell]

    def _can_have(self, wanted: int, source: Slot | None, length: int) -> bool:
        """Whether there is an id and so many cells, if need be without what rests."""
        if not self._ids and not self._resting:
            return False
        kept = set().union(*(slot.cells for slot in self._running.values()))
        if source is not None:
            kept.update(source.cells[:length])
        return self.size - len(kept) >= wanted or self.free >= wanted

    def _longest(self, tokens: Sequence[int], owner: str) -> tuple[Slot | None, int]:
        """The slot that begins most like some tokens do, and how many they share."""
        best: tuple[Slot | None, int] = (None, 0)
        most = len(tokens) - 1
        for slot in (*self._resting.values(), *self._running.values()):
            if slot.owner != owner:
                continue
            shared = common(slot.tokens, tokens)
            if self._rolls_back:
                shared = min(shared, most) // BLOCK * BLOCK
            elif not shared == len(slot.tokens) <= most:
                continue
            if shared > best[1]:
                best = (slot, shared)
        return best


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike; slices are compared, not single tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
