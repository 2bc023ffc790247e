"""The sequences in llama.cpp's KV cache: the tokens of each, and the cells that they take.

The KV cache is one pool of cells (`kv_unified`). Each evaluated token takes one cell. A copied
sequence shares the cells of its source until both are removed. A finished sequence stays in the
KV cache while no other sequence runs; otherwise its state is saved in `states`. A later prompt
reuses the prefix that it has in common with either. States that leave memory can go to disk
(`state_files.py`).

With M-RoPE a picture of nx by ny embeddings takes max(nx, ny) positions, and the text after it
continues at the next one. All of its embeddings have the same first position, so llama.cpp, which
removes and copies by position, cannot take a part of it.

Layers with a sliding window lack what has left it: llama.cpp overwrites these cells, and does not
save them. The start of a sequence can only be reused while they have the window before its end.

Idle cells make attention slower for all sequences, because it covers every cell up to the last one
in use. Outside the KV cache there is also room for many more sequences.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from .library import Context


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
    spans: tuple[MediaSpan, ...] = ()


class States:
    """A bounded store of states, which evicts the least recently used. It is thread-safe.

    Args:
        size: the bytes that all states may take; 0 disables the store.
        cuts: True if a prompt may reuse a part of a state. Otherwise (recurrent models, sliding
            windows) it reuses a whole state or nothing.
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

    def wants(self, owner: str, tokens: list[int]) -> bool:
        """Return True if a sequence is worth saving.

        If a state already covers it, that state counts as used.
        """
        with self._lock:
            for state in self._states:
                if state.owner == owner and self._covers(state.tokens, tokens):
                    self._touch(state)
                    return False
        return self.remembers

    def add(self, state: State) -> None:
        """Store a state in place of those it covers, and evict others where space is short."""
        if state.data.nbytes > self.size:
            return
        evicted = []
        with self._lock:
            covered = [
                one
                for one in self._states
                if one.owner == state.owner and self._covers(state.tokens, one.tokens)
            ]
            for one in covered:
                self._forget(one)
            self._states.append(state)
            self.used += state.data.nbytes
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
                    shared = reusable(state.tokens, tokens, self._cuts, self.block, state.spans)
                    if shared > best[1]:
                        best = (state, shared)
        return best

    def _covers(self, tokens: list[int], others: list[int]) -> bool:
        return covers(tokens, others, self._cuts, self.block)

    def _touch(self, state: State) -> None:
        self._states.remove(state)
        self._states.append(state)

    def _forget(self, state: State) -> None:
        self._states.remove(state)
        self.used -= state.data.nbytes


def covers(tokens: list[int], others: list[int], cuts: bool, block: int) -> bool:
    """Return True if `tokens` has everything of `others` that is worth reusing."""
    if not cuts:
        return tokens == others
    if tokens[:block] != others[:block]:
        return False
    return len(others) - common(tokens, others) < block


