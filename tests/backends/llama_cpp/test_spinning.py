"""Tests of the spinning of threads that must stay while other programs need the cores."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from ctypes import CDLL

import llama_cpp
import pytest
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_cpp import spinning as module
from latimer.backends.llama_cpp.spinning import (
    LEAST_HOLD,
    MOST_HOLD,
    Crowd,
    Spinning,
)
from latimer.backends.llama_cpp.threads import MEASURED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libgomp is used on Linux")


class Machine:
    """A machine whose batches of one token take the seconds of `decode`.

    Args:
        decode: returns the seconds of a batch, and the cores that two threads get; its argument is
            True if threads sleep soon.
    """

    def __init__(self, decode: Callable[[bool], tuple[float, float]]) -> None:
        self.spinning = Spinning(2)
        self.decode = decode
        self.now = 0.0

    def run(self, seconds: float) -> list[bool]:
        """Decode for some seconds, and return for each batch if threads slept soon."""
        found, end = [], self.now + seconds
        while self.now < end:
            self.spinning.doubt(self.now)
            found.append(self.spinning.is_short)
            took, cores = self.decode(self.spinning.is_short)
            self.now += took
            self.spinning.add(took, took * cores, self.now)
        return found


@pytest.fixture(autouse=True)
def long_again() -> object:
    """Expect that each test has ended the threads that it has made."""
    yield
    assert not [one for one in threading.enumerate() if one.name == "latimer-crowd"]


def idle(short: bool) -> tuple[float, float]:
    """Each thread has a core, so that sleeping only costs time."""
    return (0.012, 1.6) if short else (0.01, 1.98)


def half_busy(short: bool) -> tuple[float, float]:
    """Another program needs half a core, and sleeping costs more than it brings."""
    return (0.018, 1.0) if short else (0.015, 1.6)


def busy(short: bool) -> tuple[float, float]:
    """Another program keeps one of two cores, so that threads spin in vain."""
    return (0.02, 0.95) if short else (0.04, 1.25)


@pytest.mark.parametrize("decode", [idle, half_busy])
def test_threads_spin_where_they_have_most_of_their_cores(
    decode: Callable[[bool], tuple[float, float]],
) -> None:
    """Nothing changes on an idle machine, nor with a program that needs half a core."""
    assert not any(Machine(decode).run(30))


def test_threads_sleep_soon_where_cores_are_missing() -> None:
    """After a quarter of a second without a core, threads sleep soon for some seconds."""
    machine = Machine(busy)
    found = machine.run(LEAST_HOLD)
    machine.spinning.end()
    missed = found.index(True)
    assert missed * 0.04 == pytest.approx(MEASURED, abs=0.04)
    assert all(found[missed:])


def test_threads_spin_again_after_the_other_program_has_ended() -> None:
    """A choice ends after its time, and an idle machine then has no other one."""
    machine = Machine(busy)
    machine.run(1)
    machine.decode = idle
    assert all(machine.run(LEAST_HOLD - 1))
    assert not any(machine.run(30)[50:])


def test_a_choice_that_was_right_holds_longer() -> None:
    """If another program stays, threads spin for a quarter of a second once in half a minute."""
    machine = Machine(busy)
    found = machine.run(3 * MOST_HOLD)
    later = machine.run(10 * MOST_HOLD)
    machine.spinning.end()
    assert found.count(False) * 0.04 < 6 * (MEASURED + 0.04)
    assert later.count(False) * 0.04 < 11 * (MEASURED + 0.04)


def test_a_choice_that_was_wrong_ends() -> None:
    """If sleeping is slower although cores are missing, threads spin again, ever longer."""
    machine = Machine(lambda short: (0.05, 1.0) if short else (0.04, 1.25))
    found = machine.run(10 * MOST_HOLD)
    machine.spinning.end()
    assert 0 < found.count(True) * 0.05 < 15 * (MEASURED + 0.05)


def test_longer_sequences_end_no_choice() -> None:
    """Only the first tokens after a choice are compared, because later ones may take longer."""
    machine = Machine(busy)
    machine.run(1)
    assert machine.spinning.is_short
    machine.decode = lambda short: (0.2, 0.9)
    assert all(machine.run(LEAST_HOLD - 1.5))
    machine.spinning.end()


def test_a_system_without_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of threads libgomp is not asked for any, because it would end the process."""
    monkeypatch.setattr(threading.Thread, "start", refused)
    machine = Machine(busy)
    assert not any(machine.run(30))


def refused(_thread: threading.Thread) -> None:
    """Fail as Python does at the limit of threads."""
    raise RuntimeError("can't start new thread")


def test_a_large_team_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads among many cores get no team of all others."""
    assert Crowd.of_libgomp(2) is not None
    monkeypatch.setattr(module, "default_threads", lambda: 64)
    assert Crowd.of_libgomp(2) is None
    assert Crowd.of_libgomp(60) is not None


def test_without_libgomp_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A llama.cpp whose threads are not libgomp's always spins as it does."""
    monkeypatch.setattr(llama_cpp.llama_cpp, "_lib", CDLL(None))
    machine = Machine(busy)
    assert Crowd.of_libgomp(2) is None
    assert not any(machine.run(30))


# Counts how often threads go to sleep for each token, with each kind of spinning.
SLEEPS = f"""
import os, resource, sys
# libgomp counts the cores when it is loaded.
os.sched_setaffinity(0, range(os.cpu_count()))
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.spinning import Crowd
if len(os.sched_getaffinity(0)) < 2:
    sys.exit(print("few"))
options = Options(threads=2)
model = LoadedModel({str(DEMO_MODEL)!r}, options)
context = Context(model, options, 512)
crowd = Crowd.of_libgomp(2)

def sleeps(first):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for position in range(first, first + 10):
        context.add(0, position, [5], 1)
        context.decode()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / 10

sleeps(0)
found = [sleeps(10)]
crowd.gather()
found.append(sleeps(20))
crowd.leave()
# The team of a thread ends a moment later than the thread.
sleeps(30)
found.append(sleeps(40))
print(*found)
"""


def test_threads_of_llama_cpp_sleep_soon() -> None:
    """In a real decode, threads sleep many times for each token, and spin again afterwards."""
    found = subprocess.check_output([sys.executable, "-c", SLEEPS], text=True).split()
    if found == ["few"]:
        pytest.skip("not all cores are available")
    before, short, after = map(float, found)
    assert short > 5 * max(before, after, 1)
