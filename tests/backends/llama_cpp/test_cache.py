"""Tests of the KV cache's accounting against a memory that counts its cells directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latimer.backends.llama_cpp.cache import MOST_CHECKPOINTS, Cache, Slot
from latimer.backends.llama_cpp.states import State, States, common
from numpy.typing import NDArray
from support.states import checkpoints

SIZE, SLOTS = 24, 4
# Pictures with M-RoPE: the ids of their embeddings, and the number of their positions.
LARGE, SMALL = ((-1, -2, -3, -4, -5, -6), 3), ((-11, -12), 1)
PICTURES = {ids[0]: (ids, positions) for ids, positions in (LARGE, SMALL)}


def positions_of(tokens: Sequence[int]) -> list[int]:
    """Return the position of each token; all embeddings of a picture have that of its first."""
    positions: list[int] = []
    following = 0
    for token in tokens:
        inside = token < 0 and token not in PICTURES
        positions.append(positions[-1] if inside else following)
        if not inside:
            following += PICTURES[token][1] if token in PICTURES else 1
    return positions


class Memory:
    """A model of llama.cpp's KV cache: each sequence has tokens, each in a cell.

    Like llama.cpp it removes and copies by position. Each sequence also has a recurrent state: the
    list of the tokens that it has seen.

    Args:
        rolls_back: False if the recurrent state of a sequence cannot go back.
    """

    # It has no layers with a sliding window.
    window, swa_full, copies = 0, True, True

    def __init__(self, rolls_back: bool = True) -> None:
        self.sequences: dict[int, list[tuple[int, object]]] = {}
        self.seen: dict[int, list[int]] = {}
        self.rolls_back = rolls_back
        self.fails = False

    def remove(self, sequence: int, start: int = 0) -> None:
        """Remove a sequence's tokens from a position on."""
        kept = self._before(sequence, start)
        seen = self.seen.get(sequence, [])
        assert self.rolls_back or not kept or positions_of([*seen, 0])[-1] <= start
        self.sequences[sequence] = kept
        self.seen[sequence] = seen[: len(kept)]

    def copy(self, source: int, target: int, end: int) -> None:
        """Share the beginning of a sequence with an empty one; its recurrent state is whole."""
        assert not self.sequences.get(target)
        self.sequences[target] = self._before(source, end)
        self.seen[target] = [*self.seen.get(source, [])]
        if self.rolls_back:
            del self.seen[target][len(self.sequences[target]) :]

    def save(self, sequence: int, part: int = 0) -> NDArray[Any]:
        """Return the sequence's tokens, one byte each, or those that its recurrent state has."""
        tokens = [token for token, _ in self.sequences[sequence]]
        assert self.seen[sequence] == tokens
        return np.array(tokens if not part or len(tokens) <= part else [], np.int8)

    def restore(self, sequence: int, data: NDArray[Any], is_part: bool = False) -> bool:
        """Put saved tokens into new cells of an empty sequence, or replace a recurrent state."""
        if self.fails:
            return False
        if is_part:
            self.seen[sequence] = data.tolist()
            return True
        assert not self.sequences.get(sequence)
        self.evaluate(sequence, data.tolist())
        return True

    def evaluate(self, sequence: int, tokens: list[int]) -> None:
        """Append tokens to a sequence, each in a new cell."""
        self.sequences.setdefault(sequence, []).extend((token, object()) for token in tokens)
        self.seen.setdefault(sequence, []).extend(tokens)
        assert self.used <= SIZE

    def _before(self, sequence: int, end: int) -> list[tuple[int, object]]:
        cells = self.sequences.get(sequence, [])
        positions = positions_of([token for token, _ in cells])
        return [cell for cell, at in zip(cells, positions, strict=True) if at < end]

    @property
    def used(self) -> int:
        """The number of cells in use."""
        return len({cell for tokens in self.sequences.values() for _, cell in tokens})


