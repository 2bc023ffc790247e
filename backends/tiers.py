"""The tiers of waiting requests, and whose turn is next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum

# The largest number of turns of others before the first waiting request of a tier has its turn.
MOST_PASSED = 16


class Tier(IntEnum):
    """A class of requests; a smaller number goes first."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2


class Order:
    """The order in which waiting tiers have their turns.

    The first waiting tier is next. A tier that waits while others have their turns is next after at
    most `MOST_PASSED` of them, so that no tier waits forever.
    """

    def __init__(self) -> None:
        # The number of turns that each tier has waited for.
        self._passed: dict[Tier, int] = {}

    def next(self, waiting: Collection[Tier]) -> Tier:
        """Return the tier whose turn is next; at least one must be waiting."""
        first = min(waiting)
        if len(waiting) > 1:
            longest = max(sorted(waiting), key=self._waited)
            # Two tiers can be due at the same time, and one of them then waits for the other.
            if self._waited(longest) >= MOST_PASSED - 1:
                return longest
        return first

    def count(self, served: Tier, waiting: Iterable[Tier]) -> None:
        """Count a turn of a tier, while others are still waiting."""
        self._passed = {tier: self._waited(tier) + 1 for tier in waiting if tier is not served}

    def _waited(self, tier: Tier) -> int:
        return self._passed.get(tier, 0)
