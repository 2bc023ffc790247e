"""A sequence's sampler chain, with llama.cpp's samplers in its order (common/sampling.cpp).

To create a DRY sampler, llama.cpp compares each sequence breaker with every token of the
vocabulary. With a large vocabulary this takes a second, too long for the engine's thread. It is
therefore created once for its settings, and cloned for each choice.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from .. import offload
from ..base import BREAKERS, Sampling
from .grammars import Candidates, Constraint
from .sampling import Sampler, biases_of
from .vocabulary import Vocabulary

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
    # Nobody would free a sampler, or the lock, that work had when it was abandoned.
    with offload.shielded():
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
    breakers = (ctypes.c_char_p * len(dry.breakers))(*dry.breakers)
    with vocabulary.calls.counted():
        sampler: object = llama_cpp.llama_sampler_init_dry(
            vocabulary.pointer, dry.multiplier, dry.base, dry.allowed_length, dry.last, breakers,
            len(breakers),
        )  # fmt: skip
        return sampler


# The extras that only llama.cpp's samplers know, and the values that disable them.
_EXTRAS = {
    "min_tokens": 0, "repeat_penalty": 1.0, "dry_multiplier": 0.0, "mirostat": 0,
    "top_n_sigma": -1.0, "typical_p": 1.0, "xtc_probability": 0.0, "dynatemp_range": 0.0,
    "adaptive_target": -1.0,
}  # fmt: skip
# The extras that can select another than the most likely token at temperature 0.
_AT_ZERO = ("typical_p", "xtc_probability", "dynatemp_range")


def is_needed(sampling: Sampling) -> bool:
    """Return True if a request sets parameters that only llama.cpp's samplers know."""
    return _is_set(sampling.extras, _EXTRAS)


def _is_set(extras: Mapping[str, Any], names: Iterable[str]) -> bool:
    return any(extras.get(name, _EXTRAS[name]) != _EXTRAS[name] for name in names)


class ChainSampler(Sampler):
    """A sampler that runs llama.cpp's samplers.

    OpenAI's penalties count generated tokens only, of which there are at most `max_tokens`. As in
    llama.cpp, `repeat_penalty` counts the last `repeat_last_n` tokens, prompt included.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int | None,
        vocabulary: Vocabulary,
        candidates: Candidates,
        prompt: Sequence[int],
        max_tokens: int,
        context: int,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(vocabulary.ends, constraint)
        self._candidates = candidates
        self._chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        seed = secrets.randbits(32) if seed is None else seed % (2**32 - 1)
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
        if sampling.temperature <= 0 and not _is_set(extras, _AT_ZERO):
            self._add(llama_cpp.llama_sampler_init_greedy())
        elif extras.get("mirostat"):
            self._add_mirostat(sampling, seed, size)
        else:
            self._add_truncation(sampling, extras, seed)
            self._add_temperature(sampling, extras)
            if (target := extras.get("adaptive_target", -1.0)) >= 0:
                decay = extras.get("adaptive_decay", 0.9)
                self._add(llama_cpp.llama_sampler_init_adaptive_p(target, decay, seed))
            else:
                self._add(llama_cpp.llama_sampler_init_dist(seed))

    @override
    def close(self) -> None:
        if self._chain:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None

    @override
    def _select(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> int | None:
        if not self._candidates.fill(logits, allowed):
            return None
        self._candidates.apply(self._chain)
        return self._candidates.selected

    @override
    def _accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._chain, token)

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def _add_bias(self, sampling: Sampling, vocabulary: Vocabulary) -> None:
        biases = biases_of(sampling, vocabulary)
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


class LongSampler(ChainSampler):
    """A sampler that bans end tokens for the first `min_tokens` tokens.

    A grammar that allows only an end token ends the text earlier.
    """

    def __init__(self, sampling: Sampling, *arguments: Any) -> None:
        super().__init__(sampling, *arguments)
        self._left: int = sampling.extras["min_tokens"]

    @override
    def _accept(self, token: int) -> None:
        super()._accept(token)
        self._left -= 1
        if self._left == 0:
            # The ban is the first sampler of the chain.
            llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(self._chain, 0))

    def _add_bias(self, sampling: Sampling, vocabulary: Vocabulary) -> None:
        self._add_biases([(token, -math.inf) for token in vocabulary.ends], vocabulary.size)
        super()._add_bias(sampling, vocabulary)