def made(
    memory: Memory,
    size: int = SIZE,
    slots: int = SLOTS,
    rolls_back: bool = True,
    kept: int = 60,
) -> Cache:
    """Return a cache with blocks of one token, so that short lists have many blocks."""
    states = States(kept, rolls_back, block=1)
    most_kept = 0 if rolls_back else kept // 2
    return Cache(memory, size, slots, rolls_back, states, most_kept=most_kept)  # type: ignore[arg-type]


def grow(cache: Cache, memory: Memory, slot: Slot, tokens: Sequence[int]) -> None:
    """Evaluate tokens in a slot; each picture is evaluated as a whole."""
    for token in tokens:
        if token in PICTURES:
            cache.extend_media(slot, *PICTURES[token])
            memory.evaluate(slot.id, list(PICTURES[token][0]))
        elif token >= 0:
            cache.extend(slot, [token])
            memory.evaluate(slot.id, [token])


def evaluate(cache: Cache, memory: Memory, slot: Slot, tokens: list[int]) -> None:
    """Evaluate the rest of a prompt, with checkpoints."""
    for mark in cache.marks(slot, tokens):
        grow(cache, memory, slot, tokens[len(slot.tokens) : mark])
        cache.add_checkpoint(slot)
    grow(cache, memory, slot, tokens[len(slot.tokens) :])


def run(cache: Cache, memory: Memory, tokens: list[int], alone: bool) -> int:
    """Run a sequence from its beginning to its end, and return how many tokens were reused."""
    slot = cache.take(tokens, "", True, 0)
    assert slot is not None
    reused = slot.reused
    assert [token for token, _ in memory.sequences.get(slot.id, [])] == tokens[:reused]
    assert memory.seen.get(slot.id, []) == tokens[:reused]
    assert cache.make_room(len(tokens) - reused)
    evaluate(cache, memory, slot, tokens)
    cache.rest(slot)
    if not alone:
        other = cache.take([0] * 3, "other", False, 0)
        assert other is not None
        cache.tidy()
        cache.drop(other)
    return reused


class Cells(list[int]):
    """The cells of a sequence, of which nobody looks at all."""

    def __iter__(self) -> Iterator[int]:
        """Fail."""
        raise AssertionError


def test_a_scrape_does_not_visit_each_cell() -> None:
    """The share of used cells is found without a look at each, which would hold the event loop."""
    common, size = range(100_000), 131_072
    cache = made(Memory(), size)
    for number in range(SLOTS):
        start = len(common) + 1_000 * number
        slot = Slot(number, "", cells=Cells([*common, *range(start, start + 1_000)]))
        cache._running[number] = slot
    assert cache.used == (len(common) + SLOTS * 1_000) / size


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
# Prompts that have much in common.
ALIKE = st.lists(st.integers(0, 2), min_size=6, max_size=12).map(sorted)
# Prompts of single tokens and pictures.
SEEN = st.lists(
    st.sampled_from([(0,), (1,), (2,), LARGE[0], SMALL[0]]), min_size=1, max_size=6
).map(lambda parts: [token for part in parts for token in part][:SIZE])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "take",
                "take",
                "fork",
                "grow",
                "mark",
                "rest",
                "rest",
                "tidy",
                "swap_out",
                "drop",
                "room",
            ]
        ),
        TOKENS | ALIKE | SEEN.filter(lambda tokens: len(tokens) < SIZE),
        st.integers(0, 9),
    ),
    max_size=40,
)


