"""Drafts of the next tokens by prompt lookup, and the cost of evaluating any draft.

Answers that edit or quote repeat parts of their prompt. If the last tokens of a sequence occurred
before, the tokens that followed them then are a draft. Otherwise a smaller model can make one
(`draft_model.py`). The draft is evaluated in one batch with the last token. Each of its positions
is sampled as without a draft, and the first token that differs ends it. So the tokens and their
probabilities are those of a generation without drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# The number of tokens that have to occur again.
LENGTH = 3
# The largest number of tokens in a draft.
MOST = 16
# The tokens that one step indexes, which takes less than a millisecond.
STEP = 2_048
# The chance that a draft's next token is accepted: at first, and the weight of each new outcome.
FIRST, WEIGHT = 0.7, 0.1


class Acceptance:
    """The chance that the next token of a source's drafts is accepted."""

    def __init__(self) -> None:
        self.chance = FIRST

    def worth(self, share: float) -> int:
        """Return the number of tokens that are worth drafting.

        Args:
            share: what a drafted token costs, as a share of what a generated token costs.
        """
        # A draft of some length is worth it while its last token is likely enough to be accepted.
        likely = int(math.log(share) / math.log(self.chance)) if 0 < share < 1 else 0
        if not likely:
            # Something may have changed, so that a draft is tried again after some time.
            self.chance += WEIGHT / 20 * (FIRST - self.chance)
        return min(likely, MOST)

    def learn(self, drafted: int, accepted: int) -> None:
        """Learn from a draft of some tokens, of which the first ones were accepted."""
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.chance += WEIGHT * (outcome - self.chance)
        self.chance = min(max(self.chance, 0.02), 0.98)


class Lookup:
    """An index of a sequence, which finds where its last tokens occurred before.

    Args:
        prediction: tokens that the answer is expected to repeat, which are not in the sequence.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        # The place after the last occurrence of each run of tokens.
        self._places: dict[tuple[int, ...], int] = {}
        self._tokens = [*prediction]
        self._start = len(self._tokens)
        self._indexed = LENGTH
        # True until the beginning of the prediction has been drafted.
        self._is_first = bool(self._start)
        self.acceptance = Acceptance()

    def propose(self, history: Sequence[int], share: float, most: int) -> list[int]:
        """Return a draft of the tokens after a sequence; it may be empty.

        Args:
            history: the sequence, which continues that of the call before.
            share: what a token in a batch costs, as a share of what a generated token costs.
            most: the largest number of tokens.
        """
        self._tokens += history[len(self._tokens) - self._start :]
        self._index()
        tokens = self._tokens
        if self._indexed < len(tokens):
            return []
        place = self._places.get(tuple(tokens[-LENGTH:]), 0)
        if not place and self._is_first:
            place, tokens = self._start, tokens[: self._start] * 2
        if not place:
            return []
        count, period = min(self.acceptance.worth(share), most), len(tokens) - place
        if count > 0:
            self._is_first = False
        return [tokens[place + number % period] for number in range(count)]

    def _index(self) -> None:
        """Index the tokens that have a follower, at most some of them."""
        start, end = self._indexed, min(len(self._tokens), self._indexed + STEP)
        for place in range(start, end):
            self._places[tuple(self._tokens[place - LENGTH : place])] = place
        self._indexed = max(start, end)


# The share of older measurements that a new one leaves, and the share that is assumed at first.
_KEPT, ASSUMED = 0.98, 0.25


class DecodeCost:
    """The duration of a decode as a line over its tokens, fitted to the latest ones."""

    def __init__(self) -> None:
        # Sums of 1, x, y, x * x and x * y, in which older terms have less weight.
        self._sums = [0.0] * 5

    def add(self, tokens: int, seconds: float) -> None:
        """Count a decode."""
        n, x, y, xx, xy = self._sums
        self._sums = [
            _KEPT * n + 1.0,
            _KEPT * x + tokens,
            _KEPT * y + seconds,
            _KEPT * xx + tokens * tokens,
            _KEPT * xy + tokens * seconds,
        ]

    def share(self, running: int, drafting: float = 0.0) -> float:
        """Return what one more token costs, as a share of what a generated token costs now.

        Args:
            running: the number of sequences, each of which gets a token by a decode.
            drafting: the seconds that a draft's next token takes for all of them.
        """
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if spread <= 1e-2 * n * n:
            # All had about as many tokens.
            return min(ASSUMED + drafting * n / y, 1.0) if y else ASSUMED
        slope = (n * xy - x * y) / spread
        whole = (y - slope * x) / n + slope * running
        more = slope * running + drafting
        return min(max(more / whole, 0.01), 1.0) if whole > 0 else 1.0
