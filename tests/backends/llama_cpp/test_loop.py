"""Tests of the loop of the engine's thread, with workers that count their steps."""

from __future__ import annotations

import time

import pytest
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp.loop import CREDIT, Loop


class Counter:
    """A worker whose tasks are numbers of steps; each step takes some seconds."""

    def __init__(self, name: str, seconds: float, log: list[str]) -> None:
        self.left = 0
        self.seconds = 0.0
        self.errors: list[EngineError] = []
        self.loop: Loop | None = None
        self._name, self._seconds, self._log = name, seconds, log

    @property
    def is_busy(self) -> bool:
        """True while steps are left."""
        return self.left > 0

    def submit(self, task: int) -> None:
        """Add steps."""
        self.left += task

    def step(self) -> None:
        """Take time, and stop the loop after the last step."""
        time.sleep(self._seconds)
        self._log.append(self._name)
        self.left -= 1
        if not self.left and self.loop is not None:
            self.loop.stop()

    def abandon(self, error: EngineError) -> None:
        """Keep the error."""
        self.errors.append(error)
        self.left = 0


def test_workers_share_the_time() -> None:
    """A worker with short steps makes many of them for each long step of the other."""
    log: list[str] = []
    short, long = Counter("s", 0.002, log), Counter("l", 0.02, log)
    loop = Loop([short, long])
    short.loop = loop
    loop.submit(short, 60)
    loop.submit(long, 1_000)
    loop.run()
    assert 4 <= log.count("l") <= 9
    assert "l" * 3 not in "".join(log)


def test_an_idle_worker_saves_no_time() -> None:
    """A worker that was idle is next, but gets no more than its share afterwards."""
    log: list[str] = []

    class Busy(Counter):
        """A worker during whose twentieth step the other one gets work."""

        def step(self) -> None:
            """See `Counter.step`."""
            super().step()
            if log.count("busy") == 20:
                loop.submit(late, 40)

    late, busy = Counter("late", 0.002, log), Busy("busy", 0.002, log)
    loop = Loop([late, busy])
    late.loop = loop
    loop.submit(busy, 1_000)
    loop.run()
    assert log[:21] == ["busy"] * 20 + ["late"]
    assert log.count("busy") >= 20 + 20 - CREDIT / 0.002


def test_an_error_ends_the_worker_that_has_it() -> None:
    """An exception of a step ends the tasks of its worker only."""
    log: list[str] = []

    class Broken(Counter):
        def step(self) -> None:
            raise ValueError("broken")

    broken, sound = Broken("x", 0, log), Counter("s", 0.001, log)
    loop = Loop([broken, sound])
    sound.loop = loop
    loop.submit(broken, 3)
    loop.submit(sound, 3)
    loop.run()
    assert "broken" in broken.errors[0].message
    assert log == ["s"] * 3


def test_a_loop_that_has_ended_takes_no_task() -> None:
    """A task gets an error if it arrives with the end of the loop, or is refused after it."""
    worker = Counter("x", 0.0, [])
    loop = Loop([worker])
    loop.stop()
    loop.submit(worker, 3)
    loop.run()
    assert worker.errors[0].message == "The engine was shut down."
    with pytest.raises(EngineError, match="The engine was shut down"):
        loop.submit(worker, 1)