@settings(max_examples=400)
@given(STEPS, st.booleans())
def test_the_books_are_right(steps: list[tuple[str, list[int], int]], rolls_back: bool) -> None:
    """After any steps, the cache's tokens and free cells are those of the memory, and no cell is
    lost."""
    memory = Memory(rolls_back)
    cache = made(memory, rolls_back=rolls_back)
    running: list[Slot] = []
    for step, tokens, number in steps:
        slot = running[number % len(running)] if running else None
        if step == "take":
            taken = cache.take(tokens, str(number % 2), True, number % 3)
            if taken is not None:
                assert taken.tokens == tokens[: taken.reused]
                assert taken.reused < len(tokens)
                assert cache.free >= len(tokens) - taken.reused + number % 3
                running.append(taken)
                if number > 4 and min(tokens) >= 0:
                    evaluate(cache, memory, taken, tokens)
        elif step == "room":
            cache.make_room(number)
        elif step == "tidy":
            cache.tidy()
            assert not (running and cache._resting)
        elif slot is not None and step == "fork":
            forked = cache.fork(slot)
            if forked is not None:
                running.append(forked)
        elif slot is not None and step == "grow":
            if cache.make_room(len(tokens)):
                grow(cache, memory, slot, tokens)
        elif slot is not None and step == "mark":
            if slot.tokens and not rolls_back:
                cache.add_checkpoint(slot)
        elif slot is not None:
            running.remove(slot)
            {"rest": cache.rest, "swap_out": cache.swap_out, "drop": cache.drop}[step](slot)
        assert cache.free == SIZE - memory.used >= 0
        cells = {cell for one in running for cell in one.cells}
        assert cache.used == len(cells) / SIZE
        for one in running:
            assert [token for token, _ in memory.sequences.get(one.id, [])] == one.tokens
            assert memory.seen.get(one.id, []) == one.tokens
            following = positions_of([*one.tokens, 0])[-1]
            assert len(one.tokens) - one.surplus == following
    for slot in running:
        cache.drop(slot)
    assert cache.make_room(SIZE)
    assert memory.used == 0


def test_a_recurrent_state_goes_back_to_a_checkpoint() -> None:
    """A prompt reuses a sequence up to its checkpoint, from the KV cache and from host memory."""
    for alone in (True, False):
        memory = Memory(False)
        cache = made(memory, rolls_back=False)
        first = list(range(10))
        assert run(cache, memory, first, alone) == 0
        assert run(cache, memory, [*first[:6], 20, 21, 22, 23, 24, 25], alone) == 6
        assert run(cache, memory, first, alone) == 6


def test_a_second_conversation_finds_where_its_instructions_end() -> None:
    """A conversation gets a checkpoint where it branches off, and the next one begins there."""
    for alone in (True, False):
        memory = Memory(False)
        cache = made(memory, rolls_back=False)
        instructions = [1, 2, 3, 4]
        assert run(cache, memory, [*instructions, 5, 6, 7, 8, 9], alone) == 0
        assert run(cache, memory, [*instructions, 6, 6, 7, 8, 9], alone) == 0
        assert run(cache, memory, [*instructions, 7, 6, 7, 8, 9], alone) == 4


@given(st.lists(st.tuples(ALIKE, st.booleans()), max_size=12))
def test_a_recurrent_state_has_seen_the_reused_tokens(
    prompts: list[tuple[list[int], bool]],
) -> None:
    """The recurrent state of a prompt has seen the tokens that it reuses, and no others."""
    memory = Memory(False)
    cache = made(memory, rolls_back=False)
    for tokens, alone in prompts:
        run(cache, memory, tokens, alone)


@pytest.mark.parametrize("alone", [True, False])
def test_a_prompt_takes_what_is_longest(alone: bool) -> None:
    """A prompt reuses the saved sequence with the longest common beginning."""
    memory = Memory()
    cache = made(memory)
    for tokens in ([1, 2, 7], [1, 2, 3, 4], [1, 5]):
        run(cache, memory, tokens, alone)
    assert run(cache, memory, [1, 2, 3, 9], alone) == 3


@pytest.mark.parametrize("alone", [True, False])
def test_a_picture_is_reused_as_a_whole(alone: bool) -> None:
    """A prompt reuses a sequence up to the end of a picture or up to its start, and no part."""
    memory = Memory()
    cache = made(memory)
    picture = list(LARGE[0])
    run(cache, memory, [1, *picture, 2], alone)
    assert run(cache, memory, [1, *picture, 0, *picture, 0], alone) == 7
    assert run(cache, memory, [1, *picture, 0, *picture, 1], alone) == 14
    # The last token is always evaluated, and with it the whole picture.
    assert run(cache, memory, [1, *picture, 0, *picture], alone) == 8
    assert run(cache, memory, [1, *SMALL[0], 0], alone) == 1


