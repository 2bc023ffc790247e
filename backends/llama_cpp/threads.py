"""The number of threads that decode: fewer while other programs need the cores.

llama.cpp's threads wait for each other after each operation, hundreds of times in a step. If
another program has the core of one thread, all others spin until it continues. One thread less is
then faster, since it leaves that core to the other program. The time on cores that the process gets
shows that some are missing, and a trial shows which number of threads is faster.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

# The cores that are missing if a trial is worth its time.
MISSING = 0.25
# The steps of each number of threads in a trial, and the share of the time that is a gain.
TRIALS, GAIN = 3, 0.97
# The batches after which a trial ends without a result, because too few had the same size.
MOST_BATCHES = 8 * TRIALS
# A trial ends at once if one way takes so many times as long as the other.
CLEAR = 2.0
# The seconds until the next trial: at least these, and this many times what the last one has lost.
LEAST_HOLD, HOLD = 1.0, 30.0


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
    # The number that a trial compares with `used`.
    _other: int = 0
    # The time of the next trial, if one is needed.
    _until: float = 0.0
    # The tokens and the seconds of the last batch with `used`, and the pairs of seconds.
    _first: tuple[int, float] = (0, 0.0)
    _pairs: list[tuple[float, float]] = field(default_factory=list)
    # The batches of the trial.
    _count: int = 0

    def __post_init__(self) -> None:
        self.used = self.next = self.most

    def add(self, tokens: int, seconds: float, on_cores: float, now: float) -> None:
        """Count a batch that was decoded by `next` threads.

        Args:
            on_cores: the seconds that the process has had on all cores meanwhile.
            now: the time at its end, in seconds.
        """
        if self.is_trying:
            self._compare(tokens, seconds, now)
        elif now >= self._until:
            cores = on_cores / seconds
            if self.used > 1 and self.used - cores >= MISSING:
                self._other, self.is_trying = max(int(cores), 1), True
            elif self.used < self.most:
                self._other, self.is_trying = self.most, True

    def _compare(self, tokens: int, seconds: float, now: float) -> None:
        """Let both numbers of threads take turns, and compare batches of the same size."""
        self._count += 1
        if self.next == self.used:
            self._first, self.next = (tokens, seconds), self._other
            return
        size, before = self._first
        self.next = self.used
        if size == tokens or _is_clear(seconds / before, tokens / size):
            self._pairs.append((before, seconds))
            own, others = zip(*self._pairs, strict=True)
            ratio = statistics.median(others) / statistics.median(own)
            if len(own) == TRIALS or not 1 / CLEAR < ratio < CLEAR:
                if ratio < GAIN:
                    self.used = self.next = self._other
                self._end(now + max(LEAST_HOLD, HOLD * abs(sum(own) - sum(others))))
                return
        if self._count >= MOST_BATCHES:
            self._end(now + LEAST_HOLD)

    def _end(self, until: float) -> None:
        """End a trial; the next one begins at some time or later."""
        self._until = until
        self.is_trying, self._count = False, 0
        self._pairs.clear()


def _is_clear(seconds: float, tokens: float) -> bool:
    """Return True if two batches of different sizes show which number of threads is faster.

    A batch takes between as long as another one, and as many times as long as it has tokens.

    Args:
        seconds: the quotient of their seconds; `tokens` that of their tokens.
    """
    least, most = sorted((1.0, tokens))
    return not least / CLEAR < seconds < most * CLEAR
