"""Tests of the number of threads that decode while other programs need the cores."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_cpp import threads as module
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.threads import (
    BLOCK,
    HOLD,
    LEAST,
    LEAST_HOLD,
    LOOKS,
    MEASURED,
    MOST_BATCHES,
    MOST_HOLD,
    STALE,
    SURE,
    Threads,
    free_cores,
    free_seconds,
)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the count of the cores that are free by the last number of a list."""
    found = [64]
    monkeypatch.setattr(module, "free_cores", lambda wanted: min(found[-1], wanted))
    return found


@pytest.fixture(autouse=True)
def free_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the seconds of free cores by those of the machine."""
    monkeypatch.setattr(module, "free_seconds", lambda: Machine.free_seconds)


class Machine:
    """A machine whose decodes take the seconds of `decode`, for a number of threads.

    Args:
        decode: returns the seconds of a decode, and the cores that the process gets.

    Attributes:
        free: the cores that no other program uses.
    """

    free_seconds = 0.0
    free = 0.0

    def __init__(self, most: int, decode: Callable[[int], tuple[float, float]]) -> None:
        self.threads = Threads(most)
        self.decode = decode
        self.now = 100.0

    def run(self, sizes: Iterable[int]) -> list[int]:
        """Decode batches of these sizes, and return the number of threads of each."""
        found = []
        for size in sizes:
            found.append(self.threads.next)
            seconds, cores = self.decode(self.threads.next)
            self.now += seconds
            Machine.free_seconds += seconds * self.free
            self.threads.add(size, seconds, seconds * cores, self.now)
        return found

    def measure(self) -> None:
        """Decode until a trial begins."""
        for _ in range(1000):
            self.run([1])
            if self.threads.is_trying:
                return
        raise AssertionError("no trial has begun")

    def settle(self) -> None:
        """Wait until the last result is in doubt."""
        self.now += MOST_HOLD


def trial(used: int, other: int) -> list[int]:
    """Return the threads of the batches of a trial: short blocks, then long ones."""
    return [used] * LEAST + [other] * LEAST + [used] * (BLOCK + 1) + [other] * (BLOCK + 1)


def idle(threads: int) -> tuple[float, float]:
    """No other program runs, so that more threads are faster."""
    return 0.02 / threads, threads * 0.97


def busy(threads: int) -> tuple[float, float]:
    """Another program takes one of two cores, so that two threads wait for each other."""
    return (0.03, 1.3) if threads == 2 else (0.02, 1.0)


@pytest.mark.parametrize("most", [1, 2, 16, 64])
def test_a_machine_without_other_work_has_no_trial(most: int) -> None:
    """All threads decode while they get most of their cores."""
    machine = Machine(most, lambda threads: (0.02, threads * 0.93))
    assert machine.run([1] * 2000) == [most] * 2000


def test_fewer_threads_are_used_where_they_are_faster() -> None:
    """A trial of blocks in turns finds that one thread is faster if a core is missing."""
    machine = Machine(2, busy)
    assert machine.run([1] * int(MEASURED / 0.03)) == [2] * int(MEASURED / 0.03)
    machine.measure()
    whole = trial(2, 1)
    assert machine.run([1] * (len(whole) + 20)) == whole + [1] * 20


def test_a_prompt_has_the_cores_that_are_free_at_times(free: list[int]) -> None:
    """While one thread generates, a prompt has two if the other program is found asleep. Cores are
    counted once a second, and not again for the same result if that program was found."""
    machine = Machine(2, busy)
    machine.measure()
    machine.run([1] * len(trial(2, 1)))
    assert machine.threads.known(machine.now) == 2
    free.append(1)
    assert machine.threads.known(machine.now + 0.9 * SURE) == 2
    assert machine.threads.known(machine.now + 1.1 * SURE) == 1
    free.append(2)
    assert machine.threads.known(machine.now + 2.2 * SURE) == 1
    assert machine.threads.next == 1
    machine.settle()
    assert machine.threads.known(machine.now) == 2


def test_all_threads_are_used_again(free: list[int]) -> None:
    """After the other program has ended, the next trial finds that two threads are faster."""
    machine = Machine(2, busy)
    machine.measure()
    machine.run([1] * 30)
    machine.decode = idle
    assert machine.run([1] * 5) == [1] * 5, "a result holds for a time"
    machine.settle()
    assert machine.threads.known(machine.now) == 2, "prompts do not wait for a trial"
    machine.measure()
    assert machine.run([1] * 30) == [*trial(1, 2), *[2] * 30][:30]


def test_all_threads_are_used_soon_after_cores_become_free() -> None:
    """A result that would hold for a minute is in doubt when the other program has ended."""

    def loaded(threads: int) -> tuple[float, float]:
        return (0.6, 1.0) if threads == 2 else (0.1, 1.0)

    machine = Machine(2, loaded)
    for _ in range(2):
        machine.free, machine.decode = 1.5, loaded
        machine.measure()
        machine.run([1] * 2 * LEAST)
        assert machine.run([1] * 100) == [1] * 100, "half a core is not enough"
        machine.free, machine.decode = 2.0, idle
        found = machine.run([1] * 250)
        assert found[-1] == 2
        assert found.count(1) * 0.02 < 2 * SURE + 2 * MEASURED


def test_cores_that_are_free_begin_one_trial() -> None:
    """If fewer threads stay faster although cores are free, their result holds as long as ever."""
    machine = Machine(2, lambda threads: (0.06, 1.0) if threads == 2 else (0.05, 1.0))
    machine.free = 2.0
    machine.measure()
    machine.run([1] * len(trial(2, 1)))
    assert machine.threads.used == 1
    hold = HOLD * 0.01 * BLOCK
    assert machine.run([1] * int(hold / 0.05)).count(2) == trial(2, 1).count(2)


def test_a_slower_trial_is_not_repeated_soon() -> None:
    """If fewer threads are slower, the next trial waits for a multiple of what this one lost."""
    machine = Machine(2, lambda threads: (0.1, 1.5) if threads == 2 else (0.15, 1.0))
    machine.measure()
    whole = trial(2, 1)
    assert machine.run([1] * len(whole)) == whole
    begun, hold = machine.now, HOLD * (LEAST + BLOCK) * 0.05
    assert hold > LEAST_HOLD
    while machine.now < begun + hold - 0.3:
        assert machine.run([1]) == [2]
    machine.measure()
    assert machine.now < begun + hold + 1.0


def test_trials_that_bring_nothing_become_rare() -> None:
    """Each trial that shows that all threads are faster holds twice as long."""
    machine = Machine(2, lambda threads: (0.01, 1.6) if threads == 2 else (0.012, 1.0))
    found = machine.run([1] * 30_000)
    each = trial(2, 1).count(1)
    assert found[:1_500].count(1) >= 3 * each
    assert found[-6_000:].count(1) <= 2 * each, "at most once in half a minute"


def test_trials_stay_rare_while_measurements_vary(free: list[int]) -> None:
    """Half a core that is missing more or less, and prompts that find all cores free at times,
    begin no more trials."""
    cores = itertools.cycle([1.55, 1.62, 1.69, 1.58])
    machine = Machine(2, lambda count: (0.01, next(cores)) if count == 2 else (0.012, 1.0))
    machine.run([1] * 20_000)
    found = []
    for _ in range(600):
        machine.threads.known(machine.now)
        found += machine.run([1] * 10)
    assert free == [64]
    assert found.count(1) <= 2 * trial(2, 1).count(1), "at most once in half a minute"


def test_trials_without_a_result_become_rare() -> None:
    """Batches whose sizes never come again cannot be compared, so trials of them become rare."""
    machine = Machine(2, lambda threads: (0.01, 1.6) if threads == 2 else (0.012, 1.0))
    sizes = itertools.count(1)
    found = machine.run(itertools.islice(sizes, 30_000))
    assert found[-6_000:].count(1) <= 2 * MOST_BATCHES


def test_a_count_of_cores_is_no_measurement(free: list[int]) -> None:
    """A trial that a prompt begins, because it has found a program awake, keeps later ones rare."""
    machine = Machine(2, lambda threads: (0.01, 1.6) if threads == 2 else (0.012, 1.0))
    machine.run([1] * 20_000)
    found = []
    for _ in range(2_400):
        free[:] = [1]
        machine.threads.known(machine.now)
        found += machine.run([1] * 10)
    assert found.count(1) <= 6 * trial(2, 1).count(1), "in four minutes"


def test_trials_are_no_longer_rare_after_a_change() -> None:
    """A machine that was idle for a time has trials as often as at first."""
    machine = Machine(2, lambda threads: (0.01, 1.6) if threads == 2 else (0.012, 1.0))
    machine.run([1] * 30_000)
    loaded, machine.decode = machine.decode, idle
    machine.run([1] * 100)
    machine.settle()
    machine.decode = loaded
    assert machine.run([1] * 1_500).count(1) >= 3 * trial(2, 1).count(1)


def test_a_busier_machine_has_a_trial_at_once() -> None:
    """If another core goes missing, the result of a trial is in doubt before its time."""
    machine = Machine(2, lambda threads: (0.01, 1.6) if threads == 2 else (0.012, 1.0))
    machine.run([1] * 30_000)
    machine.decode = busy
    found = machine.run([1] * 40)
    assert found[-10:] == [1] * 10


def test_a_catastrophe_ends_a_trial() -> None:
    """Steps that take many times as long decide soon, and the next trial is far away."""
    machine = Machine(2, busy)
    machine.measure()
    machine.run([1] * 20)
    machine.settle()
    machine.decode = lambda threads: (3.0, 0.6) if threads == 2 else (0.02, 1.0)
    assert machine.run([1] * 1000).count(2) == LEAST
    assert machine.threads.used == 1


def test_a_pause_does_not_decide_for_long() -> None:
    """A machine that sleeps in a trial loses no more than a minute by the result."""
    machine = Machine(2, busy)
    machine.measure()
    pause = iter([0.03, 600.0, 0.03, 600.0])
    machine.decode = lambda _: (next(pause), 1.3)
    machine.run([1] * 4)
    assert machine.threads.used == 2
    machine.decode = busy
    machine.settle()
    machine.measure()


def test_only_batches_of_one_size_are_compared() -> None:
    """A larger batch takes longer for another reason, so it does not count."""

    def decode(threads: int) -> tuple[float, float]:
        return busy(threads)[0] * size / 2, 1.3

    machine, size = Machine(2, busy), 2
    machine.measure()
    machine.decode = decode
    whole = trial(2, 1)
    for size, count in zip([2] * 14 + [3] * 2 + [2] * 2, whole, strict=True):
        assert machine.run([size]) == [count]
    assert machine.threads.used == 1


def test_a_catastrophe_ends_a_trial_of_different_sizes() -> None:
    """Steps that take many times as long as their tokens explain decide, too."""
    machine = Machine(2, busy)
    machine.measure()
    machine.run([1] * 20)
    machine.settle()
    machine.decode = lambda threads: (3.0, 0.6) if threads == 2 else (0.02, 1.0)
    assert machine.run(range(1, 100)).count(2) == LEAST
    assert machine.threads.used == 1


def test_a_trial_without_pairs_ends() -> None:
    """A trial ends and changes nothing if each batch has another size, as with drafts."""
    machine = Machine(2, busy)
    machine.measure()
    found = machine.run(range(1, 60))
    assert found[:MOST_BATCHES] == trial(2, 1) + trial(2, 1)[2 * LEAST :]
    assert set(found[MOST_BATCHES:]) == {2}


def test_batches_with_a_pause_between_are_not_compared() -> None:
    """Nothing is known of the machine after a request has ended in the middle of a trial."""
    machine = Machine(2, busy)
    machine.measure()
    whole = trial(2, 1)
    assert machine.run([1] * (len(whole) - 1)) == whole[:-1]
    machine.now += 2 * STALE
    again = whole[2 * LEAST :]
    assert machine.run([1] * (1 + len(again))) == [1, *again]
    assert not machine.threads.is_trying
    assert machine.threads.used == 1


def test_the_first_batch_after_a_change_does_not_count() -> None:
    """Threads that have slept find other programs on their cores at first."""
    last = 2

    def decode(threads: int) -> tuple[float, float]:
        nonlocal last
        woken, last = threads > last, threads
        return ((0.05 if woken else 0.026), 1.6) if threads == 2 else (0.03, 1.0)

    machine = Machine(2, decode)
    machine.threads.used = machine.threads.next = 1
    machine.run([1] * 30)
    assert machine.threads.used == 2
    for _ in range(5):
        machine.settle()
        machine.measure()
        machine.run([1] * 40)
        assert machine.threads.used == 2


def test_a_small_gain_keeps_all_threads() -> None:
    """Fewer threads have to be clearly faster, because a trial is short and the result holds."""
    machine = Machine(2, lambda threads: (0.021, 1.3) if threads == 2 else (0.02, 1.0))
    assert machine.run([1] * 2000)[-500:].count(2) > 400
    assert machine.threads.used == 2


def test_a_large_machine_leaves_the_cores_that_are_missing() -> None:
    """Of eight threads, as many decode as there are cores, whether these become fewer or more."""
    cores = 7.1

    def decode(threads: int) -> tuple[float, float]:
        return (0.02 if threads <= cores else 0.2) * 8 / threads, min(threads, cores)

    machine = Machine(8, decode)
    for cores in (7.1, 4.5, 6.3, 8.0):
        for _ in range(8):
            machine.settle()
            machine.run([1] * 400)
        assert machine.threads.used == int(cores)


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_the_first_prompt_leaves_cores_to_others(free: list[int], cores: int, count: int) -> None:
    """A prompt has the cores that no other program uses, which are not counted each time."""
    free.append(cores)
    threads = Threads(4)
    assert threads.known(100.0) == count
    free.append(2)
    assert threads.known(100.0 + 0.9 * SURE) == count
    assert threads.known(100.0 + 1.1 * SURE) == 2


def test_a_prompt_has_all_threads_where_all_cores_were_there(free: list[int]) -> None:
    """A measurement without missing cores holds for a second, and then cores are counted again."""
    free.append(1)
    threads = Threads(4)
    assert threads.measure(MEASURED, 3.8 * MEASURED, 100.0) == pytest.approx(3.8)
    assert threads.known(100.0 + 0.9 * SURE) == 4
    assert threads.known(100.0 + 1.1 * SURE) == 1


def test_missing_cores_are_no_measurement_for_prompts(free: list[int]) -> None:
    """Cores are counted for each prompt if some were missing, or if fewer threads were measured."""
    free.append(2)
    threads = Threads(4)
    threads.measure(MEASURED, 2.5 * MEASURED, 100.0)
    assert threads.known(100.0) == 2
    threads.used = 1
    threads.measure(MEASURED, MEASURED, 102.0)
    assert threads.known(102.0) == 2


def test_a_prompt_beside_others_begins_a_trial(free: list[int]) -> None:
    """Generated tokens need no measurement if their prompt has found another program."""
    machine = Machine(2, busy)
    assert machine.run([1] * 2) == [2, 2]
    free.append(1)
    assert machine.threads.known(machine.now) == 1
    whole = trial(2, 1)
    assert machine.run([1] * (len(whole) + 2)) == [2, *whole, 1]


def test_a_prompt_alone_begins_no_trial(free: list[int]) -> None:
    """A prompt that has found all cores free changes nothing for generated tokens."""
    machine = Machine(2, idle)
    assert machine.threads.known(machine.now) == 2
    assert machine.run([1] * 100) == [2] * 100


COUNT = f"""
import os, sys
from {module.__name__} import free_cores
count = int(sys.argv[1])
os.sched_setaffinity(0, range(count))
print("few" if len(os.sched_getaffinity(0)) < count else free_cores(count))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts threads that run")
def test_cores_are_counted_that_other_programs_use() -> None:
    """A single core is left where each core has a program that never waits."""
    script = "print(flush=True)\nwhile True: pass"
    count = os.cpu_count() or 1
    programs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        # This process may have threads that run, and only some of the cores.
        found = subprocess.check_output([sys.executable, "-c", COUNT, str(count)])
        if found == b"few\n":
            pytest.skip("not all cores are available")
        assert int(found) == 1
    finally:
        for program in programs:
            with program:
                program.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the time of cores")