def reusable(
    known: list[int],
    tokens: list[int],
    cuts: bool,
    block: int,
    spans: Sequence[MediaSpan] = (),
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
    shared = longest_cut(spans, min(common(known, tokens), most))
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
    """

    id: int
    owner: str
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    reused: int = 0
    spans: tuple[MediaSpan, ...] = ()
    surplus: int = 0


class Cache:
    """The slots and cells of one KV cache.

    Args:
        size: the number of cells.
        slots: the number of sequences.
        rolls_back: True if the memory can remove the end of a sequence. If it cannot (recurrent
            models), a prompt reuses a whole sequence or nothing.
        states: the store for finished sequences that leave the KV cache.
        window: the tokens that a layer with a sliding window sees; 0 for none.
    """

    def __init__(
        self,
        memory: Context,
        size: int,
        slots: int,
        rolls_back: bool,
        states: States,
        window: int = 0,
    ) -> None:
        self._memory = memory
        self.size = size
        self._rolls_back = rolls_back
        self._window = window
        self.states = states
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

    def shared(self, known: list[int], tokens: list[int]) -> int:
        """Return how many tokens of a prompt could be reused once `known` is evaluated."""
        return reusable(known, tokens, self._rolls_back, self.states.block)

    @property
    def is_busy(self) -> bool:
        """True if a sequence runs."""
        return bool(self._running)

    def known(self, owner: str, tokens: list[int]) -> int:
        """Return how many tokens of a prompt could be reused now.

        Any thread may call this. While the engine's thread runs, the answer can be out of date.
        """
        return max(self._longest(tokens, owner)[1], self.states.longest(owner, tokens)[1])

    def take(self, tokens: list[int], owner: str, reuse: bool, spare: int) -> Slot | None:
        """Return a slot for a sequence that begins with `tokens`, or None if they do not fit now.

        Args:
            reuse: True if the sequence may reuse tokens that another has evaluated; at least the
                last token is left to evaluate.
            spare: cells that must stay free in addition to those of the tokens.
        """
        source, length = self._longest(tokens, owner, self._has) if reuse else (None, 0)
        state, saved = self.states.longest(owner, tokens) if reuse else (None, 0)
        longest_cut = len(tokens) + spare
        # A state is restored as a whole before its surplus tokens are removed.
        needed = max(longest_cut, len(state.tokens)) if state is not None else longest_cut
        if state is not None and saved > length and self._can_have(needed, None, 0):
            return self._taken_back(state, saved, needed)
        if not self._can_have(longest_cut - length, source, length):
            return None
        if source is not None and source.id in self._resting and self._ends_here(source, length):
            slot = self._taken_over(source, length)
        else:
            slot = self._new(owner, source)
            if source is not None and length:
                self._share(source, slot, length)
                slot.reused = length
        self.make_room(longest_cut - length)
        return slot

    def fork(self, source: Slot) -> Slot | None:
        """Return a copy of a running slot, or None if no sequence id is available."""
        if not self._ids and not self._resting:
            return None
        slot = self._new(source.owner, source)
        slot.reused = source.reused
        self._share(source, slot, len(source.tokens))
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
        self._memory.remove(slot.id)
        self._disown(slot.cells)
        slot.tokens, slot.cells = [], []
        self._set_spans(slot, ())
        self._ids.append(slot.id)

    def drop_running(self) -> None:
        """Remove all sequences that run."""
        for slot in [*self._running.values()]:
            self.drop(slot)

    def _is_worth(self, slot: Slot) -> bool:
        least = self.states.block if self._rolls_back else 1
        return self.states.remembers and len(slot.tokens) >= least

    def _save(self, slot: Slot) -> None:
        if self._is_worth(slot) and self.states.wants(slot.owner, slot.tokens):
            data = self._memory.save(slot.id)
            if data.size:
                self.states.add(State(slot.owner, list(slot.tokens), data, slot.spans))

    def _new(self, owner: str, source: Slot | None) -> Slot:
        """Return an empty slot; if no id is free, swap out the oldest idle slot but `source`."""
        if not self._ids:
            self.swap_out(next(slot for slot in self._resting.values() if slot is not source))
        slot = Slot(self._ids.pop(), owner)
        self._running[slot.id] = slot
        return slot

    def _ends_here(self, slot: Slot, length: int) -> bool:
        """Return True if a prompt can continue an idle slot in place rather than copy it.

        That is so if the rest of the slot is not worth keeping, or if no other slot is available.
        In the second case the slot's state is saved first.
        """
        if self._rolls_back and len(slot.tokens) - length < self.states.block:
            return True
        if self._ids or len(self._resting) > 1:
            return False
        self._save(slot)
        return True

    def _taken_over(self, slot: Slot, length: int) -> Slot:
        """Return an idle slot after cutting it to `length` tokens; it counts as running."""
        del self._resting[slot.id]
        self.cut(slot, length)
        slot.reused = length
        self._running[slot.id] = slot
        return slot

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
            self.cut(slot, length)
            slot.reused = length
        else:
            self._memory.remove(slot.id)
        return slot

    def _share(self, source: Slot, slot: Slot, length: int) -> None:
        self._set_spans(slot, before(source.spans, length))
        self._memory.copy(source.id, slot.id, length - slot.surplus)
        slot.tokens, slot.cells = source.tokens[:length], source.cells[:length]
        self._owners.update(slot.cells)

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
        has: Callable[[Slot, int], bool] = lambda slot, length: True,
    ) -> tuple[Slot | None, int]:
        """Return the slot with the longest reusable prefix of `tokens`, and the prefix's length.

        Args:
            has: returns True if a slot has everything that the prefix needs.
        """
        best: tuple[Slot | None, int] = (None, 0)
        for slot in (*self._resting.values(), *self._running.values()):
            if slot.owner == owner:
                block = self.states.block
                shared = reusable(slot.tokens, tokens, self._rolls_back, block, slot.spans)
                if shared > best[1] and has(slot, shared):
                    best = (slot, shared)
        return best

    def _has(self, slot: Slot, length: int) -> bool:
        """Return True if the layers with a window have it for the token after a prefix."""
        # Without a roll back, the prefix is the whole sequence, whose window is always there.
        if not self._window or not self._rolls_back:
            return True
        position = length - surplus(before(slot.spans, length))
        return self._memory.first(slot.id) <= max(position - self._window + 1, 0)
