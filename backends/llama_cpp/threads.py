"""The number of threads that decode: fewer while other programs need the cores.

llama.cpp's threads wait for each other after each operation, hundreds of times in a step. If
another program has the core of one thread, all others wait until it continues. One thread less is
then faster, since it leaves that core to the other program. The time on cores that the process gets
shows that some are missing, and a trial shows which number of threads is faster.

Two prompts are seldom alike, so they cannot be compared. They have the number that was found for
generated tokens. Where nothing was found lately, the threads of all programs that run are counted.
"""

from __future__ import annotations

import math
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
# The cores that have come or gone since the last trial if other programs have changed. If they have
# gone, its result is in doubt.
CHANGED = 0.2
# The batches of each number of threads in a trial: of its first two blocks, and of later ones.
LEAST, BLOCK = 2, 6
# A trial ends after the first two if each batch of one takes so many times as long as the other's.
CLEAR = 2.0
# Fewer threads are used if they take at most this share of the time of more.
GAIN = 0.9
# The batches after which a trial ends without a result, because too few had the same size.
MOST_BATCHES = 2 * LEAST + 4 * (BLOCK + 1)
# The seconds until the next trial: this many times what the last one has lost, between two bounds.
# After each trial that leaves all threads in use, twice as many.
HOLD, LEAST_HOLD, MOST_HOLD = 100.0, 1.0, 60.0
# The seconds between two batches of a trial, after which the first one is too old.
STALE = 0.1
# The seconds for which a measurement without missing cores, or a count of free cores, holds.
SURE = 1.0
# The looks at the threads that run, and the seconds between two. A program that needs half a core
# sleeps at one of them, as does a client on this machine that has sent a request.
LOOKS, PAUSE = 10, 0.001
# The seconds after which no other look begins: each one waits for Python's lock several times.
MOST_LOOKING = 0.012
# Linux's files with the number of threads that run or wait for a core, and with the time for which
# cores were idle.
LOAD, STAT = Path("/proc/loadavg"), Path("/proc/stat")


