"""The number of threads that decode: fewer while other programs need the cores.

llama.cpp's threads wait for each other after each operation, hundreds of times in a step. If
another program has the core of one thread, all others wait until it continues. One thread less is
then faster, since it leaves that core to the other program. The time on cores that the process gets
shows that some are missing, and a trial shows which number of threads is faster.

Two prompts are seldom alike, so they cannot be compared. They have the number that was found for
generated tokens. Where nothing was found lately, the threads of all programs that run are counted.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

# The seconds of decoding in which the time on cores is measured. Linux counts the time of a thread
# that runs at ticks, so that a single step shows too little.
MEASURED = 0.25
# The cores that are missing if a trial is worth its time: these, and this share of the threads.
MISSING, MISSING_SHARE = 0.33, 0.1
# The cores that are missing since the last trial if its result is in doubt.
WORSE = 0.2
# The steps of each number of threads in a trial, and the share of the time that is a gain.
TRIALS, GAIN = 3, 0.97
# A trial ends after two pairs if one way takes so many times as long as the other.
CLEAR, LEAST_PAIRS = 2.0, 2
# The batches after which a trial ends without a result, because too few had the same size.
MOST_BATCHES = 8 * TRIALS
# The seconds until the next trial: this many times what the last one has lost, between two bounds.
# After each trial that has only shown that all threads are faster, twice as many.
HOLD, LEAST_HOLD, MOST_HOLD = 100.0, 1.0, 60.0
# The seconds between the batches of a pair, after which the first one is too old.
STALE = 0.1
# The seconds for which a measurement without missing cores, or a count of free cores, holds.
SURE = 1.0
# The looks at the threads that run, and the seconds between two. A program that needs half a core
# sleeps at one of them, as does a client on this machine that has sent a request.
LOOKS, PAUSE = 10, 0.001
# The seconds after which no other look begins: each one waits for Python's lock several times.
MOST_LOOKING = 0.012
# Linux's file with the number of threads that run or wait for a core.
LOAD = Path("/proc/loadavg")


@dataclass(slots=True)
class Threads:
    """The threads for batches of generated tokens, whose times can be compared.

    Args:
        most: the largest number of threads, which an idle machine gets.

    Attributes:
        used: the number that was found to be the fastest.
        next: the number for the next such batch, which differs from `used` in a trial.
        is_trying: True in a trial, whose times belong to different numbers of threads.
    """

    most: int
    used: int = field(init=False)
    next: int = field(init=False)
    is_trying: bool = False
    # The seconds of decoding since the last measurement, and those on all cores.
    _seconds: float = 0.0
    _on_cores: float = 0.0
    # The number that a trial compares with `used`, and the number of trials so far.
    _other: int = 0
    _trials: int = 0
    # The time from which on the last result is in doubt.
    _until: float = 0.0
    # The cores before the last trial, and the factor of the time until the next one.
    _cores: float = 0.0
    _factor: float = 1.0
    # The number of a measurement or of a count, and the time from which on it is in doubt.
    _known: int = 0
    _sure: float = 0.0
    # The cores that were free when they were last counted; 0 if a trial has begun since.
    _free: int = 0
    # The tokens, the seconds and the end of the last batch with `used`; the pairs of seconds.
    _first: tuple[int, float, float] = (0, 0.0, 0.0)
    _pairs: list[tuple[float, float]] = field(default_factory=list)
    # The batches of the trial, and the seconds by which those of its pairs differ.
    _count: int = 0
    _lost: float = 0.0

    def __post_init__(self) -> None:
        self.used = self.next = self._known = self.most

    def known(self, now: float) -> int:
        """Return the number for batches that are not compared.

        It is the last result of a trial or of a measurement. After its time, threads leave the
        cores to other programs that run, and the next batches that can be compared begin a trial.
        """
        if now < self._until:
            return self.used
        if now >= self._sure and self.most > 1:
            self._known = self._free = free_cores(self.most)
            self._sure = now + SURE
        return self._known

    def add(self, tokens: int, seconds: float, on_cores: float, now: float) -> None:
        """Count a batch that was decoded by `next` threads.

        Args:
            on_cores: the seconds that the process has had on all cores meanwhile.
            now: the time at its end, in seconds.
        """
        if self.is_trying:
            self._compare(tokens, seconds, now)
            return
        cores, free = self.measure(seconds, on_cores, now), self._free
        if cores is not None and self.used == self.most:
            self._compare_cores(cores, now)
        if now >= self._until and (cores is not None or free):
            self._begin(float(free) if cores is None else cores)

    def measure(self, seconds: float, on_cores: float, now: float) -> float | None:
        """Count a batch of any kind that `used` threads have decoded; see `add`.

        Returns:
            the cores that they got, if enough batches were counted.
        """
        self._seconds += seconds
        self._on_cores += on_cores
        if self._seconds < MEASURED:
            return None
        cores = self._on_cores / self._seconds
        self._seconds = self._on_cores = 0.0
        if self.used == self.most and not self._are_missing(cores):
            self._known, self._sure = self.most, now + SURE
        return cores

    def _compare_cores(self, cores: float, now: float) -> None:
        """End the time of a result if more cores are missing than before, or none any more."""
        is_worse = cores < self._cores - WORSE
        if is_worse:
            self._until = now
        if is_worse or not self._are_missing(cores):
            self._factor = 1.0

    def _are_missing(self, cores: float) -> bool:
        return self.used - cores >= max(MISSING, MISSING_SHARE * self.used)

    def _begin(self, cores: float) -> None:
        """Begin a trial if one may help; several possible numbers take turns."""
        used, most, others = self.used, self.most, list[int]()
        self._free, self._cores = 0, cores
        if used > 1 and self._are_missing(cores):
            others.append(max(int(cores), 1))
        if used < most:
            others += {most: None, used + 1: None}
        if others:
            self._other = others[self._trials % len(others)]
            self._trials += 1
            self.is_trying = True

    def _compare(self, tokens: int, seconds: float, now: float) -> None:
        """Let both numbers of threads take turns, and compare batches of the same size."""
        self._count += 1
        if self.next == self.used:
            self._first, self.next = (tokens, seconds, now), self._other
            return
        size, before, ended = self._first
        self.next = self.used
        if now - seconds - ended < STALE:
            self._lost += abs(seconds - before)
            if size == tokens or _is_clear(seconds / before, tokens / size):
                self._pairs.append((before, seconds))
                own, others = zip(*self._pairs, strict=True)
                ratio = statistics.median(others) / statistics.median(own)
                is_clear = len(own) >= LEAST_PAIRS and not 1 / CLEAR < ratio < CLEAR
                if len(own) == TRIALS or is_clear:
                    factor = self._factor
                    if ratio < GAIN:
                        self.used = self.next = self._other
                        self._factor = 1.0
                    elif self.used == self.most:
                        self._factor *= 2
                    self._end(now, factor)
                    return
        if self._count >= MOST_BATCHES:
            self._end(now)

    def _end(self, now: float, factor: float = 1.0) -> None:
        """End a trial, and set the time until the next one."""
        self._until = now + min(factor * max(LEAST_HOLD, HOLD * self._lost), MOST_HOLD)
        self.is_trying, self._count, self._lost = False, 0, 0.0
        self._pairs.clear()


def free_cores(wanted: int) -> int:
    """Return for how many threads there is a core that no other program uses: 1 to `wanted`.

    Linux counts the threads that run or wait for a core, also those of low priority. Elsewhere, and
    where this process may not use all cores, all are free.

    Args:
        wanted: the number of threads; if it exceeds the cores, all cores are enough.
    """
    cores = os.cpu_count() or 1
    enough = min(wanted, cores)
    try:
        if len(os.sched_getaffinity(0)) < cores:
            return wanted
        free, own = 1, 0
        latest = time.perf_counter() + MOST_LOOKING
        for look in range(LOOKS):
            if look:
                # The event loop runs on after it has handed over a request.
                begun, used = time.perf_counter(), time.process_time()
                time.sleep(PAUSE)
                share = (time.process_time() - used) / (time.perf_counter() - begun)
                # One that has ended meanwhile does not count, because it does not run now.
                own = int(share + 0.1)
            running = int(LOAD.read_bytes().split()[3].partition(b"/")[0])
            # The thread that looks is one of them.
            free = max(free, cores - (running - 1 - own))
            if free >= enough:
                return wanted
            if time.perf_counter() > latest:
                break
    except (AttributeError, OSError, ValueError, IndexError):
        return wanted
    return free


def _is_clear(seconds: float, tokens: float) -> bool:
    """Return True if two batches of different sizes show which number of threads is faster.

    A batch takes between as long as another one, and as many times as long as it has tokens.

    Args:
        seconds: the quotient of their seconds; `tokens` that of their tokens.
    """
    least, most = sorted((1.0, tokens))
    return not least / CLEAR < seconds < most * CLEAR
