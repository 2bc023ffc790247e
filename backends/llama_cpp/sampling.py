"""Selection of tokens from logits, and log-probabilities.

Most requests set only OpenAI's parameters and `top_k` or `min_p`. `RowSampler` samples for these
with NumPy: it takes a seventh of the time of llama.cpp's samplers, which copy the vocabulary into
an array of structures. `chain` has llama.cpp's samplers for all other parameters.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ..base import Alternative, Sampling, Token
from .grammars import Constraint
from .vocabulary import Vocabulary


def score(
    logits: NDArray[np.float32],
    tokens: Sequence[tuple[int, bytes, bytes, bool]],
    top: int,
    vocabulary: Vocabulary,
    scratch: NDArray[np.float32],
) -> list[Token]:
    """Return the tokens that follow rows of logits, with their log-probabilities.

    Args:
        logits: shape (rows, vocabulary).
        tokens: the token after each row: id, data, spelling, and True for a control token.
        top: the number of alternatives for each token.
        scratch: an array of the vocabulary's size.
    """
    scored: list[Token] = []
    for row, token in zip(logits, tokens, strict=True):
        highest = row.max()
        np.exp(np.subtract(row, highest, out=scratch), out=scratch)
        # Double precision, because single would make the log-probabilities inexact.
        norm = float(highest) + math.log(scratch.sum(dtype=np.float64))
        alternatives: list[Alternative] = []
        if top:
            best = _top(row, top)
            values = (row[best].astype(np.float64) - norm).tolist()
            for other, value in zip(best.tolist(), values, strict=True):
                alternatives.append(Alternative(other, *vocabulary.token(other), value))
        scored.append(Token(*token, float(row[token[0]]) - norm, tuple(alternatives)))
    return scored


class DeadEnd(Exception):
    """No token can follow: a grammar, biases or the model's own logits exclude every one."""


class Sampler(ABC):
    """The sampler of one sequence; it selects only tokens that the sequence's grammar allows.

    It must be closed.

    Args:
        ends: the end tokens.
        constraint: the sequence's position in its grammar.
    """

    def __init__(self, ends: frozenset[int], constraint: Constraint | None) -> None:
        self._ends = ends
        self._constraint = constraint

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Select and accept the token that follows.

        With a grammar, sample without it first. If it rejects the token, sample again with its
        mask. Without truncation, the token has the same probability as if the mask were applied
        first. Masks are slow and rarely needed (common/sampling.cpp does the same).

        Args:
            logits: the model's logits, shape (vocabulary,), which are as before afterwards.

        Raises:
            DeadEnd: no token can follow.
        """
        token = self._select(logits, None)
        constraint = self._constraint
        if constraint is not None:
            if token is None or not constraint.allows(token):
                token = self._select(logits, constraint.allowed())
            if token is None:
                # The grammar allows only an end token, which the request bans.
                token = next((end for end in self._ends if constraint.allows(end)), None)
        if token is None:
            raise DeadEnd("no token of this model can follow")
        if constraint is not None:
            constraint.accept(token)
        self._accept(token)
        return token

    def close(self) -> None:  # noqa: B027
        """Free what llama.cpp allocated, if anything."""

    @abstractmethod
    def _select(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> int | None:
        """Return a token, of the allowed ones if given; None if none has a finite logit."""

    @abstractmethod
    def _accept(self, token: int) -> None:
        """Count a token that the sequence has got."""


def biases_of(sampling: Sampling, vocabulary: Vocabulary) -> list[tuple[int, float]]:
    """Return the number that is added to each token's logit; -inf bans a token."""
    # A bias of -100 bans a token (contract 2.1).
    biases = [(t, bias if bias > -100 else -math.inf) for t, bias in sampling.logit_bias]
    if sampling.extras.get("ignore_eos"):
        biases += [(token, -math.inf) for token in vocabulary.ends]
    return biases


