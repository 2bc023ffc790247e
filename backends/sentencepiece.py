"""The text of prompt tokens for tokenizers that add spaces in front of words (sans-I/O)."""

from __future__ import annotations

from collections.abc import Sequence


def decode_piece(
    tokens: Sequence[tuple[bytes, bool]], adds_space: bool, text: bytes | None = None
) -> list[bytes]:
    """Return each token's bytes without the space that the tokenizer added in front of it.

    SentencePiece adds a space before the text and after each control token, so that a word at a
    start has the same piece as elsewhere (`llm_tokenizer_spm` in llama-vocab.cpp).

    Args:
        tokens: each token's spelling, and True if it is a control token.
        adds_space: True if the tokenizer adds such spaces.
        text: the tokenized text, if known; its own spaces are kept.
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
    """Return a piece as the text has it: with its space or without.

    A piece that is not in the text, since the tokenizer rewrote it, is returned unchanged.
    """
    if not text.startswith(spelling, position) and spelling[:1] == b" ":
        stripped = spelling[1:]
        if text.startswith(stripped, position):
            return stripped
    return spelling
