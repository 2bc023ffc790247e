"""Conversion of logits to log-probabilities, many rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..base import Alternative, Token
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