def test_who_is_alone_goes_on_where_it_was() -> None:
    """Consecutive prompts of a single client reuse their sequence without saving or restoring
    it."""
    memory = Memory()
    cache = made(memory)
    memory.save = memory.restore = None  # type: ignore[method-assign, assignment]
    for length in range(1, 10):
        assert run(cache, memory, list(range(length)), True) == length - 1


def test_what_has_left_takes_no_cells() -> None:
    """A sequence that finishes while another runs frees its cells and can still be reused."""
    memory = Memory()
    cache = made(memory)
    run(cache, memory, [1, 2, 3, 4, 5], False)
    assert memory.used == 0
    assert run(cache, memory, [1, 2, 3, 9], False) == 3
    assert memory.used == 0


def test_what_was_used_longest_ago_goes_first() -> None:
    """The least recently used state is evicted first."""
    memory = Memory()
    cache = made(memory, kept=6)
    for token in (1, 2, 3):
        run(cache, memory, [token, token], False)
    assert run(cache, memory, [1, 9], False) == 1
    # The new state has replaced the least recently used one.
    assert [run(cache, memory, [token, 8], False) for token in (2, 1)] == [0, 1]


def test_a_state_that_another_covers_is_not_kept() -> None:
    """A state that another state contains is not kept, so a conversation keeps only its last
    turn."""
    states = States(100, True, block=4)
    one = list(range(10))
    states.add(State("", one, np.zeros(10, np.uint8)))
    states.add(State("", [*one, *range(10)], np.zeros(20, np.uint8)))
    assert states.used == 20
    assert not states.wants("", one)
    assert not states.wants("", [*one, 99])
    assert states.wants("", [*one, 99, 99, 99, 99])
    assert states.wants("other", one)
    states.add(State("", [7] * 50, np.zeros(101, np.uint8)))
    assert states.used == 20


def test_copies_of_a_sequence_count_their_checkpoints_once() -> None:
    """Checkpoints that several sequences have take the bytes of one."""
    memory = Memory(False)
    cache = made(memory, rolls_back=False)
    slot = cache.take(list(range(9)), "", True, 0)
    assert slot is not None
    grow(cache, memory, slot, list(range(7)))
    cache._most_kept = 18
    cache.add_checkpoint(slot)
    copies = [cache.fork(slot) for _ in range(2)]
    grow(cache, memory, slot, [7, 8, 9, 10])
    cache.add_checkpoint(slot)
    assert slot.points == [7, 11]
    assert [one.points for one in copies if one is not None] == [[7], [7]]


def test_sequences_that_come_back_keep_to_the_bound_of_checkpoints() -> None:
    """Checkpoints of states that are restored count among those in the KV cache."""
    memory = Memory(False)
    cache = made(memory, rolls_back=False)
    for first in (10, 30):
        tokens = list(range(first, first + 10))
        run(cache, memory, tokens, False)
    cache._most_kept = 6
    slots = [cache.take([*range(first, first + 10), 1], "", True, 0) for first in (10, 30)]
    assert [slot.reused for slot in slots if slot is not None] == [10, 10]
    assert sum(one.data.nbytes for slot in slots if slot for one in slot.checkpoints) <= 6


def test_a_state_without_checkpoints_gives_way_to_the_same_with_them() -> None:
    """A sequence with checkpoints is kept in place of the same tokens without them."""
    states = States(100, False, block=4)
    one = list(range(20))
    states.add(State("", one, np.zeros(10, np.uint8)))
    assert not states.wants("", one)
    assert states.wants("", one, [8, 16])
    kept = checkpoints(8, 16)
    states.add(State("", one, np.zeros(10, np.uint8), checkpoints=kept))
    assert not states.wants("", one, [8, 16])
    assert not states.wants("", one)
    assert [state.checkpoints for state in states.empty()] == [kept]


