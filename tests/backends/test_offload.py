"""Tests of work in threads and of cached results."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import pytest
from latimer.backends import offload
from latimer.backends.errors import Busy, TooComplex
from latimer.backends.offload import LARGE, SMALL, FairThreads, Memo


async def test_only_large_work_leaves_the_loop() -> None:
    """Work up to `SMALL` runs on the event loop and larger work in a thread, with the same result
    or error."""
    here = threading.get_ident()
    assert await offload.run(SMALL, threading.get_ident) == here
    assert await offload.run(SMALL + 1, threading.get_ident) != here
    for size in (0, SMALL + 1):
        assert await offload.run(size, divmod, 7, 4) == (1, 3)
        with pytest.raises(ZeroDivisionError):
            await offload.run(size, divmod, 7, 0)


def memo(most_bytes: int) -> Memo[str, str]:
    """Return a cache that counts a character of a result as one byte."""
    return Memo(most_bytes, lambda _key, value: len(value))


async def test_a_result_is_worked_out_once() -> None:
    """Concurrent and later callers share one computation of a result."""
    kept, begun, may_end = memo(100), [], threading.Event()

    def work() -> str:
        begun.append(threading.get_ident())
        may_end.wait(10)
        return "value"

    tasks = [asyncio.create_task(kept.get("key", work)) for _ in range(8)]
    await asyncio.sleep(0.01)
    # Cancelling one caller does not end the work that the others wait for.
    tasks[0].cancel()
    may_end.set()
    assert await asyncio.gather(*tasks[1:]) == ["value"] * 7
    assert await kept.get("key", work) == "value"
    assert len(begun) == 1
    assert begun[0] != threading.get_ident()


async def test_errors_are_raised_and_not_kept() -> None:
    """Every waiting caller gets the error, and the next caller tries again."""
    kept = memo(100)

    def fail() -> str:
        raise ValueError("no")

    found = await asyncio.gather(*(kept.get("key", fail) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [ValueError] * 3
    assert await kept.get("key", lambda: "now") == "now"


class Failed(Exception):
    """An error that can have a weak reference."""


@pytest.mark.parametrize("is_shared", [False, True])
async def test_an_error_of_work_is_freed(is_shared: bool) -> None:
    """An error of work is freed when it was handled, with the input that its traceback has."""
    freed = threading.Event()

    def fail() -> str:
        error = Failed()
        weakref.finalize(error, freed.set)
        try:
            raise error
        finally:
            # The frame would keep it, too.
            del error

    gc.disable()
    try:
        with suppress(Failed):
            await (memo(100).get("key", fail) if is_shared else offload.run(SMALL + 1, fail))
        # The thread frees its reference a moment later.
        assert await asyncio.to_thread(freed.wait, 5)
    finally:
        gc.enable()


async def test_results_are_kept_within_a_bound() -> None:
    """The cache evicts the least recently used result, and keeps none larger than its limit."""
    kept, made = memo(10), []

    async def get(key: str, size: int) -> None:
        def work() -> str:
            made.append(key)
            return "x" * size

        assert await kept.get(key, work) == "x" * size

    for key in ("a", "b", "a", "c", "a", "b"):
        await get(key, 4)
    assert made == ["a", "b", "c", "b"]
    await get("huge", 11)
    await get("huge", 11)
    assert made[4:] == ["huge", "huge"]


def forever() -> NoReturn:
    """Compute without end, as a template or a schema might."""
    count = 0
    while True:
        count += 1


def endless() -> tuple[threading.Event, Callable[[], str]]:
    """Return work without end, and the event that it has been ended."""
    ends = threading.Event()

    def work() -> str:
        try:
            forever()
        finally:
            ends.set()

    return ends, work


async def test_work_ends_when_its_asker_leaves() -> None:
    """A thread stops its work and takes other work when the caller is cancelled."""
    for size in (SMALL + 1, LARGE + 1):
        for _ in range(4):
            task = asyncio.create_task(offload.run(size, forever))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(5):
            assert await offload.run(size, divmod, 7, 4) == (1, 3)


async def test_work_that_has_not_begun_never_begins() -> None:
    """Queued work of a cancelled caller never starts."""
    begun: list[int] = []
    may_end = threading.Event()
    blocked = [asyncio.create_task(offload.run(LARGE + 1, may_end.wait, 10))]
    await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(offload.run(LARGE + 1, begun.append, n)) for n in range(3)]
    await asyncio.sleep(0.01)
    waiting[1].cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*blocked, waiting[0], waiting[2])
    assert begun == [0, 2]


async def test_small_work_never_waits_for_large_work() -> None:
    """Small work runs immediately, even while large work is queued."""
    tasks = [asyncio.create_task(offload.run(LARGE + 1, forever)) for _ in range(8)]
    await asyncio.sleep(0.02)
    async with asyncio.timeout(5):
        assert await offload.run(SMALL + 1, divmod, 7, 4) == (1, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_work_that_takes_too_long_is_refused() -> None:
    """Work that exceeds the time limit ends with `TooComplex`."""
    with pytest.raises(TooComplex):
        await offload.run(SMALL + 1, forever, seconds=0.05)
    with pytest.raises(TooComplex):
        await Memo[str, str](100, lambda _key, value: len(value), seconds=0.05).get("key", forever)
    async with asyncio.timeout(5):
        assert await offload.run(SMALL + 1, divmod, 7, 4) == (1, 3)


async def test_owners_take_turns() -> None:
    """Work of an owner waits for one piece of work of each other owner at most."""
    threads, may_go, done = FairThreads(1, "fair"), threading.Event(), list[str]()
    first = threads.submit(may_go.wait, 10)
    for owner in "aaaabbc":
        token = offload.OWNER.set(owner)
        threads.submit(done.append, owner)
        offload.OWNER.reset(token)
    may_go.set()
    await asyncio.to_thread(threads.shutdown)
    assert first.result()
    assert "".join(done) == "abcabaa"


async def test_an_owner_has_some_of_the_threads() -> None:
    """An owner at its limit waits for its own work only, and all work is done before the end."""
    threads, may_go, done = FairThreads(3, "limited", 2), threading.Event(), list[str]()
    both = threading.Barrier(3)

    def work(owner: str) -> None:
        if owner == "a" and not may_go.is_set():
            both.wait(10)
            may_go.wait(10)
        done.append(owner)

    for owner in "aaaaa":
        token = offload.OWNER.set(owner)
        threads.submit(work, owner)
        offload.OWNER.reset(token)
    await asyncio.to_thread(both.wait, 10)
    token = offload.OWNER.set("b")
    for _ in range(3):
        await asyncio.wait_for(asyncio.wrap_future(threads.submit(work, "b")), 10)
    offload.OWNER.reset(token)
    assert done == ["b"] * 3
    may_go.set()
    await asyncio.to_thread(threads.shutdown)
    assert done == ["b"] * 3 + ["a"] * 5


async def test_a_wait_for_others_is_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of work begins when a thread begins it; before, `Busy` ends a wait that is too
    long, and the work never begins."""
    threads, begun = FairThreads(1, "one"), list[str]()
    kept = Memo[str, None](100, lambda _key, _value: 1, threads, seconds=0.1)
    first = threads.submit(time.sleep, 0.3)
    await offload.run(SMALL + 1, begun.append, "run", threads=threads, seconds=0.1)
    second = threads.submit(time.sleep, 0.3)
    await kept.get("key", lambda: begun.append("memo"))
    monkeypatch.setattr(offload, "MOST_WAIT", 0.1)
    third = threads.submit(time.sleep, 0.3)
    with pytest.raises(Busy) as error:
        await offload.run(SMALL + 1, begun.append, "never", threads=threads)
    assert error.value.retry_after
    with pytest.raises(Busy):
        await kept.get("other", lambda: begun.append("never"))
    threads.shutdown()
    assert begun == ["run", "memo"]
    assert all(one.done() for one in (first, second, third))