# The number of tokens in a stride, and of tokens that are not worth being split into strides.
_STRIDE, _FEW = 256, 1024
# Bounds of weights that leave fewer tokens to sort; the first that leaves enough is used.
_BOUNDS = (0.01, 1e-4, 1e-8)


class RowSampler(Sampler):
    """A sampler for OpenAI's parameters, `top_k`, `min_p` and `ignore_eos`.

    It applies them in llama.cpp's order. For a seed it draws the same random numbers as llama.cpp's
    `dist` sampler with libstdc++, and so in general the same tokens.

    Args:
        scratch: an array of the vocabulary's size, which samplers of one thread share.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int | None,
        vocabulary: Vocabulary,
        scratch: NDArray[np.float32],
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(vocabulary.ends, constraint)
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._top_k = sampling.extras.get("top_k", 0)
        min_p = sampling.extras.get("min_p", 0.0)
        self._min_p = math.log(min_p) if min_p > 0 else -math.inf
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._scratch = scratch
        self._random = uniform(seed)
        # What is added to the logits of some tokens: biases, and the penalties of those generated.
        self._places: dict[int, int] = {}
        self._tokens = np.empty(0, np.intp)
        self._offsets = np.empty(0, np.float32)
        for token, bias in biases_of(sampling, vocabulary):
            place = self._place_of(token)
            self._offsets[place] += bias
        self._seen: set[int] = set()

    def _place_of(self, token: int) -> int:
        """Return a token's place among those whose logits change."""
        if token not in self._places:
            self._places[token] = len(self._places)
            self._tokens = np.append(self._tokens, token)
            self._offsets = np.append(self._offsets, np.float32(0.0))
        return self._places[token]

    @override
    def _select(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> int | None:
        if not self._places:
            return self._chosen(logits, allowed)
        # A copy of all logits would take as long as the rest.
        before = logits[self._tokens]
        logits[self._tokens] += self._offsets
        try:
            return self._chosen(logits, allowed)
        finally:
            logits[self._tokens] = before

    def _chosen(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> int | None:
        if allowed is not None:
            logits = np.where(allowed, logits, np.float32(-np.inf))
        if self._temperature <= 0:
            token = int(logits.argmax())
            return token if logits[token] > -np.inf else None
        ids = None
        if self._top_k > 0:
            ids = _top(logits, self._top_k)
            logits = logits[ids]
        if self._top_p < 1:
            ids, logits = _nucleus(ids, logits, self._top_p, self._scratch)
        if self._min_p > -math.inf:
            chosen = (logits >= logits.max() + self._min_p).nonzero()[0]
            ids, logits = chosen if ids is None else ids[chosen], logits[chosen]
        weights = _weights(logits, self._scratch, self._temperature)
        if weights is None:
            return None
        place = _drawn(weights, self._random())
        return place if ids is None else int(ids[place])

    @override
    def _accept(self, token: int) -> None:
        if self._presence or self._frequency:
            place = self._place_of(token)
            self._offsets[place] -= self._frequency
            if token not in self._seen:
                self._seen.add(token)
                self._offsets[place] -= self._presence


def uniform(seed: int | None) -> Callable[[], float]:
    """Return a source of random numbers in [0, 1); None gives another one each time.

    With a seed it is libstdc++'s `uniform_real_distribution<double>` over `mt19937`, which
    llama.cpp's `dist` sampler uses.
    """
    if seed is None:
        # A generator of its own: tokens show something of its state.
        return random.Random().random  # noqa: S311
    bits = np.random.MT19937()
    bits._legacy_seeding(seed % (2**32 - 1))  # the seeding of `mt19937`

    def draw() -> float:
        low, high = map(float, bits.random_raw(2))
        return min((low + high * 2.0**32) / 2.0**64, 1 - 2**-53)

    return draw


def _weights(
    logits: NDArray[np.float32], out: NDArray[np.float32], temperature: float = 1.0
) -> NDArray[np.float32] | None:
    """Return the tokens' probabilities as multiples of the largest; None without a finite logit."""
    highest = logits.max(initial=-np.inf)
    if not -np.inf < highest < np.inf:
        return None
    weights: NDArray[np.float32] = np.subtract(logits, highest, out=out[: len(logits)])
    if temperature != 1.0:
        # A smaller number would be zero as a 32-bit float.
        weights /= max(temperature, 1e-30)
    return np.exp(weights, out=weights)


def _drawn(weights: NDArray[np.float32], number: float) -> int:
    """Return the place at which the cumulative probability exceeds a number in [0, 1)."""
    if len(weights) <= _FEW:
        sums = weights.cumsum(dtype=np.float64)
        return _reaching(sums, number * sums[-1], "right")
    # A cumulative sum over a vocabulary takes five times as long as one over its strides.
    steps = np.add.reduceat(weights, np.arange(0, len(weights), _STRIDE))
    sums = steps.cumsum(dtype=np.float64)
    target = number * sums[-1]
    stride = _reaching(sums, target, "right")
    start = stride * _STRIDE
    inner = weights[start : start + _STRIDE].cumsum(dtype=np.float64)
    return start + _reaching(inner, target - (sums[stride - 1] if stride else 0.0), "right")


def _reaching(sums: NDArray[np.float64], target: float, side: Literal["left", "right"]) -> int:
    """Return the first place whose sum reaches the target; the last step if rounding hides it.

    On the right side, a sum that equals the target does not reach it.
    """
    place = int(sums.searchsorted(target, side))
    return place if place < len(sums) else int(sums.searchsorted(sums[-1], "left"))


def _top(logits: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return the tokens with the largest logits, most likely first."""
    if len(logits) > _FEW and count * 8 < len(logits):
        # The largest maxima of strides bound the logits that have to be sorted.
        stride = min(_STRIDE, len(logits) // count)
        highest = np.maximum.reduceat(logits, np.arange(0, len(logits), stride))
        highest.partition(len(highest) - count)
        chosen = (logits >= highest[-count]).nonzero()[0]
        return _sorted(chosen, logits)[:count]
    return _sorted(np.arange(len(logits)), logits)[:count]


def _sorted(ids: NDArray[np.intp], logits: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return tokens by their logits, most likely first, then lowest id first.

    Args:
        ids: the tokens in ascending order.
    """
    values = logits[ids]
    if len(ids) <= _FEW:
        return ids[(-values).argsort(kind="stable")]
    # Sorting integers of which the upper half is the logit takes a seventh of that time. Adding
    # zero makes the two zeros equal. The bits of floats are in the order of integers, except that
    # the order of negative ones is the opposite.
    bits = (values + np.float32(0.0)).view(np.int32)
    keys = np.where(bits >= 0, ~bits, bits ^ np.int32(-(2**31))).astype(np.int64) << 32 | ids
    keys.sort()
    return keys & 0xFFFF_FFFF


def _nucleus(
    ids: NDArray[np.intp] | None,
    logits: NDArray[np.float32],
    top_p: float,
    scratch: NDArray[np.float32],
) -> tuple[NDArray[np.intp] | None, NDArray[np.float32]]:
    """Return the fewest of the most likely tokens whose probabilities add up to `top_p`.

    Args:
        ids: the tokens of the logits, most likely first; None for the vocabulary in its order.
    """
    weights = _weights(logits, scratch)
    if weights is None:
        return ids, logits
    wanted = top_p * float(weights.sum(dtype=np.float64))
    if ids is None:
        ids = np.arange(len(logits))
        # Only tokens above a bound need to be sorted.
        for bound in _BOUNDS if len(logits) > _FEW else ():
            likely = (weights > bound).nonzero()[0]
            if weights[likely].sum(dtype=np.float64) >= wanted:
                ids = likely
                break
        ids = _sorted(ids, logits)
        logits, weights = logits[ids], weights[ids]
    count = _reaching(weights.cumsum(dtype=np.float64), wanted, "left") + 1
    return ids[:count], logits[:count]
