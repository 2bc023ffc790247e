"""The cache's book-keeping against a memory that counts cells the slow way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.llama_cpp import cache as module
from latimer.backends.llama_cpp.cache import Cache, Slot, common

SIZE, SLOTS = 24, 4


@pytest.fixture(autouse=True, scope="module")
def single_tokens() -> Iterator[None]:
    """Blocks of one token, so that short lists have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 1)
        yield


class Memory:
    """What llama.cpp would remember: for each sequence its tokens, each in a cell."""

    def __init__(self) -> None:
        self.sequences: dict[int, list[tuple[int, object]]] = {}

    def remove(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence from a position on."""
        self.sequences[sequence] = self.sequences.get(sequence, [])[:start]

    def copy(self, source: int, target: int, end: int) -> None:
        """Share the beginning of a sequence with one that is empty."""
        assert not self.sequences.get(target)
        self.sequences[target] = self.sequences.get(source, [])[:end]

    def evaluate(self, sequence: int, tokens: list[int]) -> None:
        """Put tokens behind a sequence, each into a cell of its own."""
        self.sequences.setdefault(sequence, []).extend((token, object()) for token in tokens)

    @property
    def used(self) -> int:
        """How many cells hold something."""
        return len({cell for tokens in self.sequences.values() for _, cell in tokens})


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "fork", "grow", "rest", "drop", "room"]), TOKENS, st.integers(0, 9)
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_the_books_are_right(steps: list[tuple[str, list[int], int]], rolls_back: bool) -> None:
    """Whatever happens, tokens and free cells are those of the memory, and none is lost."""
    memory = Memory()
    cache = Cache(memory, SIZE, SLOTS, rolls_back)
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
        elif step == "room":
            cache.make_room(number)
        elif slot is not None and step == "fork":
            forked = cache.fork(slot)
            if forked is not None:
                running.append(forked)
        elif slot is not None and step == "grow":
            if cache.make_room(len(tokens)):
                cache.extend(slot, tokens)
                memory.evaluate(slot.id, tokens)
        elif slot is not None:
            running.remove(slot)
            (cache.rest if step == "rest" else cache.drop)(slot)
        assert cache.free == SIZE - memory.used >= 0
        for one in running:
            assert [token for token, _ in memory.sequences.get(one.id, [])] == one.tokens
    for slot in running:
        cache.drop(slot)
    assert cache.make_room(SIZE)
    assert memory.used == 0


def test_a_prompt_takes_what_is_longest() -> None:
    """Of several that begin alike the one with most in common is gone on from."""
    memory = Memory()
    cache = Cache(memory, SIZE, SLOTS, True)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 5]):
        slot = cache.take(tokens, "", False, 0)
        assert slot is not None
        cache.extend(slot, tokens)
        memory.evaluate(slot.id, tokens)
        cache.rest(slot)
    taken = cache.take([1, 2, 3, 9], "", True, 0)
    assert taken is not None
    assert taken.reused == 3


def test_what_rests_longest_goes_first() -> None:
    """Cells are taken from what nobody has gone on from for the longest time."""
    memory = Memory()
    cache = Cache(memory, 6, SLOTS, True)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        slot = cache.take(tokens, "", True, 0)
        assert slot is not None
        cache.extend(slot, tokens)
        memory.evaluate(slot.id, tokens)
        cache.rest(slot)
    used = cache.take([1, 1, 1], "", True, 0)
    assert used is not None
    cache.drop(used)
    kept = [cache.take(tokens, "", True, 0) for tokens in ([1, 1, 9], [2, 2, 9])]
    assert [slot.reused for slot in kept if slot is not None] == [2, 0]


def test_nothing_is_kept_where_nothing_is_to_be_remembered() -> None:
    """What has finished is gone at once, and the next begins anew."""
    memory = Memory()
    cache = Cache(memory, SIZE, 1, True, remembers=False)
    for _ in range(2):
        slot = cache.take([1, 2, 3], "", True, 0)
        assert slot is not None
        assert slot.reused == 0
        cache.extend(slot, [1, 2, 3])
        memory.evaluate(slot.id, [1, 2, 3])
        cache.rest(slot)
        assert memory.used == 0


def test_too_many_tokens_are_refused() -> None:
    """What there is no cell for never reaches llama.cpp."""
    cache = Cache(Memory(), 4, SLOTS, True)
    assert cache.take([1] * 5, "", True, 0) is None
    slot = cache.take([1, 2], "", True, 0)
    assert slot is not None
    with pytest.raises(ValueError, match="5 tokens for 4 free cells"):
        cache.extend(slot, [1] * 5)


@given(TOKENS, TOKENS)
def test_common_beginnings(one: list[int], other: list[int]) -> None:
    """How much two lists begin alike is what counting them gives."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert common(one, other) == count