async def test_shared_work_ends_with_the_last_who_waits() -> None:
    """Shared work runs while one caller waits for it, and ends when the last is cancelled."""
    kept = memo(100)
    ends, work = endless()

    tasks = [asyncio.create_task(kept.get("key", work)) for _ in range(3)]
    await asyncio.sleep(0.02)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.sleep(0.05)
    assert not ends.is_set()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await asyncio.to_thread(ends.wait, 5)
    assert await kept.get("key", lambda: "now") == "now"


async def test_new_callers_do_not_prolong_shared_work() -> None:
    """The limit of shared work counts from its beginning, also for callers that come later."""
    kept = Memo[str, str](100, lambda _key, value: len(value), seconds=0.2)
    began, (ends, work) = time.monotonic(), endless()

    tasks = []
    while not ends.is_set() and time.monotonic() < began + 3:
        tasks.append(asyncio.create_task(kept.get("key", work)))
        await asyncio.sleep(0.05)
    has_ended = ends.is_set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert has_ended
    assert {type(one) for one in found} == {TooComplex}


async def test_work_that_begins_late_has_the_same_limit() -> None:
    """Work that waited for a thread at first ends soon after its limit."""
    threads = FairThreads(1, "one")
    threads.submit(time.sleep, 0.2)
    began = time.monotonic()
    with pytest.raises(TooComplex):
        await offload.run(SMALL + 1, forever, threads=threads, seconds=0.1)
    assert time.monotonic() - began < 3
    threads.shutdown()


