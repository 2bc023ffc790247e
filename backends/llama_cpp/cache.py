"""The sequences in llama.cpp's KV cache: the tokens of each, and the cells that they take.

The KV cache is one pool of cells (`kv_unified`). Each evaluated token takes one cell. A copied
sequence shares the cells of its source until both are removed. A finished sequence stays in the
KV cache while no other sequence runs; otherwise its state is saved in `states`. A later prompt
reuses the prefix that it has in common with either. States that leave memory can go to disk
(`state_files.py`).

Layers with a sliding window lack what has left it: llama.cpp overwrites these cells, and does not
save them. The start of a sequence can only be reused while they have the window before its end.
A recurrent state cannot go back at all. While a prompt of such a model is evaluated, its sequence
gets checkpoints where another prompt is likely to branch off.

Idle cells make attention slower for all sequences, because it covers every cell up to the last one
in use. Outside the KV cache there is also room for many more sequences.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from .library import Context
from .states import (
    Checkpoint,
    MediaSpan,
    State,
    States,
    before,
    branch,
    last_point,
    reusable,
    surplus,
)

# The tokens between the last checkpoint of a prompt and its end. In the next turn, templates write
# something else where the answer begins, such as no reasoning. llama-server has the same number.
END = 4
# The tokens between another checkpoint and the end of a prompt that is like no other. Its question
# is probably shorter, and the instructions before it will be used again.
QUESTION = 512
# A bound on the number of checkpoints of one sequence, as in llama-server.
MOST_CHECKPOINTS = 32


def count_cells(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of different cells that some sequences have.

    A sequence gets a cell of another one only with all cells before it. So two of them have the
    same cells up to some length and no other, and the union of sets of 131,072 cells, which takes
    10 ms, is not needed.
    """
    return sum(
        len(cells) - max((_shared(cells, other) for other in sequences[:index]), default=0)
        for index, cells in enumerate(sequences)
    )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of cells that two sequences share, by a search in halves."""
    low, high = 0, min(len(one), len(other))
    # Another thread may remove cells meanwhile.
    with suppress(IndexError):
        if high and one[0] == other[0]:
            while low < high:
                middle = (low + high + 1) // 2
                if one[middle - 1] == other[middle - 1]:
                    low = middle
                else:
                    high = middle - 1
    return low


@dataclass(eq=False, slots=True)
class Slot:
    """A sequence of llama.cpp, and the tokens that were evaluated in it.

    Args:
        owner: the owner of the job; only prompts of the same owner reuse the sequence.
        cells: the cell of each token.
        reused: the number of tokens that were already evaluated when the slot was taken.
        spans: the media among the tokens.
        surplus: how many more tokens than positions it has, because of its media.
        checkpoints: where it can be cut, in the order of their lengths.
    """

    id: int
    owner: str
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    reused: int = 0
    spans: tuple[MediaSpan, ...] = ()
    surplus: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def points(self) -> list[int]:
        """The lengths of its checkpoints."""
        return [one.length for one in self.checkpoints]

    @property
    def last_point(self) -> int:
        """The length of its last checkpoint; 0 if it has none."""
        return self.checkpoints[-1].length if self.checkpoints else 0


class Cache:
    """The slots and cells of one KV cache.

    Args:
        size: the number of cells.
        slots: the number of sequences.
        rolls_back: True if the memory can remove the end of a sequence. If it cannot (recurrent
            models), a prompt reuses a whole sequence, or one up to a checkpoint.
        states: the store for finished sequences that leave the KV cache.
        most_kept: the bytes that the checkpoints of sequences in the KV cache may take; 0 for none.
    """

    def __init__(
        self,
        memory: Context,
        size: int,
        slots: int,
        rolls_back: bool,
        states: States,
        most_kept: int = 0,
    ) -> None:
        self._memory = memory
        self.size = size
        self._rolls_back = rolls_back
        self.states = states
        self._most_kept = most_kept
        self._ids = list(range(slots))[::-1]
        self._running: dict[int, Slot] = {}
        # The slot that has been idle longest comes first.
        self._resting: dict[int, Slot] = {}
        self._owners: Counter[int] = Counter()
        self._next_cell = 0

    @property
    def free(self) -> int:
        """The number of unused cells."""
        return self.size - len(self._owners)

    @property
    def used(self) -> float:
        """The share of the cells that running sequences take; any thread may ask for it."""
        # The slots are copied at once, also while another thread changes the original.
        return count_cells([one.cells for one in [*self._running.values()]]) / self.size

    def shared(self, known: list[int], tokens: list[int], marks: Sequence[int] = ()) -> int:
        """Return how many tokens of a prompt could be reused once `known` is evaluated.

        Args:
            marks: where `known` will have checkpoints.
        """
        if not self._memory.copies:
            return 0
        return reusable(known, tokens, self._rolls_back, self.states.block, points=marks)

    def marks(self, slot: Slot, tokens: list[int]) -> list[int]:
        """Return the lengths at which a sequence should get checkpoints, while it is evaluated.

        One is where a known sequence has other tokens: there the instructions end that several
        conversations have in common. One is near the end, for the next turn.

        Args:
            tokens: all that are to be evaluated.
        """
        if not self._most_kept:
            return []
        slots = (*self._resting.values(), *self._running.values())
        own = [one for one in slots if one.owner == slot.owner and one is not slot]
        block = self.states.block
        known = max(branch(own, tokens, block), self.states.branch(slot.owner, tokens))
        last, marks, end = slot.last_point, list[int](), len(tokens) - END
        for length in (min(known or end - QUESTION, end), end):
            if length > slot.reused and length - last >= block:
                marks.append(length)
                last = length
        return marks

    def branch(self, known: list[int], tokens: list[int]) -> int:
        """Return where a sequence that is being evaluated should get a checkpoint for a prompt.

        Args:
            known: all of its tokens that are to be evaluated.

        Returns:
            The length; 0 without checkpoints, or if the two have too little in common.
        """
        if not (self._most_kept and self._memory.copies):
            return 0
        length = min(reusable(known, tokens, True, self.states.block), len(known) - END)
        return length if length >= self.states.block else 0

    def add_checkpoint(self, slot: Slot) -> None:
        """Add a checkpoint to a sequence at its present length, if there is room for it."""
        data = self._memory.save(slot.id, self._most_kept)
        if data.size and self._make_room_for(data.nbytes):
            kept = (*slot.checkpoints, Checkpoint(len(slot.tokens), data))
            if len(kept) > MOST_CHECKPOINTS:
                kept = _without_one(kept)
            slot.checkpoints = kept

    @property
    def is_busy(self) -> bool:
        """True if a sequence runs."""
        return bool(self._running)

    def known(self, owner: str, tokens: list[int]) -> int:
        """Return how many tokens of a prompt can be reused, without those that windows may lack.

        Any thread may call this. While the engine's thread runs, the answer can be out of date.
        """
        return max(
            self._longest(tokens, owner, self._certain)[1], self.states.longest(owner, tokens)[1]
        )

    def take(self, tokens: list[int], owner: str, reuse: bool, spare: int) -> Slot | None:
        """Return a slot for a sequence that begins with `tokens`, or None if they do not fit now.

        Args:
            reuse: True if the sequence may reuse tokens that another has evaluated; at least the
                last token is left to evaluate.
            spare: cells that must stay free in addition to those of the tokens.
        """
        source, length = self._longest(tokens, owner, self._usable) if reuse else (None, 0)
        state, saved = self.states.longest(owner, tokens) if reuse else (None, 0)
        longest_cut = len(tokens) + spare
        # A state is restored as a whole before its surplus tokens are removed.
        needed = max(longest_cut, len(state.tokens)) if state is not None else longest_cut
        if state is not None and saved > length and self._can_have(needed, None, 0):
            return self._marked(self._taken_back(state, saved, needed))
        if not self._can_have(longest_cut - length, source, length):
            return None
        if source is not None and source.id in self._resting and self._ends_here(source, length):
            slot = self._taken_over(source, length)
        else:
            slot = self._new(owner, source)
            if source is not None and length:
                self._share(source, slot, length)
        self.make_room(longest_cut - length)
        return self._marked(slot)

    def fork(self, source: Slot) -> Slot | None:
        """Return a copy of a running slot, or None if it cannot be copied or no id is available."""
        if not (self._memory.copies and (self._ids or self._resting)):
            return None
        slot = self._new(source.owner, source)
        self._share(source, slot, len(source.tokens))
        slot.reused = source.reused
        return slot

    def extend(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Assign cells to tokens that are evaluated next; enough cells must be free."""
        if len(tokens) > self.free:
            raise ValueError(f"{len(tokens)} tokens for {self.free} free cells")
        cells = range(self._next_cell, self._next_cell + len(tokens))
        self._next_cell = cells.stop
        slot.tokens += tokens
        slot.cells += cells
        # Nobody else has these cells yet.
        dict.update(self._owners, dict.fromkeys(cells, 1))

    def extend_media(self, slot: Slot, ids: Sequence[int], positions: int) -> None:
        """Assign cells to a chunk of media that is evaluated next, and takes some positions."""
        start = len(slot.tokens)
        self.extend(slot, ids)
        self._set_spans(slot, (*slot.spans, MediaSpan(start, len(slot.tokens), positions)))

    def cut(self, slot: Slot, length: int) -> None:
        """Remove the tokens of a sequence from some length on; the memory has to roll back."""
        if length < len(slot.tokens):
            self._set_spans(slot, before(slot.spans, length))
            self._memory.remove(slot.id, length - slot.surplus)
            self._disown(slot.cells[length:])
            del slot.tokens[length:], slot.cells[length:]
            if slot.checkpoints:
                slot.checkpoints = up_to(slot.checkpoints, length)

    def make_room(self, count: int) -> bool:
        """Swap out idle slots, oldest first, until `count` cells are free; return True if so."""
        while self.free < count and self._resting:
            self.swap_out(next(iter(self._resting.values())))
        return self.free >= count

    def rest(self, slot: Slot) -> None:
        """Keep a finished sequence in the KV cache if it is worth reusing; drop it otherwise."""
        if not self._is_worth(slot):
            self.drop(slot)
            return
        del self._running[slot.id]
        self._resting[slot.id] = slot

    def tidy(self) -> None:
        """Swap out all idle slots while others run, because idle cells make decoding slower."""
        if self._running and self._resting:
            for slot in list(self._resting.values()):
                self.swap_out(slot)

    def empty(self) -> list[State]:
        """Swap out all idle slots; return and remove all states, least recently used first."""
        self.make_room(self.size)
        return self.states.empty()

    def swap_out(self, slot: Slot) -> None:
        """Save a sequence's state outside the KV cache, and free its cells."""
        self._save(slot)
        self.drop(slot)

    def drop(self, slot: Slot) -> None:
        """Remove a sequence and free its cells."""
        self._running.pop(slot.id, None)
        self._resting.pop(slot.id, None)
        self._empty(slot)
        self._ids.append(slot.id)

    def drop_running(self) -> None:
        """Remove all sequences that run."""
        for slot in [*self._running.values()]:
            self.drop(slot)

    def _is_worth(self, slot: Slot) -> bool:
        least = self.states.block if self._rolls_back else 1
        return self.states.remembers and len(slot.tokens) >= least

    def _save(self, slot: Slot) -> None:
        if self._is_worth(slot) and self.states.wants(slot.owner, slot.tokens, slot.points):
            data = self._memory.save(slot.id)
            if data.size:
                tokens, kept = list(slot.tokens), slot.checkpoints
                self.states.add(State(slot.owner, tokens, data, slot.spans, kept))

    def _new(self, owner: str, source: Slot | None) -> Slot:
        """Return an empty slot; if no id is free, swap out the oldest idle slot but `source`."""
        if not self._ids:
            self.swap_out(next(slot for slot in self._resting.values() if slot is not source))
        slot = Slot(self._ids.pop(), owner)
        self._running[slot.id] = slot
        return slot

    def _ends_here(self, slot: Slot, length: int) -> bool:
        """Return True if a prompt can continue an idle slot in place rather than copy it.

        That is so if the rest of the slot is not worth keeping, if no other slot is available, or
        if it cannot be copied. In the last two cases the slot's state is saved first.
        """
        comes_back = self._rolls_back or self._most_kept > 0
        if comes_back and len(slot.tokens) - length < self.states.block:
            return True
        is_copied = self._memory.copies
        if self._replaces_windows:
            # There may be no cells for the windows of another one.
            is_copied = is_copied and self._checkpoint_for(slot, length) is None
        if is_copied and (self._ids or len(self._resting) > 1):
            return False
        self._save(slot)
        return True

    def _marked(self, slot: Slot) -> Slot:
        """Return a slot with a checkpoint where it begins to differ from what it reuses."""
        if self._most_kept and slot.reused - slot.last_point >= self.states.block:
            self.add_checkpoint(slot)
        return slot

    def _taken_over(self, slot: Slot, length: int) -> Slot:
        """Return an idle slot after cutting it to `length` tokens; it counts as running."""
        del self._resting[slot.id]
        self._running[slot.id] = slot
        self._go_back(slot, length)
        return slot

    def _go_back(self, slot: Slot, length: int) -> None:
        """Cut a slot to a length that it can reuse; it is empty if llama.cpp fails."""
        data = self._checkpoint_for(slot, length)
        if data is None or self._memory.restore(slot.id, data, is_part=True):
            self.cut(slot, length)
            slot.reused = length
        else:
            self._empty(slot)

    def _checkpoint_for(self, slot: Slot, length: int) -> NDArray[Any] | None:
        """Return the checkpoint that a cut of a slot needs; None if it needs none."""
        if not slot.checkpoints or self._has(slot, length):
            return None
        return next((one.data for one in slot.checkpoints if one.length == length), None)

    def _empty(self, slot: Slot) -> None:
        """Remove all tokens of a slot."""
        self._memory.remove(slot.id)
        self._disown(slot.cells)
        slot.tokens, slot.cells, slot.checkpoints, slot.reused = [], [], (), 0
        self._set_spans(slot, ())

    def _taken_back(self, state: State, length: int, needed: int) -> Slot:
        """Return a new slot with the first `length` tokens of a state, or empty on failure.

        Enough cells must be available.
        """
        self.states.touch(state)
        slot = self._new(state.owner, None)
        self.make_room(needed)
        if self._memory.restore(slot.id, state.data):
            self.extend(slot, state.tokens)
            self._set_spans(slot, state.spans)
            slot.checkpoints = state.checkpoints
            self._go_back(slot, length)
            self._make_room_for(0)
        else:
            self._memory.remove(slot.id)
        return slot

    def _share(self, source: Slot, slot: Slot, length: int) -> None:
        """Copy the beginning of a slot into an empty one, which stays empty if llama.cpp fails."""
        data = self._checkpoint_for(source, length)
        self._set_spans(slot, before(source.spans, length))
        self._memory.copy(source.id, slot.id, length - slot.surplus)
        slot.tokens, slot.cells = source.tokens[:length], source.cells[:length]
        self._owners.update(slot.cells)
        slot.checkpoints, slot.reused = up_to(source.checkpoints, length), length
        if data is None and not self._memory.swa_full:
            data = self._memory.save(slot.id, sys.maxsize)
        if data is not None and not self._memory.restore(slot.id, data, is_part=True):
            self._empty(slot)

    def _make_room_for(self, size: int) -> bool:
        """Remove checkpoints until there is room for another one; return True if there is.

        The sequence with the most bytes of them loses the one that is closest to its neighbours.
        """
        slots = [*self._resting.values(), *self._running.values()]
        while _size_of(slots) + size > self._most_kept:
            slot = max(slots, key=lambda one: _size_of([one]), default=None)
            if slot is None or not slot.checkpoints:
                return False
            slot.checkpoints = _without_one(slot.checkpoints)
        return True

    def _set_spans(self, slot: Slot, spans: tuple[MediaSpan, ...]) -> None:
        slot.spans, slot.surplus = spans, surplus(spans)

    def _disown(self, cells: Sequence[int]) -> None:
        self._owners.subtract(cells)
        for cell in cells:
            if not self._owners[cell]:
                del self._owners[cell]

    def _can_have(self, wanted: int, source: Slot | None, length: int) -> bool:
        """Return True if an id and enough cells are free, or would be without idle slots."""
        if not self._ids and not self._resting:
            return False
        if self.free >= wanted:
            return True
        kept = set().union(*(slot.cells for slot in self._running.values()))
        if source is not None:
            kept.update(source.cells[:length])
        return self.size - len(kept) >= wanted

    def _longest(
        self,
        tokens: list[int],
        owner: str,
        usable: Callable[[Slot, int], int],
    ) -> tuple[Slot | None, int]:
        """Return the slot with the longest reusable prefix of `tokens`, and the prefix's length.

        Args:
            usable: returns how much of a prefix has everything that it needs.
        """
        best: tuple[Slot | None, int] = (None, 0)
        for slot in (*self._resting.values(), *self._running.values()):
            if slot.owner == owner:
                block, spans, points = self.states.block, slot.spans, slot.points
                shared = reusable(slot.tokens, tokens, self._rolls_back, block, spans, points)
                if shared > best[1] and (length := usable(slot, shared)) > best[1]:
                    best = (slot, length)
        return best

    def _certain(self, slot: Slot, length: int) -> int:
        """Return how much of a prefix a slot can give without a look at llama.cpp's memory."""
        if not self._memory.window or length == len(slot.tokens):
            return length
        return last_point(slot.points, length)

    def _usable(self, slot: Slot, length: int) -> int:
        """Return how much of a prefix a slot can give, by a cut or by a checkpoint."""
        if not self._memory.copies and slot.id in self._running:
            return 0
        if self._has(slot, length):
            return length
        if self._replaces_windows and (slot.id in self._running or self._owners[slot.cells[0]] > 1):
            return 0
        return last_point(slot.points, length)

    @property
    def _replaces_windows(self) -> bool:
        """True if windows that come back need the cells of those that they replace.

        With `swa_full` the layers with a window have as many cells as the others. Windows of its
        own would take more of them than a copy takes in other layers.
        """
        return self._memory.window > 0 and self._memory.swa_full

    def _has(self, slot: Slot, length: int) -> bool:
        """Return True if llama.cpp can cut a slot at a length."""
        if not self._rolls_back:
            return length == len(slot.tokens)
        if not self._memory.window:
            return True
        first = self._memory.first(slot.id)
        if first < 0:
            # Windows that start again at multiples of a length (Llama 4) can be empty there.
            return length == len(slot.tokens)
        # The layers with a window must have it for the token after the prefix.
        position = length - surplus(before(slot.spans, length))
        return first <= max(position - self._memory.window + 1, 0)


def up_to(checkpoints: Sequence[Checkpoint], length: int) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of the first `length` tokens."""
    return tuple(one for one in checkpoints if one.length <= length)


def _size_of(slots: Sequence[Slot]) -> int:
    """Return the bytes of the checkpoints of some slots, which can have the same ones."""
    kept = {id(one.data): one.data.nbytes for slot in slots for one in slot.checkpoints}
    return sum(kept.values())


def _without_one(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return checkpoints without the one closest to its neighbours; the last one goes last."""
    lengths = [0, *(one.length for one in checkpoints)]
    gaps = [lengths[at + 1] - lengths[at - 1] for at in range(1, len(lengths) - 1)]
    least = gaps.index(min(gaps)) if gaps else 0
    return (*checkpoints[:least], *checkpoints[least + 1 :])
