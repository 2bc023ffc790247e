"""The vocabulary of a llama-server (sans-I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import orjson

from ..base import TokenIds
from ..pieces import shown


def read_pieces(reply: bytes) -> list[bytes]:
    """Return every token's bytes by id, empty for control tokens.

    Args:
        reply: the response of a `/completion` with one token and an `n_probs` above the size of the
            vocabulary.
    """
    entries = orjson.loads(reply)["completion_probabilities"][0]["top_logprobs"]
    pieces = [b""] * len(entries)
    for entry in entries:
        data, token = entry["bytes"], entry["id"]
        # `bytes` of a number would be that many zeros.
        if type(data) is not list or token < 0:
            raise TypeError("an invalid entry")
        pieces[token] = bytes(data)
    return pieces


def ends_inside(data: bytes) -> bool:
    """Return True if text ends inside a character by llama-server's rule (`validate_utf8`)."""
    for back, lead, mask in ((1, 0xC0, 0xE0), (1, 0xE0, 0xF0), (2, 0xE0, 0xF0), *_FOUR):
        if back <= len(data) and data[-back] & mask == lead:
            return True
    return False


_FOUR = ((1, 0xF0, 0xF8), (2, 0xF0, 0xF8), (3, 0xF0, 0xF8))


class Vocabulary:
    """The exact bytes of every token, by id.

    Args:
        names: the spelling of each control token.
        adds_space: True if the tokenizer adds a space in front of words at a start.
    """

    def __init__(
        self, pieces: Sequence[bytes], names: Mapping[int, bytes], adds_space: bool = False
    ) -> None:
        self.pieces = pieces
        self._names = names
        self._adds_space = adds_space

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        return self.pieces[token]

    def token(self, token: int) -> tuple[bytes, bool]:
        """Return a token's spelling, and True if it is a control token."""
        if token < 0:
            raise IndexError(token)
        data = self.pieces[token]
        return (data, False) if data else (self._names.get(token, b""), True)

    def shown(self, ids: TokenIds, text: bytes | None = None) -> list[bytes]:
        """Return the text of each token of a prompt; see `pieces.shown`."""
        return shown([self.token(token) for token in ids], self._adds_space, text)

    def marks(self, spellings: Iterable[str]) -> dict[int, bytes]:
        """Return the spellings that are tokens, by token id."""
        wanted = {spelling.encode() for spelling in spellings}
        return {self._ids[mark]: mark for mark in wanted if mark in self._ids}

    def index(self) -> None:
        """Build the cached tables; a large vocabulary takes a tenth of a second."""
        _ = self._ids, self.ordinary, self.fragments

    @cached_property
    def _ids(self) -> Mapping[bytes, int]:
        return {self.token(token)[0]: token for token in range(len(self))}

    @cached_property
    def ordinary(self) -> int:
        """The id of a token that is a single letter, which always has an entry."""
        for token, piece in enumerate(self.pieces):
            if len(piece) == 1 and piece.isalpha():
                return token
        raise ValueError("a vocabulary without letters")

    @cached_property
    def fragments(self) -> Mapping[bytes, list[int]]:
        """Ids of the tokens with incomplete characters, by their bytes."""
        found: dict[bytes, list[int]] = {}
        for token, piece in enumerate(self.pieces):
            try:
                piece.decode()
            except UnicodeDecodeError:
                found.setdefault(piece, []).append(token)
        return found