async def test_an_end_that_comes_with_the_result_harms_nobody() -> None:
    """Cancelling a caller at any moment never interrupts the thread's next work."""
    for turn in range(300):
        task = asyncio.create_task(offload.run(SMALL + 1, sum, range(turn * 10)))
        await asyncio.sleep(turn % 7 / 20_000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await offload.run(SMALL + 1, divmod, 7, 4) == (1, 3)


async def test_a_late_end_harms_nobody() -> None:
    """An end that comes right after a thread began work ends this work only."""
    began, threads = threading.Event(), FairThreads(1, "late")

    class Slow(offload._Work[None]):
        """Work whose thread is interrupted as it begins."""

        def check(self) -> None:
            super().check()
            began.set()
            time.sleep(0.1)

    work = Slow(forever)
    first = threads.submit(work)
    assert await asyncio.to_thread(began.wait, 5)
    work.leave()
    second = threads.submit(time.sleep, 4 * offload.AGAIN)
    await asyncio.wait_for(asyncio.wrap_future(second), 5)
    assert isinstance(first.exception(), offload.Abandoned)
    threads.shutdown()


@pytest.mark.parametrize("place", ["end", "shield"])
async def test_an_end_that_is_set_slowly_blocks_nobody(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that ends, or begins a shield, while its end is set, leaves no lock and no exception."""
    began, left, passed = threading.Event(), threading.Event(), list[str]()
    set_exception: Callable[[int, Any], int] = offload._set_exception

    def slowly(thread: int, exception: Any) -> int:
        if exception is offload.Abandoned:
            left.set()
            time.sleep(0.05)
            set_exception(thread, exception)
            time.sleep(0.05)
            return 1
        return set_exception(thread, exception)

    def work() -> None:
        began.set()
        left.wait(5)
        if place == "shield":
            with offload.shielded():
                passed.append("shield")

    monkeypatch.setattr(offload, "_set_exception", slowly)
    threads, tried = FairThreads(1, "slow"), offload._Work(work)
    first = threads.submit(tried)
    assert await asyncio.to_thread(began.wait, 5)
    await asyncio.to_thread(_leave, tried)
    assert isinstance(await asyncio.to_thread(first.exception, 5), offload.Abandoned)
    assert not passed
    second = threads.submit(time.sleep, 0.01)
    await asyncio.wait_for(asyncio.wrap_future(second), 5)
    # The next attempt finds no lock that is taken.
    await asyncio.wait_for(asyncio.to_thread(_leave, tried), 5)
    threads.shutdown()


def _leave(work: offload._Work[None]) -> None:
    async def leave() -> None:
        work.leave()

    asyncio.run(leave())


async def test_a_shield_delays_the_end_of_work() -> None:
    """Work with a shield ends where it checks for it, or after the shield."""
    for checks in (True, False):
        begun, left, passed = threading.Event(), threading.Event(), list[str]()

        def work(
            checks: bool = checks,
            begun: threading.Event = begun,
            left: threading.Event = left,
            passed: list[str] = passed,
        ) -> None:
            try:
                with offload.shielded() as check:
                    begun.set()
                    left.wait(5)
                    time.sleep(2 * offload.AGAIN)
                    passed.append("wait")
                    if checks:
                        check()
                    passed.append("check")
                forever()
            finally:
                passed.append("end")

        task = asyncio.create_task(offload.run(SMALL + 1, work))
        assert await asyncio.to_thread(begun.wait, 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left.set()
        async with asyncio.timeout(5):
            while "end" not in passed:
                await asyncio.sleep(0.01)
        assert passed == (["wait", "end"] if checks else ["wait", "check", "end"])


def test_a_shield_without_work() -> None:
    """In a thread that nobody can leave, a shield does nothing."""
    with offload.shielded() as check:
        check()


@pytest.fixture
async def usual() -> AsyncIterator[float]:
    """Set Python's own switch interval: the exporters of spans, in another test, shorten it."""
    # Imports for another test may still run.
    async with asyncio.timeout(30):
        while offload._importing._threads:
            await asyncio.sleep(0.05)
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


async def test_imports_leave_short_turns_to_the_event_loop(usual: float) -> None:
    """While threads import modules, the loop gets its turn ten times as soon, and only then."""
    begun, end = threading.Barrier(3), threading.Event()

    def load(*_: str) -> float:
        begun.wait(10)
        end.wait(10)
        return sys.getswitchinterval()

    first, second = (asyncio.create_task(offload.importing(load, "x")) for _ in range(2))
    await asyncio.to_thread(begun.wait, 10)
    end.set()
    for found in await asyncio.gather(first, second):
        assert found == pytest.approx(usual / 10)
    assert sys.getswitchinterval() == pytest.approx(usual)
    with pytest.raises(ModuleNotFoundError):
        await offload.importing(import_module, "no_such_module")
    assert sys.getswitchinterval() == pytest.approx(usual)


class Work:
    """Turns of the event loop, and a clock by which a turn with work takes a millisecond.

    Attributes:
        turn: the number of turns so far.
        is_over: True to count no further turns.
    """

    def __init__(self, turns: int) -> None:
        self.turn = 0
        self.is_over = False
        self._left = turns
        self._now = 0.0

    def clock(self) -> float:
        """Return the time in seconds."""
        return self._now

    def run(self) -> None:
        """Work in this turn and, if there is some left, in the next ones, which are counted."""
        self.turn += 1
        if self._left:
            self._left -= 1
            self._now += 0.001
        if not self.is_over:
            asyncio.get_running_loop().call_soon(self.run)


@pytest.fixture
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """As many turns of work as the parameter says."""
    found = Work(request.param)
    monkeypatch.setattr(offload, "perf_counter", found.clock)
    yield found
    # All tests have the same event loop, which would turn without end.
    found.is_over = True


@pytest.mark.parametrize(
    ("work", "turns"), [(5, 7), (100, offload.MOST_TURNS + 4)], indirect=["work"]
)
async def test_requests_wait_for_others(work: Work, turns: int) -> None:
    """Requests that begin to wait in different turns go on in the same one, when the loop has
    nothing else to do or after the largest number of turns."""
    ends: list[int] = []

    async def wait() -> None:
        await offload.wait_for_others()
        ends.append(work.turn)

    work.run()
    tasks = []
    for _ in range(4):
        tasks.append(asyncio.create_task(wait()))
        await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ends == [turns] * 3
