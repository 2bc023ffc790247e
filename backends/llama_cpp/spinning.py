"""The time for which threads spin when they wait for each other.

libgomp's threads spin for some milliseconds before they sleep. Nothing is faster if each has a
core. With other programs, a thread spins on the core that the one it waits for could have. Most
batches then get fewer threads (`threads.py`). A lone sequence whose numbers must not change keeps
all, so its threads sleep soon instead (docs/measurements.md#threads-on-a-busy-machine).

libgomp has two counts: 300,000 turns, and 100 while it has more threads than there are cores. It
has no function that chooses one, but a team of threads that sleep is enough for the second.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass, field

import llama_cpp

from .options import default_threads
from .threads import MEASURED

# The cores that are missing if threads are to sleep soon. If another program needs half a core,
# it is faster to spin.
MISSING = 0.5
# The seconds until threads spin again to see if cores are still missing: from, and at most.
LEAST_HOLD, MOST_HOLD = 4.0, 30.0
# The largest team, and the threads that the system must allow besides, because libgomp ends the
# process if it cannot make one.
MOST_THREADS, SPARE = 16, 8
# The seconds until a thread that has ended is gone.
GONE = 0.1


@dataclass(slots=True)
class Spinning:
    """A choice between long and short spinning, by the times of batches of one token each.

    Args:
        most: the number of threads of these batches.

    Attributes:
        is_short: True if threads sleep soon.
    """

    most: int
    is_short: bool = False
    # What was measured since the last choice: batches, their seconds, and those on all cores.
    _batches: int = 0
    _seconds: float = 0.0
    _on_cores: float = 0.0
    # The seconds of a batch just before the threads slept; 0 if that was compared.
    _before: float = 0.0
    # The time until which a choice holds, and the seconds for which the next one will.
    _until: float = 0.0
    _hold: float = LEAST_HOLD
    _crowd: Crowd | None = field(init=False)

    def __post_init__(self) -> None:
        self._crowd = Crowd.of_libgomp(self.most)

    def add(self, seconds: float, on_cores: float, now: float) -> None:
        """Count a batch of one token that all threads have decoded.

        Args:
            on_cores: the seconds that the process has had on all cores meanwhile.
            now: the time at its end, in seconds.
        """
        self._batches += 1
        self._seconds += seconds
        self._on_cores += on_cores
        if self._seconds < MEASURED:
            return
        each, cores = self._seconds / self._batches, self._on_cores / self._seconds
        self._forget()
        if self.is_short:
            # Later batches may have more tokens before them.
            if each > self._before > 0:
                self.end()
            self._before = 0.0
        elif self.most - cores < MISSING:
            self._hold = LEAST_HOLD
        elif now >= self._until and self._crowd is not None:
            self.is_short, self._before = self._crowd.gather(), each
            self._until, self._hold = now + self._hold, min(2 * self._hold, MOST_HOLD)

    def doubt(self, now: float) -> None:
        """Let threads spin for long again if short spinning was chosen long ago."""
        if now >= self._until:
            self.end()

    def end(self) -> None:
        """Let threads spin for long again."""
        if self.is_short and self._crowd is not None:
            self._crowd.leave()
            self._forget()
        self.is_short = False

    def _forget(self) -> None:
        self._batches, self._seconds, self._on_cores = 0, 0.0, 0.0


class Crowd:
    """A team of libgomp's threads that only sleep; with it there are more threads than cores.

    A team belongs to the thread that has made it, and ends with it.

    Args:
        library: what finds the functions of libgomp.
        size: the number of threads in the team.

    Raises:
        AttributeError: there is no libgomp.
    """

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self._size = size
        self._make = library.GOMP_parallel
        self._make.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        self._make.restype = None
        # Each thread has to call a function once; this one does nothing.
        self._task = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
        self._made, self._left = threading.Event(), threading.Event()
        self._maker: threading.Thread | None = None

    @classmethod
    def of_libgomp(cls, threads: int) -> Crowd | None:
        """Return a team of the libgomp that llama.cpp has loaded.

        Args:
            threads: the number of threads that decode.

        Returns:
            None if llama.cpp uses another library, or if the team would be large.
        """
        size = max(default_threads() - threads, 0) + 2
        try:
            return cls(llama_cpp.llama_cpp._lib, size) if size <= MOST_THREADS else None
        except AttributeError:
            return None

    def gather(self) -> bool:
        """Make the threads, which takes up to 50 ms; return True if there may be so many."""
        if not _may_have(self._size + SPARE):
            return False
        self._made.clear()
        self._left.clear()
        self._maker = threading.Thread(target=self._wait, name="latimer-crowd", daemon=True)
        self._maker.start()
        self._made.wait()
        return True

    def leave(self) -> None:
        """End the threads."""
        if self._maker is not None:
            self._left.set()
            self._maker.join()
            self._maker = None

    def _wait(self) -> None:
        self._make(self._task, None, self._size, 0)
        self._made.set()
        self._left.wait()


def _may_have(count: int) -> bool:
    """Return True if the system lets this process have some more threads now."""
    end, made = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, name="latimer-crowd", daemon=True)
            thread.start()
            made.append(thread)
    except RuntimeError:
        pass
    end.set()
    for thread in made:
        thread.join()
    # The system counts a thread for a moment longer than Python.
    latest = time.monotonic() + GONE
    while any(os.path.exists(f"/proc/self/task/{thread.native_id}") for thread in made):
        if time.monotonic() > latest:
            return False
        time.sleep(0.0005)
    return len(made) == count