def test_marks_of_a_prompt_are_apart() -> None:
    """A prompt that is like no other gets a checkpoint before its question and one near its end; a
    short one gets the second only, and none is within a block of what it reuses."""
    cache = Cache(Memory(False), 4000, 2, False, States(100, False), most_kept=100)  # type: ignore[arg-type]
    slot = cache.take([1], "", False, 0)
    assert slot is not None
    for length, marks in ((67, []), (68, [64]), (600, [84, 596]), (570, [566])):
        assert cache.marks(slot, [1] * length) == marks
    slot.checkpoints = checkpoints(100)
    slot.reused = 130
    assert cache.marks(slot, [1] * 150) == []
    assert cache.marks(slot, [1] * 168) == [164]
    assert cache.marks(slot, [1] * 600) == [596]
    # Prompts that wait get one before the end, too, because the end is evaluated with logits.
    assert cache.branch([1] * 100, [1] * 200) == 96
    assert cache.branch([1] * 67, [1] * 200) == 0


def test_prompts_of_others_decide_no_checkpoint() -> None:
    """The prompts of another owner change nothing about the pieces of a prompt."""
    memory = Memory(False)
    cache = made(memory, rolls_back=False)
    other = cache.take(list(range(8)), "other", True, 0)
    assert other is not None
    evaluate(cache, memory, other, list(range(8)))
    tokens = [0, 1, 2, 3, 20, 21, 22, 23, 24]
    slot = cache.take(tokens, "", True, 0)
    assert slot is not None
    assert cache.marks(slot, tokens) == [5]
    slot.owner = "other"
    assert cache.marks(slot, tokens) == [4, 5]


def test_a_sequence_has_a_bounded_number_of_checkpoints() -> None:
    """A checkpoint too many replaces the one that is closest to its neighbours."""
    memory = Memory(False)
    memory.save = lambda *_: np.zeros(1, np.int8)  # type: ignore[method-assign]
    cache = made(memory, 100, rolls_back=False, kept=1000)
    slot = cache.take([1], "", True, 0)
    assert slot is not None
    lengths = [3, 6, 7, *range(9, 9 + 2 * MOST_CHECKPOINTS, 2)][: MOST_CHECKPOINTS + 1]
    for length in lengths:
        cache.extend(slot, [1] * (length - len(slot.tokens)))
        cache.add_checkpoint(slot)
    lengths.remove(7)
    assert slot.points == lengths


def test_a_state_that_is_too_large_loses_its_checkpoints() -> None:
    """A state that fits without its checkpoints is kept without them."""
    states = States(50, False, block=4)
    states.add(State("", list(range(20)), np.zeros(40, np.uint8), checkpoints=checkpoints(8)))
    assert [(one.size, one.points) for one in states.empty()] == [(40, [])]


def test_a_checkpoint_far_from_the_end_does_not_replace_a_state() -> None:
    """A longer state covers another one only if it has a checkpoint within a block of its end."""
    for point, is_covered in ((6, False), (7, True), (10, True), (11, False)):
        states = States(100, False, block=4)
        kept = checkpoints(point)
        states.add(State("", list(range(20)), np.zeros(10, np.uint8), checkpoints=kept))
        assert states.wants("", list(range(10))) != is_covered


def test_what_cannot_be_cut_is_gone_on_from_whole() -> None:
    """A recurrent model's state is reused only by a prompt that begins with all of it."""
    memory = Memory()
    cache = made(memory, rolls_back=False)
    run(cache, memory, [1, 2, 3], False)
    assert run(cache, memory, [1, 2, 9], False) == 0
    assert run(cache, memory, [1, 2, 3], False) == 0
    assert run(cache, memory, [1, 2, 3, 4], False) == 3


