"""When an engine that fails gets no requests, and how many requests are sent again."""

from __future__ import annotations

import time
from collections.abc import Callable

# Consecutive failures after which an engine is ejected.
FAILURES = 5
# Seconds of the first ejection; each further one is longer by as much, up to the longest.
EJECTION, LONGEST = 30.0, 300.0

Clock = Callable[[], float]


class Breaker:
    """The failures of one engine that answers; one that does not answer needs no count.

    Attributes:
        until: the end of the ejection; 0 if it is not ejected.
        has_failed: True after a failure, until a call has succeeded.
        is_trying: True after an ejection, until one call has succeeded or failed.
    """

    __slots__ = (
        "_clock",
        "_ejected_at",
        "_ejections",
        "_failures",
        "has_failed",
        "is_trying",
        "until",
    )

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._ejections = 0
        self._ejected_at = 0.0
        self.until = 0.0
        self.is_trying = self.has_failed = False

    def succeed(self) -> None:
        """Count a call that the engine has answered."""
        self._failures = 0
        self.is_trying = self.has_failed = False

    def fail(self) -> bool:
        """Count a failed call; return True if the engine should be ejected now."""
        self._failures += 1
        self.has_failed = True
        return self.is_trying or self._failures >= FAILURES

    def eject(self) -> float:
        """Begin an ejection, and return its length in seconds."""
        now = self._clock()
        if now - self._ejected_at > LONGEST:
            self._ejections = 0
        self._ejections += 1
        self._failures = 0
        self.is_trying = False
        seconds = min(EJECTION * self._ejections, LONGEST)
        self._ejected_at = self.until = now + seconds
        return seconds

    def is_over(self) -> bool:
        """Return True if an ejection has ended; the next call then tries the engine."""
        if not self.until or self._clock() < self.until:
            return False
        self.until = 0.0
        self.is_trying = self.has_failed = True
        return True


class RetryBudget:
    """The number of calls that may be sent again, so that retries never multiply the load.

    Args:
        share: the calls sent again, as a share of all calls.
        a_second: calls that may be sent again in each second, in addition.
        seconds: the time for which calls are saved; at the start, all of them are.

    Attributes:
        calls: the calls that were sent for the first time since the last one that was sent again.
    """

    def __init__(
        self,
        share: float = 0.2,
        a_second: float = 10.0,
        seconds: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._share = share
        self._a_second = a_second
        # An engine that ends takes all its calls along at once, and they should not fail for it.
        self._most = self._balance = a_second * seconds
        self._clock = clock
        self._at = clock()
        self.calls = 0

    def take(self) -> bool:
        """Return True if one more call may be sent again, which is then counted."""
        now = self._clock()
        passed, self._at = now - self._at, now
        earned = passed * self._a_second + self.calls * self._share
        self.calls = 0
        self._balance = min(self._most, self._balance + earned)
        if self._balance < 1:
            return False
        self._balance -= 1
        return True
