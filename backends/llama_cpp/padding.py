"""Odd batches with one token more, where that is faster.

On a processor, llama.cpp multiplies some kinds of weights with two or four tokens of a batch at a
time. The odd last token then needs another pass over the weights. If these do not fit into the
processor's cache, a batch of seven tokens takes longer than one of eight. That depends on the kind
and size of the weights, on the processor and on the build, so it is measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

# The largest batch that may get another token; larger ones could gain little.
MOST = 63
# The steps that measure each of the two ways, and the steps that use the faster one afterwards.
TRIALS, HOLD = 5, 2048
# The share of the time that a batch with one token more may take.
GAIN = 0.97


@dataclass(slots=True)
class _Size:
    """The measurements of batches of one size.

    Args:
        left: the steps until the next trial; during a trial it is 0.
    """

    plain: list[float] = field(default_factory=list)
    padded: list[float] = field(default_factory=list)
    is_padded: bool = False
    left: int = 0


class Padding:
    """The sizes of odd batches that are faster with one token more."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def wants(self, tokens: int) -> bool:
        """Return True if the next batch of so many tokens gets another one."""
        if tokens == 1 or tokens > MOST or not tokens % 2:
            return False
        size = self._sizes.setdefault(tokens, _Size())
        if size.left:
            return size.is_padded
        # Both ways take turns, so that slow changes of the machine's speed affect them equally.
        return len(size.padded) < len(size.plain)

    def add(self, tokens: int, is_padded: bool, seconds: float) -> None:
        """Count a decode for which `wants` was asked.

        Args:
            tokens: the size of the batch without the token that was added.
        """
        size = self._sizes.get(tokens)
        if size is None:
            return
        if size.left:
            size.left -= 1
            return
        (size.padded if is_padded else size.plain).append(seconds)
        if len(size.padded) == TRIALS:
            size.is_padded = statistics.median(size.padded) < GAIN * statistics.median(size.plain)
            size.left = HOLD
            size.plain.clear()
            size.padded.clear()