def test_a_state_that_does_not_come_back_is_evaluated_again() -> None:
    """A prompt is evaluated from its beginning when llama.cpp cannot restore a state."""
    memory = Memory()
    cache = made(memory)
    run(cache, memory, [1, 2, 3, 4, 5], False)
    memory.fails = True
    assert run(cache, memory, [1, 2, 3, 9], False) == 0


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_that_does_not_come_back_is_evaluated_again(beside: bool) -> None:
    """A prompt is evaluated from its beginning when llama.cpp cannot restore a checkpoint, in its
    own sequence or in a copy."""
    memory = Memory(False)
    # Without a second slot the sequence is cut.
    cache = made(memory, slots=SLOTS if beside else 1, rolls_back=False)
    first = list(range(9))
    slot = cache.take(first, "", True, 0)
    assert slot is not None
    evaluate(cache, memory, slot, first)
    if not beside:
        cache.rest(slot)
    memory.fails = True
    second = [*first[:6], 20, 21, 22]
    taken = cache.take(second, "", True, 0)
    assert taken is not None
    assert (taken.tokens, taken.reused, taken.points) == ([], 0, [])
    evaluate(cache, memory, taken, second)
    assert memory.seen[taken.id] == second
    assert cache.free == SIZE - memory.used


def test_what_a_window_may_lack_is_not_known() -> None:
    """Other threads, which cannot look at the windows, count only whole sequences and
    checkpoints."""
    states, memory = States(100, False, block=1), Memory()
    memory.window = 3
    cache = Cache(memory, SIZE, SLOTS, True, states)  # type: ignore[arg-type]
    slot = cache.take([*range(10)], "", True, 0)
    assert slot is not None
    cache.extend(slot, range(10))
    cache.rest(slot)
    assert cache.known("", [*range(12)]) == 10
    assert cache.known("", [*range(8), 20]) == 0
    slot.checkpoints = checkpoints(6)
    assert cache.known("", [*range(8), 20]) == 6


@pytest.mark.parametrize("alone", [True, False])
def test_nothing_is_kept_where_nothing_is_to_be_remembered(alone: bool) -> None:
    """A cache with one slot and no host memory keeps no finished sequence."""
    memory = Memory()
    cache = made(memory, slots=1, kept=0)
    for _ in range(2):
        assert run(cache, memory, [1, 2, 3], alone) == 0
        assert memory.used == 0


def test_too_many_tokens_are_refused() -> None:
    """The cache rejects more tokens than it has free cells."""
    cache = made(Memory(), 4)
    assert cache.take([1] * 5, "", True, 0) is None
    slot = cache.take([1, 2], "", True, 0)
    assert slot is not None
    with pytest.raises(ValueError, match="5 tokens for 4 free cells"):
        cache.extend(slot, [1] * 5)


@given(TOKENS, TOKENS)
def test_common_beginnings(one: list[int], other: list[int]) -> None:
    """`common` returns the length of the common beginning of two lists."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert common(one, other) == count


def test_a_window_that_is_empty_is_not_there() -> None:
    """A sequence whose windows were overwritten, at a multiple of their length, is only reused as
    a whole."""

    class Overwritten(Memory):
        window = 4

        def first(self, sequence: int) -> int:
            return -1

    memory = Overwritten()
    cache = Cache(memory, SIZE, SLOTS, True, States(60, False, block=1))  # type: ignore[arg-type]
    slot = cache.take([*range(8)], "", True, 0)
    assert slot is not None
    grow(cache, memory, slot, range(8))
    cache.rest(slot)
    assert reused(cache, [0, 1, 2, 3, 4, 5, 20]) == 0
    assert reused(cache, [*range(8), 20]) == 8


def reused(cache: Cache, tokens: list[int]) -> int:
    """Return how many tokens of a prompt are reused."""
    slot = cache.take(tokens, "", True, 0)
    assert slot is not None
    return slot.reused