def test_the_time_of_this_process_is_free() -> None:
    """The seconds of free cores have what this process uses, and at most the time of all cores."""
    cores = os.cpu_count() or 1
    if len(os.sched_getaffinity(0)) < cores:
        pytest.skip("not all cores are available")
    begun, before, used = time.perf_counter(), free_seconds(), time.process_time()
    while time.process_time() < used + 0.05:
        pass
    found, seconds = free_seconds() - before, time.perf_counter() - begun
    # Linux counts in steps of 10 ms.
    assert 0.05 <= found <= cores * (seconds + 0.02)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3", "cpu 1 2 3 many 5 6"])
def test_no_core_is_free_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    """Without Linux's times of cores, a result holds as long as ever."""
    monkeypatch.setattr(module, "STAT", tmp_path / "stat")
    if text is not None:
        module.STAT.write_text(text)
    assert free_seconds() == 0


@pytest.mark.parametrize("text", [None, "", "0.1 0.2", "0.1 0.2 0.3 many 12"])
def test_all_cores_are_free_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    """Without Linux's count of threads, no program is supposed to run."""
    monkeypatch.setattr(module, "LOAD", tmp_path / "loadavg")
    if text is not None:
        module.LOAD.write_text(text)
    assert free_cores(64) == 64


@pytest.mark.parametrize(
    ("own", "looks", "free"), [(0.0, LOOKS, -1), (0.8, LOOKS, -1), (0.95, 2, 0)]
)
def test_the_event_loop_is_no_other_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: float, looks: int, free: int
) -> None:
    """A thread of this process may use a core while cores are counted.

    Args:
        own: the share of a core that this process uses meanwhile.
        free: the free cores, less all cores.
    """
    now = 0.0
    found = []

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Load:
        def read_bytes(self) -> bytes:
            found.append(now)
            return b"0.1 0.2 0.3 2/99 12\n"

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    monkeypatch.setattr(module, "LOAD", Load())
    clocks = {"sleep": pause, "perf_counter": lambda: now, "process_time": lambda: now * own}
    monkeypatch.setattr(module, "time", SimpleNamespace(**clocks))
    assert free_cores(4) == 4 + free
    assert len(found) == looks
    # More threads than cores are the user's choice.
    assert free_cores(8) == (8 if own > 0.9 else 3)


@pytest.mark.parametrize("length", [3, 200, 600])
def test_an_exact_engine_has_the_same_logits_with_any_number_of_threads(length: int) -> None:
    """The number of threads changes no result of `exact`, also for long sequences."""
    options = Options(parallel=1, batch=64, threads=2, exact=True)
    context = Context(LoadedModel(DEMO_MODEL, options), options, 1024)
    found = []
    for threads in (2, 1):
        context.use_threads(threads)
        assert context.threads == threads
        context.remove(0)
        for start in range(0, length, 50):
            context.add(0, start, [5 + start % 7] * min(50, length - start), 1)
            context.decode()
        context.add(0, length, [9], 1)
        context.decode()
        found.append(context.logits(0, 1).tobytes())
    assert found[0] == found[1]
