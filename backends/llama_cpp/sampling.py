"""A sequence's sampler chain, with llama.cpp's samplers in its order (common/sampling.cpp).

To create a DRY sampler, llama.cpp compares each sequence breaker with every token of the
vocabulary. With a large vocabulary this takes a second, too long for the engine's thread. It is
therefore created once for its settings, and cloned for each choice. `score` converts logits to
log-probabilities.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ..base import Alternative, Sampling, Token
from .grammars import Candidates, Constraint
from .library import Context, Rows
from .vocabulary import Vocabulary

# The number of logits in a block of rows, which bounds the memory for intermediate results.
BLOCK = 4 * 1024 * 1024
STRETCH = 256


def score(
    logits: NDArray[np.float32],
    tokens: Sequence[tuple[int, bytes, bytes, bool]],
    top: int,
    vocabulary: Vocabulary,
) -> list[Token]:
    """Return the tokens that follow rows of logits, with their log-probabilities.

    Args:
        logits: shape (rows, vocabulary).
        tokens: the token after each row: id, data, spelling, and True for a control token.
        top: the number of alternatives for each token.
    """
    scored: list[Token] = []
    step = max(BLOCK // logits.shape[1], 1)
    for start in range(0, len(tokens), step):
        block = logits[start : start + step]
        part = tokens[start : start + step]
        # Double precision, because single would make the log-probabilities inexact.
        highest = block.max(axis=1, keepdims=True)
        sums = np.exp(block - highest).sum(axis=1, dtype=np.float64)
        norms = highest[:, 0].astype(np.float64) + np.log(sums)
        ids = np.array([token[0] for token in part])
        own = block[np.arange(len(part)), ids].astype(np.float64) - norms
        best = _best(block, top)
        for row, (token, logprob) in enumerate(zip(part, own.tolist(), strict=True)):
            alternatives = tuple(
                Alternative(other, *vocabulary.token(other), value)
                for other, value in zip(
                    best[row].tolist(), (block[row, best[row]] - norms[row]).tolist(), strict=True
                )
            )
            scored.append(Token(*token, logprob, alternatives))
    return scored


def _best(block: NDArray[np.float32], top: int) -> NDArray[np.intp]:
    """Return the ids of each row's `top` largest logits, largest first, then lowest id first."""
    if top == 0:
        return np.empty((len(block), 0), np.intp)
    if top == 1:
        first: NDArray[np.intp] = block.argmax(axis=1)
        return first[:, None]
    top = min(top, block.shape[1])
    # The `top` largest maxima of stretches bound the values that have to be sorted.
    stretches = np.arange(0, block.shape[1], max(min(STRETCH, block.shape[1] // top), 1))
    largest = np.maximum.reduceat(block, stretches, axis=1)
    least = np.partition(largest, -top, axis=1)[:, -top]
    best = np.empty((len(block), top), np.intp)
    for row, values in enumerate(block):
        chosen = np.flatnonzero(values >= least[row])
        best[row] = chosen[np.argsort(-values[chosen], kind="stable")[:top]]
    return best


# llama.cpp's defaults (common/common.h).
BREAKERS = ("\n", ":", '"', "*")
# The number of samplers that are kept.
_MOST = 8


class Dry(NamedTuple):
    """The settings of a DRY sampler; `last` is a number of tokens."""

    multiplier: float
    base: float
    allowed_length: int
    last: int
    breakers: tuple[bytes, ...]


def dry_of(extras: Mapping[str, Any], context: int) -> Dry | None:
    """Return the DRY settings in a request's extras, or None if they do not enable DRY.

    Args:
        context: the context length in tokens, which bounds `last`.
    """
    if not extras.get("dry_multiplier"):
        return None
    last = extras.get("dry_penalty_last_n", -1)
    return Dry(
        extras["dry_multiplier"],
        extras.get("dry_base", 1.75),
        extras.get("dry_allowed_length", 2),
        context if last < 0 else min(last, context),
        tuple(text.encode() for text in extras.get("dry_sequence_breakers", BREAKERS)),
    )


_lock = threading.Lock()
_made: OrderedDict[tuple[Vocabulary, Dry], object] = OrderedDict()


def prepare(vocabulary: Vocabulary, dry: Dry) -> None:
    """Create a sampler if there is none with these settings; thread-safe."""
    with _lock:
        if (vocabulary, dry) in _made:
            _made.move_to_end((vocabulary, dry))
            return
    sampler = _new(vocabulary, dry)
    with _lock:
        if (vocabulary, dry) in _made:
            llama_cpp.llama_sampler_free(sampler)
            return
        _made[vocabulary, dry] = sampler
        if len(_made) > _MOST:
            llama_cpp.llama_sampler_free(_made.popitem(last=False)[1])


def copied(vocabulary: Vocabulary, dry: Dry) -> object:
    """Return a sampler that the caller owns, cloned if one with these settings exists."""
    with _lock:
        known = _made.get((vocabulary, dry))
        if known is not None:
            copy: object = llama_cpp.llama_sampler_clone(known)
            return copy
    return _new(vocabulary, dry)


def _new(vocabulary: Vocabulary, dry: Dry) -> object:
    sampler: object = llama_cpp.llama_sampler_init_dry(
        vocabulary.pointer,
        dry.multiplier,
        dry.base,
        dry.allowed_length,
        dry.last,
        (ctypes.c_char_p * len(dry.breakers))(*dry.breakers),
        len(dry.breakers),
    )
    return sampler


class DeadEnd(Exception):
    """A grammar that allows no further token."""


class Sampler:
    """The sampler of one sequence; it selects only tokens that the sequence's grammar allows.

    It must be closed.

    OpenAI's penalties count generated tokens only, of which there are at most `max_tokens`. As in
    llama.cpp, `repeat_penalty` counts the last `repeat_last_n` tokens, prompt included.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int | None,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        max_tokens: int,
        context: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._ends = vocabulary.ends
        self._chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        seed = random.getrandbits(32) if seed is None else seed % (2**32 - 1)
        size = vocabulary.size
        sampling = replace(sampling, extras=sampling.extras_within(context))
        extras = sampling.extras
        self._add_bias(sampling, vocabulary)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._add(
                llama_cpp.llama_sampler_init_penalties(
                    size, max_tokens, 1.0, sampling.frequency_penalty, sampling.presence_penalty
                )
            )
        if (repeat := extras.get("repeat_penalty", 1.0)) != 1.0:
            last = extras.get("repeat_last_n", 64)
            penalties = llama_cpp.llama_sampler_init_penalties(size, last, repeat, 0.0, 0.0)
            for token in prompt[len(prompt) - min(last, len(prompt)) :]:
                llama_cpp.llama_sampler_accept(penalties, token)
            self._add(penalties)
        dry = dry_of(extras, context)
        if dry is not None:
            self._add_dry(dry, vocabulary, prompt)
        if sampling.temperature <= 0:
            self._add(llama_cpp.llama_sampler_init_greedy())
        elif extras.get("mirostat"):
            self._add_mirostat(sampling, seed, size)
        else:
            self._add_truncation(sampling, extras, seed)
            self._add_temperature(sampling, extras)
            self._add(llama_cpp.llama_sampler_init_dist(seed))

    def sample(self, context: Context, rows: Rows, candidates: Candidates) -> int:
        """Sample and accept the token after the last of some rows of the last decode.

        Raises:
            DeadEnd: the grammar allows no token, or sampling removes all that it allows.
        """
        if self._constraint is None:
            token: int = llama_cpp.llama_sampler_sample(self._chain, context.pointer, rows.last)
            return token
        token = self._sample(context.row(rows.last), candidates, self._constraint)
        self._constraint.accept(token)
        llama_cpp.llama_sampler_accept(self._chain, token)
        return token

    def _sample(
        self, logits: NDArray[np.float32], candidates: Candidates, constraint: Constraint
    ) -> int:
        """Sample without the grammar; if it rejects the token, sample again with its mask.

        The token has the same probability as if the mask were applied first. Masks are slow and
        rarely needed (common/sampling.cpp does the same).
        """
        candidates.fill(logits)
        candidates.apply(self._chain)
        sampled = candidates.selected
        if sampled is not None and constraint.allows(sampled):
            return sampled
        if candidates.fill(logits, constraint.allowed()):
            candidates.apply(self._chain)
            if (sampled := candidates.selected) is not None:
                return sampled
        # The grammar allows only an end token, which the request bans.
        for token in self._ends:
            if constraint.allows(token):
                return token
        raise DeadEnd("no token of this model can follow")

    def close(self) -> None:
        """Free the chain and its samplers."""
        if self._chain:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def _add_bias(self, sampling: Sampling, vocabulary: Vocabulary) -> None:
        # A bias of -100 bans a token (contract 2.1).
        biases = [(t, bias if bias > -100 else -math.inf) for t, bias in sampling.logit_bias]
        if sampling.extras.get("ignore_eos"):
            biases += [(token, -math.inf) for token in vocabulary.ends]
        if biases:
            self._add_biases(biases, vocabulary.size)

    def _add_biases(self, biases: Sequence[tuple[int, float]], size: int) -> None:
        entries = [llama_cpp.llama_logit_bias(token, bias) for token, bias in biases]
        array = (llama_cpp.llama_logit_bias * len(entries))(*entries)
        self._add(llama_cpp.llama_sampler_init_logit_bias(size, len(entries), array))

    def _add_dry(self, dry: Dry, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        sampler = copied(vocabulary, dry)
        # Repetitions in the prompt count as well.
        for token in prompt[len(prompt) - min(dry.last, len(prompt)) :]:
            llama_cpp.llama_sampler_accept(sampler, token)
        self._add(sampler)

    def _add_mirostat(self, sampling: Sampling, seed: int, size: int) -> None:
        extras = sampling.extras
        tau, eta = extras.get("mirostat_tau", 5.0), extras.get("mirostat_eta", 0.1)
        self._add(llama_cpp.llama_sampler_init_temp(sampling.temperature))
        if extras["mirostat"] == 1:
            self._add(llama_cpp.llama_sampler_init_mirostat(size, seed, tau, eta, 100))
        else:
            self._add(llama_cpp.llama_sampler_init_mirostat_v2(seed, tau, eta))

    def _add_truncation(self, sampling: Sampling, extras: Any, seed: int) -> None:
        if (sigma := extras.get("top_n_sigma", -1.0)) > 0:
            self._add(llama_cpp.llama_sampler_init_top_n_sigma(sigma))
        if (top_k := extras.get("top_k", 0)) > 0:
            self._add(llama_cpp.llama_sampler_init_top_k(top_k))
        if (typical := extras.get("typical_p", 1.0)) < 1:
            self._add(llama_cpp.llama_sampler_init_typical(typical, 1))
        if sampling.top_p < 1:
            self._add(llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1))
        if (min_p := extras.get("min_p", 0.0)) > 0:
            self._add(llama_cpp.llama_sampler_init_min_p(min_p, 1))
        if (probability := extras.get("xtc_probability", 0.0)) > 0:
            threshold = extras.get("xtc_threshold", 0.1)
            self._add(llama_cpp.llama_sampler_init_xtc(probability, threshold, 1, seed))

    def _add_temperature(self, sampling: Sampling, extras: Any) -> None:
        if spread := extras.get("dynatemp_range", 0.0):
            exponent = extras.get("dynatemp_exponent", 1.0)
            self._add(llama_cpp.llama_sampler_init_temp_ext(sampling.temperature, spread, exponent))
        elif sampling.temperature != 1.0:
            self._add(llama_cpp.llama_sampler_init_temp(sampling.temperature))


class LongSampler(Sampler):
    """A sampler that bans end tokens for the first `min_tokens` tokens.

    A grammar that allows only an end token ends the text earlier.
    """

    def __init__(self, sampling: Sampling, *arguments: Any) -> None:
        super().__init__(sampling, *arguments)
        self._left: int = sampling.extras["min_tokens"]

    @override
    def sample(self, context: Context, rows: Rows, candidates: Candidates) -> int:
        token = super().sample(context, rows, candidates)
        self._left -= 1
        if self._left == 0:
            # The ban is the first sampler of the chain.
            llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(self._chain, 0))
        return token

    def _add_bias(self, sampling: Sampling, vocabulary: Vocabulary) -> None:
        self._add_biases([(token, -math.inf) for token in vocabulary.ends], vocabulary.size)
        super()._add_bias(sampling, vocabulary)