class Trial:
    """A comparison of two numbers of threads, which decode blocks of batches in turns.

    The first two blocks are short, and only show if one number is many times as fast. The first
    batch of a later block does not count: threads that have slept find another program on their
    cores, and Linux needs some milliseconds to move it.

    Args:
        used: the number so far, which comes first.
        other: the number that is tried.

    Attributes:
        next: the number for the next batch.
        count: the number of batches.
        lost: the seconds by which batches of the other number differ from those of the first.
    """

    def __init__(self, used: int, other: int) -> None:
        self.used = self.next = used
        self.other = other
        self.count, self.lost = 0, 0.0
        # The tokens and the seconds of the batches that count.
        self._times: dict[int, list[tuple[int, float]]] = {used: [], other: []}
        # What is left of the block, and the end of the last batch.
        self._left, self._is_short, self._ended = LEAST, True, 0.0

    def add(self, tokens: int, seconds: float, now: float) -> int | None:
        """Count a batch; return the faster number if it is known now."""
        self.count += 1
        if self._ended and now - seconds - self._ended > STALE:
            # Other programs may have come and gone.
            self._clear()
        self._ended = now
        if self._left <= BLOCK:
            self._times[self.next].append((tokens, seconds))
        self._left -= 1
        if self._left:
            return None
        result, is_second = None, self.next == self.other
        self.next = self.used if is_second else self.other
        if is_second:
            result = self._clearly_faster() if self._is_short else self._faster()
            if self._is_short:
                self._clear()
                self._is_short = False
        self._left = LEAST if self._is_short else BLOCK + 1
        return result

    def _clear(self) -> None:
        for times in self._times.values():
            times.clear()

    def _clearly_faster(self) -> int | None:
        """Return the number that is many times as fast in each comparison; None if none is.

        A batch takes between as long as another one, and as many times as long as it has tokens.
        """
        found = set[int | None]()
        for tokens, seconds in self._times[self.used]:
            for others, took in self._times[self.other]:
                least, most = sorted((1.0, others / tokens))
                self.lost += abs(took - seconds) / LEAST
                is_slow, is_fast = took > CLEAR * most * seconds, CLEAR * took < least * seconds
                found.add(self.used if is_slow else self.other if is_fast else None)
        return found.pop() if len(found) == 1 else None

    def _faster(self) -> int | None:
        """Return the faster number by the means of batches of the same size; None if few are."""
        own = dict[int, list[float]]()
        for tokens, seconds in self._times[self.used]:
            own.setdefault(tokens, []).append(seconds)
        pairs = [
            (statistics.fmean(own[tokens]), seconds)
            for tokens, seconds in self._times[self.other]
            if tokens in own
        ]
        self.lost += sum(abs(one - other) for one, other in pairs)
        if len(pairs) < BLOCK / 2:
            return None
        ratio = sum(other for _, other in pairs) / sum(one for one, _ in pairs)
        fewer, more = sorted((self.used, self.other))
        of_fewer = ratio if self.other == fewer else 1 / ratio
        return fewer if of_fewer < GAIN else more


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
    # The trial that runs, and the number of trials so far.
    _trial: Trial | None = None
    _trials: int = 0
    # The time from which on the last result is in doubt.
    _until: float = 0.0
    # The cores measured before the last trial or first after it, and the factor of the time until
    # the next one.
    _cores: float = 0.0
    _factor: float = 1.0
    # The number of a measurement or of a count, and the time from which on it is in doubt.
    _known: int = 0
    _sure: float = 0.0
    # The cores that were free when they were last counted; 0 if a trial has begun since.
    _free: int = 0
    # While fewer threads are used: when `free_seconds` was read last, what it was, and True if one
    # thread more had a core then.
    _read: tuple[float, float] = (-math.inf, 0.0)
    _have_cores: bool = False

    def __post_init__(self) -> None:
        self.used = self.next = self._known = self.most

    def known(self, now: float) -> int:
        """Return the number for batches that are not compared.

        While a result holds by which all threads are faster, that is all. Otherwise threads leave
        the cores to other programs that run. Without a result, the next batches that can be
        compared then begin a trial. With one, a program may still sleep often enough for a prompt.
        """
        is_sure = now < self._until
        if is_sure and self.used == self.most:
            return self.most
        if now >= self._sure and self.most > 1:
            self._known = free_cores(self.most)
            self._sure = now + SURE
            if not is_sure:
                self._free = self._known
            elif self._known <= self.used:
                # Another count would take its time from a prompt, to find the same program.
                self._sure = self._until
        return self._known

    def add(self, tokens: int, seconds: float, on_cores: float, now: float) -> None:
        """Count a batch that was decoded by `next` threads.

        Args:
            on_cores: the seconds that the process has had on all cores meanwhile.
            now: the time at its end, in seconds.
        """
        if self._trial is not None:
            self._try(self._trial, tokens, seconds, now)
            return
        cores, free = self.measure(seconds, on_cores, now), self._free
        if self.used < self.most:
            self._look_for_cores(now)
        elif cores is not None:
            self._compare_cores(cores, now)
        if now >= self._until and (cores is not None or free):
            self._begin(float(free) if cores is None else cores, is_counted=cores is None)

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
        """End the time of a result if more cores are missing than at its trial."""
        self._cores = self._cores or cores
        if cores < self._cores - CHANGED:
            self._until = now
        if abs(cores - self._cores) > CHANGED:
            self._factor = 1.0

    def _look_for_cores(self, now: float) -> None:
        """End the time of a result if other programs have left a core for one thread more."""
        since, before = self._read
        if now < since + SURE:
            return
        seconds = free_seconds()
        self._read = now, seconds
        # After a pause, the other programs of that time do not matter.
        if now < since + 2 * SURE:
            had_cores = self._have_cores
            self._have_cores = (seconds - before) / (now - since) >= self.used + 1 - MISSING
            if self._have_cores and not had_cores:
                self._until = now

    def _are_missing(self, cores: float) -> bool:
        return self.used - cores >= max(MISSING, MISSING_SHARE * self.used)

    def _begin(self, cores: float, is_counted: bool) -> None:
        """Begin a trial if one may help; several possible numbers take turns.

        Args:
            is_counted: True if the cores were counted. They are then more or less than measured.
        """
        used, most, others = self.used, self.most, list[int]()
        self._free = 0
        if used > 1 and self._are_missing(cores):
            others.append(max(int(cores), 1))
        if used < most:
            others += {most: None, used + 1: None}
        if others:
            self._trial = Trial(used, others[self._trials % len(others)])
            self._trials += 1
            self._cores, self.is_trying = 0.0 if is_counted else cores, True

    def _try(self, trial: Trial, tokens: int, seconds: float, now: float) -> None:
        """Count a batch of a trial."""
        result, factor = trial.add(tokens, seconds, now), self._factor
        if result is None:
            self.next = trial.next
            if trial.count >= MOST_BATCHES:
                if self.used == self.most:
                    self._factor *= 2
                self._end(trial, now, factor)
            return
        if result != self.used:
            self.used, self._factor, self._have_cores = result, 1.0, False
        elif self.used == self.most:
            self._factor *= 2
        self._end(trial, now, factor)

    def _end(self, trial: Trial, now: float, factor: float = 1.0) -> None:
        """End a trial, and set the time until the next one."""
        self._until = now + min(factor * max(LEAST_HOLD, HOLD * trial.lost), MOST_HOLD)
        self._trial, self.is_trying, self.next = None, False, self.used


def free_seconds() -> float:
    """Return the seconds for which cores were idle so far, or had threads of this process.

    It is 0 except on Linux, and where this process may not use all cores.
    """
    try:
        if len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
            return 0.0
        with STAT.open("rb") as file:
            idle, waiting = map(int, file.readline().split()[4:6])
        return (idle + waiting) / os.sysconf("SC_CLK_TCK") + time.process_time()
    except (AttributeError, OSError, ValueError):
        return 0.0


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
