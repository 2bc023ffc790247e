"""Tests of the number of threads that decode while other programs need the cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.threads import (
    HOLD,
    LEAST_HOLD,
    MOST_BATCHES,
    TRIALS,
    Threads,
)


class Machine:
    """A machine whose decodes take the seconds of `decode`, for a number of threads.

    Args:
        decode: returns the seconds of a decode, and the cores that the process gets.
    """

    def __init__(self, most: int, decode: Callable[[int], tuple[float, float]]) -> None:
        self.threads = Threads(most)
        self.decode = decode
        self.now = 100.0

    def run(self, sizes: Sequence[int]) -> list[int]:
        """Decode batches of these sizes, and return the number of threads of each."""
        found = []
        for size in sizes:
            found.append(self.threads.next)
            seconds, cores = self.decode(self.threads.next)
            self.now += seconds
            self.threads.add(size, seconds, seconds * cores, self.now)
        return found

    def settle(self) -> None:
        """Wait until the next trial may begin."""
        self.now += 1000.0


def idle(threads: int) -> tuple[float, float]:
    """No other program runs, so that more threads are faster."""
    return 0.02 / threads, threads * 0.97


def busy(threads: int) -> tuple[float, float]:
    """Another program takes one of two cores, so that two threads wait for each other."""
    return (0.03, 1.3) if threads == 2 else (0.02, 1.0)


def test_an_idle_machine_has_no_trial() -> None:
    """All threads decode while they get their cores."""
    assert Machine(2, idle).run([1] * 500) == [2] * 500
    assert Machine(1, lambda _: (0.02, 0.5)).run([1] * 500) == [1] * 500


def test_fewer_threads_are_used_where_they_are_faster() -> None:
    """Without a core, a trial of each number in turn finds that one thread is faster."""
    machine = Machine(2, busy)
    trial = [2] + [2, 1] * TRIALS
    assert machine.run([1] * (len(trial) + 20)) == trial + [1] * 20


def test_all_threads_are_used_again() -> None:
    """After the other program has ended, the next trial finds that two threads are faster."""
    machine = Machine(2, busy)
    machine.run([1] * 20)
    machine.decode = idle
    assert machine.run([1] * 5) == [1] * 5, "a verdict holds for a time"
    machine.settle()
    # Twice as fast is clear after one step of each.
    assert machine.run([1] * 10) == [1, 1, 2] + [2] * 7


def test_a_slower_trial_is_not_repeated_soon() -> None:
    """If fewer threads are slower, the next trial waits for a multiple of what this one lost."""
    machine = Machine(2, lambda threads: (0.1, 1.5) if threads == 2 else (0.15, 1.0))
    assert 1 in machine.run([1] * 8)
    begun, hold = machine.now, HOLD * TRIALS * 0.05
    assert hold > LEAST_HOLD
    while machine.now < begun + hold - 0.2:
        assert machine.run([1]) == [2]
    assert 1 in machine.run([1] * 12)


def test_a_catastrophe_ends_a_trial() -> None:
    """One step that takes many times as long decides, and the next trial is far away."""
    machine = Machine(2, busy)
    machine.run([1] * 20)
    machine.settle()
    machine.decode = lambda threads: (3.0, 0.6) if threads == 2 else (0.02, 1.0)
    assert machine.run([1] * 1000).count(2) == 1
    assert machine.now < 1200.0, "the thousand steps ended before the next trial"


def test_only_batches_of_one_size_are_compared() -> None:
    """A larger batch takes longer for another reason, so its pair does not count."""
    machine = Machine(2, busy)
    found = machine.run([1, 1, 2, 1, 2] + [3] * 20)
    assert found == [2, 2, 1, 2, 1] + [2, 1] * TRIALS + [1] * (20 - 2 * TRIALS)


def test_a_catastrophe_ends_a_trial_of_different_sizes() -> None:
    """A step that takes many times as long as its tokens explain decides, too."""
    machine = Machine(2, busy)
    machine.run([1] * 20)
    machine.settle()
    machine.decode = lambda threads: (3.0, 0.6) if threads == 2 else (0.02, 1.0)
    assert machine.run(range(1, 100)).count(2) == 1
    assert machine.threads.used == 1


def test_a_trial_without_pairs_ends() -> None:
    """A trial ends and changes nothing if each batch has another size, as with drafts."""
    machine = Machine(2, busy)
    found = machine.run(range(1, 60))
    assert found[: 1 + MOST_BATCHES] == [2] + [2, 1] * (MOST_BATCHES // 2)
    assert set(found[1 + MOST_BATCHES :]) == {2}


def test_a_large_machine_leaves_the_core_that_is_missing() -> None:
    """Of eight threads, as many decode as there are cores, and fewer if others become busy."""
    machine = Machine(8, lambda threads: (0.02 if threads == 8 else 0.011, min(threads, 7.4)))
    machine.run([1] * 20)
    assert machine.threads.used == 7
    machine.settle()
    machine.decode = lambda threads: (0.05 if threads > 4 else 0.02, min(threads, 4.5))
    machine.run([1] * 20)
    assert machine.threads.used == 4


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_threads_has_the_same_logits(count: int) -> None:
    """The number of threads of a context changes, and its results do not."""
    options = Options(parallel=1, batch=64, threads=2)
    context = Context(LoadedModel(DEMO_MODEL, options), options, 256)
    found = []
    for threads in (2, count):
        context.use_threads(threads)
        assert context.threads == threads
        context.remove(0)
        context.add(0, 0, [5, 7, 9], 1)
        context.decode()
        found.append(context.logits(0, 1).tobytes())
    assert found[0] == found[1]
