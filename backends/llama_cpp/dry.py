"""The DRY sampler: created once for its settings, and cloned for each choice.

To create one, llama.cpp compares each sequence breaker with every token of the vocabulary. With a
large vocabulary this takes a second, too long for the engine's thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import llama_cpp

from .vocabulary import Vocabulary

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
