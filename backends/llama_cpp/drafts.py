"""Drafts of the next tokens by prompt lookup, and the cost of evaluating any draft.

Answers that edit or quote repeat parts of their prompt. If the last tokens of a sequence occurred
before, the tokens that followed them then are a draft. Otherwise a smaller model can make one
(`draft_model.py`). The draft is evaluated in one batch with the last token. Each of its positions
is sampled as without a draft, and the first token that differs ends it. So the tokens and their
probabilities are those of a generation without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

# The number of tokens that have to occur again.
LENGTH = 3
# Of the latest places where they occurred, the one with the longest equal text before it is taken.
PLACES, LONGER = 8, (6, 12, 24, 48)
# The chance that the next token is accepted, by how many of these lengths are equal, at first.
CHANCES = (0.7, 0.8, 0.9, 0.95, 0.95)
# The same where a text is expected or a model drafts, and the outcomes for which this stands.
LIKELY, OUTCOMES = 0.9, 6
# The largest number of tokens in a draft.
MOST = 16
# The tokens that one step indexes, which takes less than a millisecond.
STEP = 2_048
# The least weight of an outcome.
WEIGHT = 0.1
# The least duration of a decode, in times of that of a single token.
LEAST = 0.1


class Acceptance:
    """The chance that the next token of a source's drafts is accepted.

    Args:
        first: the chance before any outcome is known.
        outcomes: the number of outcomes for which it stands.
    """

    def __init__(self, first: float, outcomes: int = 1) -> None:
        self.chance = self._first = first
        self._outcomes = outcomes

    def worth(self, cost: DecodeCost, running: int, drafting: float = 0.0) -> int:
        """Return the number of tokens with which a step gives the most tokens in its time.

        Args:
            running: the number of sequences, each of which gets a token without drafts.
            drafting: the seconds that each token of a draft takes before.
        """
        if running == 1 and cost.is_stale:
            return 0
        start, slope = cost.line
        each = slope + cost.share(drafting)
        duration = max(start + slope * running, LEAST)
        best, count = running / (duration if running > 1 else 1.0), 0
        expected, likely, before = float(running), 1.0, 0.0
        for length in range(1, MOST + 1):
            likely *= self.chance
            expected += likely
            duration += each
            rate = expected / duration
            if rate < before:
                break
            before = rate
            if rate > best:
                best, count = rate, length
        if not count:
            cost.doubt()
        return count

    def doubt(self) -> None:
        """Move to the first chance, so that drafts without free outcomes are tried again."""
        self.chance += WEIGHT / 20 * (self._first - self.chance)

    def learn(self, drafted: int, accepted: int) -> None:
        """Learn from a draft of some tokens, of which the first ones were accepted."""
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._outcomes += 1
            self.chance += max(WEIGHT, 1 / self._outcomes) * (outcome - self.chance)
        self.chance = min(max(self.chance, 0.02), 0.98)


class Lookup:
    """An index of a sequence, which finds where its last tokens occurred before.

    Args:
        prediction: tokens that the answer is expected to repeat, which are not in the sequence.
        prompt: the number of tokens before the answer.

    Attributes:
        acceptance: the chance of the last draft.
    """

    def __init__(self, prediction: Sequence[int] = (), prompt: int = 0) -> None:
        # The place after the last occurrence of each run of tokens, and after the one before it.
        self._places: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}
        # How far the last place was from the end of the sequence; 0 if there was none.
        self._distance = 0
        self._tokens = [*prediction]
        self._start = len(self._tokens)
        self._indexed = LENGTH
        self._prompt = prompt
        # True until the answer's beginning was compared with the prediction.
        self._is_first = bool(prediction)
        self.acceptance = Acceptance(LIKELY, OUTCOMES)
        # The chances by the length of the text that is equal: long ones are seldom wrong.
        self._chances = [Acceptance(chance) for chance in CHANCES]
        # The token that would have been drafted if it had been worth it.
        self._expected: int | None = None

    def propose(
        self, history: Sequence[int], cost: DecodeCost, running: int, most: int
    ) -> list[int]:
        """Return a draft of the tokens after a sequence; it may be empty.

        Args:
            history: the sequence, which continues that of the call before.
            running: the number of sequences that get a token by the next decode.
            most: the largest number of tokens.
        """
        tokens, known = self._tokens, len(self._tokens)
        tokens += history[known - self._start :]
        if self._expected is not None and known < len(tokens):
            self.acceptance.learn(1, int(tokens[known] == self._expected))
        self._expected = None
        self._index()
        if self._indexed < len(tokens):
            return []
        place = (self._is_first and self._predicted()) or self._place()
        if not place:
            return []
        count = min(self.acceptance.worth(cost, running), most)
        period = len(tokens) - place
        if not count:
            self._expected = tokens[place]
        return [tokens[place + number % period] for number in range(count)]

    def _predicted(self) -> int:
        """Return the place in the prediction after the first tokens of the answer, or 0."""
        self._is_first = False
        tokens, start = self._tokens, self._start
        answer = tokens[start + self._prompt :]
        place = len(answer)
        if place >= start or answer != tokens[:place]:
            return 0
        self._distance = len(tokens) - place
        return place

    def _place(self) -> int:
        """Return the place after the best earlier occurrence of the last tokens, or 0."""
        tokens, end = self._tokens, len(self._tokens)
        place = self._places.get(tuple(tokens[-LENGTH:]), 0)
        if not place:
            return 0
        found = [place]
        while len(found) < PLACES and (place := self._earlier.get(place, 0)):
            found.append(place)
        if self._distance:
            found.append(end - self._distance)
        level = 0
        for length in LONGER:
            text = tokens[-length:]
            equal = [place for place in found if tokens[max(place - length, 0) : place] == text]
            if not equal:
                break
            found = equal
            level += 1
        self.acceptance = self._chances[level]
        self._distance = end - found[0]
        return found[0]

    def _index(self) -> None:
        """Index the tokens that have a follower, at most some of them."""
        start, end = self._indexed, min(len(self._tokens), self._indexed + STEP)
        tokens, places = self._tokens, self._places
        for place in range(start, end):
            run = tuple(tokens[place - LENGTH : place])
            if run in places:
                self._earlier[place] = places[run]
            places[run] = place
        self._indexed = max(start, end)


# The share of older measurements that a new one leaves, and the weight of one of a single token.
_KEPT, _WEIGHT = 0.98, 0.25
# The decodes of several tokens after which a single one is measured again, and the factor by which
# it may differ. If it differs by more, it counts as so different, and the next is measured, too.
_FRESH, _SIMILAR = 50, 2.0
# The line that is assumed before there are measurements: a step of two tokens takes 2.5 times as
# long as one of a single token, as on a fast processor. Its points, with little weight.
_START, _SLOPE = 2.0, 0.25
_ENDS = (2, MOST + 1)
# A decode that takes this many times as long as expected was disturbed, and counts as so long.
_MOST_TIMES = 4.0


class DecodeCost:
    """The duration of a decode of several tokens, in times of that of a single token.

    It is a line over the number of tokens, fitted to the latest decodes. A single token can take
    less than half of what two take, so it is not on the line. The quotient hardly depends on the
    length of the sequence.

    Attributes:
        line: its value at 0, and its slope.
    """

    def __init__(self) -> None:
        self.line = (_START, _SLOPE)
        # The seconds of a single token; 0 if there was none.
        self._one = 0.0
        # The decodes of several tokens since the last one of a single token that was as expected.
        self._others = 0
        # Sums of 1, x, y, x * x and x * y, in which older terms have less weight.
        self._sums: Sequence[float] = (0.0,) * 5

    @property
    def is_stale(self) -> bool:
        """True if a single token should be decoded to know its duration."""
        return self._others >= _FRESH

    def add(self, tokens: int, seconds: float) -> None:
        """Count a decode."""
        seconds = max(seconds, 1e-6)
        if tokens == 1:
            self._add_one(seconds)
            return
        self._others += 1
        start, slope = self.line
        expected = max(start + slope * tokens, LEAST)
        if not self._one:
            self._one = seconds / expected
        y = min(seconds / self._one, _MOST_TIMES * expected)
        terms = 1.0, tokens, y, tokens * tokens, tokens * y
        self._fit([_KEPT * old + new for old, new in zip(self._sums, terms, strict=True)])

    def _add_one(self, seconds: float) -> None:
        before = self._one or seconds
        bounded = min(max(seconds, before / _SIMILAR), before * _SIMILAR)
        self._one = before + _WEIGHT * (bounded - before)
        self._others = 0 if bounded == seconds else _FRESH

    def share(self, seconds: float) -> float:
        """Return some seconds in times of a single token; 0 while these are not known."""
        return seconds / self._one if self._one else 0.0

    def doubt(self) -> None:
        """Forget a little of a line that is above the assumed one, so that it is measured again."""
        start, slope = self.line
        if start + slope * MOST > _START + _SLOPE * MOST:
            self._fit([_KEPT * old for old in self._sums])

    def _fit(self, sums: Sequence[float]) -> None:
        """Fit the line to the measurements and to the points of the assumed one."""
        self._sums = sums
        n, x, y, xx, xy = map(sum, zip(self._sums, _ASSUMED, strict=True))
        slope = max((n * xy - x * y) / (n * xx - x * x), 0.01)
        self.line = (y - slope * x) / n, slope


def _assumed() -> tuple[float, ...]:
    """Return the sums of the ends of the assumed line; each counts as a tenth of a decode."""
    points = [(x, _START + _SLOPE * x) for x in _ENDS]
    terms = [(1.0, x, y, x * x, x * y) for x, y in points]
    return tuple(0.1 * sum(term) for term in zip(*terms, strict=True))


_ASSUMED = _assumed()
