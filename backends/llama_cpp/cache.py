"""Which tokens llama.cpp remembers under which sequence, and how many cells that takes.

The memory is one pool of cells (`kv_unified`): a token that was evaluated takes one, and a
sequence that was copied shares those of its source until both are removed. What has finished
rests where it is while nobody else runs, and leaves for `states` otherwise; a later prompt goes
on from what it has in common with either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from .states import State, States, reusable


class Memory(Protocol):
    """llama.cpp's memory, as far as the cache moves it (`llama_memory_seq_*`, `llama_state_seq_*`).

    What is saved and restored is the same to the last bit.
    """

    def remove(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence from a position on."""
        ...

    def copy(self, source: int, target: int, end: int) -> None:
        """Let a new sequence begin as another does, up to a position; no cell is taken."""
        ...

    def save(self, sequence: int) -> NDArray[Any]:
        """A sequence as bytes; none where that failed."""
        ...

    def restore(self, sequence: int, data: NDArray[Any]) -> bool:
        """Make a new sequence what another was; each token takes a cell. Whether it worked."""
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
        states: where what has finished goes.
    """

    def __init__(
        self, memory: Memory, size: int, slots: int, rolls_back: bool, states: States
    ) -> None:
        self._memory = memory
        self.size = size
        self._rolls_back = rolls_back
        self._states = states
        self._ids = list(range(slots))[::-1]
        self._running: dict[int, Slot] = {}
        # The one that has rested longest is the first.
        self._resting: dict[int, Slot] = {}
        self._owners: Counter[int] = Counter()
        self._next_cell = 0

    @property
    def free(self) -> int:
        """Cells that nobody uses."""
        return self.size - len(self._owners)

    @property
    def resting(self) -> int:
        """How many sequences rest where they were."""
        return len(self._resting)

    def shared(self, known: list[int], tokens: list[int]) -> int:
        """How many tokens of a prompt could be gone on from, were others evaluated."""
        return reusable(known, tokens, self._rolls_back, self._states.block)

    def take(self, tokens: list[int], owner: str, reuse: bool, spare: int) -> Slot | None:
        """A slot for a sequence that is to begin with some tokens, None if they do not fit now.

        Args:
            reuse: whether it may go on from what another has evaluated; at least the last token
                is left to evaluate.
            spare: cells that must stay free beside those of the tokens.
        """
        source, length = self._longest(tokens, owner) if reuse else (None, 0)
        state, saved = self._states.longest(owner, tokens) if reuse else (None, 0)
        whole = len(tokens) + spare
        # A state comes back as a whole before what is not wanted of it is cut off.
        needed = max(whole, len(state.tokens)) if state is not None else whole
        if state is not None and saved > length and self._can_have(needed, None, 0):
            return self._taken_back(state, saved, needed)
        if not self._can_have(whole - length, source, length):
            return None
        if source is not None and source.id in self._resting and self._ends_here(source, length):
            slot = self._taken_over(source, length)
        else:
            slot = self._new(owner, source)
            if source is not None and length:
                self._share(source, slot, length)
                slot.reused = length
        self.make_room(whole - length)
        return slot

    def fork(self, source: Slot) -> Slot | None:
        """Another slot with all that a running one has evaluated, None if there is no id for it."""
        if not self._ids and not self._resting:
            return None
        slot = self._new(source.owner, source)
        slot.reused = source.reused
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
        """Let what rests leave, oldest first, until so many cells are free; whether they are."""
        while self.free < count and self._resting:
            self.swap_out(next(iter(self._resting.values())))
        return self.free >= count

    def rest(self, slot: Slot) -> None:
        """Keep a sequence that has finished where it is, until it has to leave."""
        if not self._is_worth(slot):
            self.drop(slot)
            return
        del self._running[slot.id]
        self._resting[slot.id] = slot

    def tidy(self) -> None:
        """Let all that rests leave where others run: for those it would only make steps longer."""
        if self._running:
            for slot in list(self._resting.values()):
                self.swap_out(slot)

    def swap_out(self, slot: Slot) -> None:
        """Keep a sequence outside, and free its cells."""
        self._save(slot)
        self.drop(slot)

    def drop(self, slot: Slot) -> None:
        """Forget a sequence."""
        self._running.pop(slot.id, None)
        self._resting.pop(slot.id, None)
        self._memory.remove(slot.id)
        self._disown(slot.cells)
        slot.tokens, slot.cells = [], []
        self._ids.append(slot.id)

    def _is_worth(self, slot: Slot) -> bool:
        least = self._states.block if self._rolls_back else 1
        return self._states.remembers and len(slot.tokens) >= least

    def _save(self, slot: Slot) -> None:
        if self._is_worth(slot) and self._states.wants(slot.owner, slot.tokens):
            data = self._memory.save(slot.id)
            if data.size:
                self._states.add(State(slot.owner, list(slot.tokens), data))

    def _new(self, owner: str, source: Slot | None) -> Slot:
        """A slot that is empty; what has rested longest leaves where there is no other."""
        if not self._ids:
            self.swap_out(next(slot for slot in self._resting.values() if slot is not source))
        slot = Slot(self._ids.pop(), owner)
        self._running[slot.id] = slot
        return slot

    def _ends_here(self, slot: Slot, length: int) -> bool:
        """Whether a slot that rests can be gone on in rather than shared.

        There is nothing else worth keeping in it, or there is no other.
        """
        if self._rolls_back and len(slot.tokens) - length < self._states.block:
            return True
        if self._ids or len(self._resting) > 1:
            return False
        self._save(slot)
        return True

    def _taken_over(self, slot: Slot, length: int) -> Slot:
        """A slot that rests, to go on in from a position on."""
        del self._resting[slot.id]
        self._cut(slot, length)
        slot.reused = length
        self._running[slot.id] = slot
        return slot

    def _taken_back(self, state: State, length: int, needed: int) -> Slot:
        """A new slot that goes on from a state, for which there must be cells."""
        self._states.touch(state)
        slot = self._new(state.owner, None)
        self.make_room(needed)
        if self._memory.restore(slot.id, state.data):
            self.extend(slot, state.tokens)
            self._cut(slot, length)
            slot.reused = length
        else:
            self._memory.remove(slot.id)
        return slot

    def _cut(self, slot: Slot, length: int) -> None:
        if length < len(slot.tokens):
            self._memory.remove(slot.id, length)
            self._disown(slot.cells[length:])
            del slot.tokens[length:], slot.cells[length:]

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
        if self.free >= wanted:
            return True
        kept = set().union(*(slot.cells for slot in self._running.values()))
        if source is not None:
            kept.update(source.cells[:length])
        return self.size - len(kept) >= wanted

    def _longest(self, tokens: list[int], owner: str) -> tuple[Slot | None, int]:
        """The slot that begins most like some tokens do, and how many they share."""
        best: tuple[Slot | None, int] = (None, 0)
        for slot in (*self._resting.values(), *self._running.values()):
            if slot.owner == owner:
                shared = reusable(slot.tokens, tokens, self._rolls_back, self._states.block)
                if shared > best[1]:
                    best = (slot, shared)
        return best
