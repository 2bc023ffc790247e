"""What the tokens of a prompt show, where a tokeniser puts spaces in front of words (sans-I/O)."""

from __future__ import annotations

from collections.abc import Sequence


def shown(
    tokens: Sequence[tuple[bytes, bool]], adds_space: bool, text: bytes | None = None
) -> list[bytes]:
    """Each token's bytes without the space that the tokeniser put in front of it.

    SentencePiece puts a space before the text and before what follows a control token, so that
    words at a start have the same piece as elsewhere (`llm_tokenizer_spm` in llama-vocab.cpp).

    Args:
        tokens: each token's spelling, and whether it is a control token.
        adds_space: whether the tokeniser puts such spaces.
        text: what was tokenised, where that is known: a space that is in it was not put there.
    """
    if not adds_space:
        return [spelling for spelling, _ in tokens]
    result = []
    position, at_start = 0, True
    for spelling, control in tokens:
        data = spelling
        if not control and data[:1] == b" " and at_start:
            data = data[1:]
        if text is not None and not control:
            data = _found(spelling, text, position)
        position += len(data)
        at_start = control
        result.append(data)
    return result


def _found(spelling: bytes, text: bytes, position: int) -> bytes:
    """A piece as it stands in a text: with its space, without it, or rewritten and so as it is."""
    if not text.startswith(spelling, position) and spelling[:1] == b" ":
        stripped = spelling[1:]
        if text.startswith(stripped, position):
            return stripped
    return spelling
