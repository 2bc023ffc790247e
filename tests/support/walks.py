"""Random walks through grammars, in which every allowed token can come next."""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import llama_cpp
import numpy as np
from latimer.backends.grammar.gbnf import tokens
from latimer.backends.llama_cpp.grammars import Candidates, Gbnf
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from numpy.typing import NDArray

# Tokens that close a JSON text, preferred so that most walks end.
CLOSING = (b'"', b"}", b"]", b",", b":")


class Next(NamedTuple):
    """The tokens that may follow, those of them that close something, and whether an end may."""

    going: np.ndarray
    closing: np.ndarray
    may_end: bool


class Walker:
    """A random walker over a model's vocabulary, without its probabilities."""

    def __init__(self, model: LoadedModel) -> None:
        self._vocabulary = Vocabulary(model)
        self._candidates = Candidates(self._vocabulary.size)
        pieces = self._vocabulary.pieces
        ends = self._vocabulary.ends
        self._is_end = np.array([token in ends for token in range(len(pieces))])
        # The tokens by their first byte, the longest first.
        self._begins: dict[int, list[int]] = {}
        for token in sorted(range(len(pieces)), key=lambda token: -len(pieces[token])):
            if pieces[token]:
                self._begins.setdefault(pieces[token][0], []).append(token)
        self._closes = np.array([piece in CLOSING for piece in pieces]) & ~self._is_end

    def texts(self, grammar: str, count: int, most: int = 300, toward: str = "") -> list[str]:
        """Return the texts of the walks that end within `most` tokens and are valid UTF-8.

        llama.cpp's grammars also accept invalid UTF-8 as characters.

        Args:
            toward: a text of which most steps add the next part, where the grammar allows it.
        """
        generator = random.Random(1)
        found = []
        known: dict[bytes, Next] | None = None if tokens(grammar) else {}
        for _ in range(count):
            data = self._walk(grammar, generator, most, toward.encode(), known)
            with contextlib.suppress(UnicodeDecodeError):
                found += [] if data is None else [data.decode()]
        return found

    def accepts(self, grammar: str, text: str) -> bool:
        """Return True if a grammar allows a text, and nothing more must follow."""
        pointer = llama_cpp.llama_sampler_init_grammar(
            self._vocabulary.pointer, grammar.encode(), b"root"
        )
        assert pointer, grammar
        own = Gbnf(pointer, self._candidates)
        rest = text.encode()
        pieces = self._vocabulary.pieces
        while rest:
            known = (one for one in self._begins.get(rest[0], ()) if rest.startswith(pieces[one]))
            token = next((one for one in known if own.allows(one)), None)
            if token is None:
                return False
            own.accept(token)
            rest = rest[len(pieces[token]) :]
        return bool((own.allowed() & self._is_end).any())

    def _walk(
        self,
        text: str,
        generator: random.Random,
        most: int,
        toward: bytes,
        known: dict[bytes, Next] | None,
    ) -> bytes | None:
        """Return the text of a walk, or None if it is too long.

        Args:
            known: what may follow each text so far, in a grammar without tokens.
        """
        vocabulary = self._vocabulary.pointer
        pointer = llama_cpp.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
        assert pointer, text
        grammar = Gbnf(pointer, self._candidates)
        data = b""
        for _ in range(most):
            following = None if known is None else known.get(data)
            if following is None:
                following = self._next(grammar)
                if known is not None:
                    known[data] = following
            going, closing, may_end = following
            assert may_end or len(going), (data, text)
            if may_end and (not len(going) or generator.random() < 0.3):
                return data
            some = closing if len(closing) and generator.random() < 0.5 else going
            if toward and generator.random() < 0.7:
                parts = self._parts(toward, data, going, generator)
                some = parts if len(parts) else some
            token = int(some[generator.randrange(len(some))])
            data += self._vocabulary.pieces[token]
            grammar.accept(token)
        return None

    def _parts(
        self, toward: bytes, data: bytes, going: NDArray[np.intp], generator: random.Random
    ) -> NDArray[np.intp]:
        """Return the allowed tokens that continue a text, of which the data may end with a part.

        Sometimes they begin it again, or continue a shorter part.
        """
        sizes = [size for size in range(len(toward)) if data.endswith(toward[:size])]
        begun = generator.choice(sizes) if generator.random() < 0.3 else sizes[-1]
        rest, pieces = toward[begun:], self._vocabulary.pieces
        found = [one for one in self._begins[rest[0]] if rest.startswith(pieces[one])]
        return np.intersect1d(np.array(found, np.intp), going)

    def _next(self, grammar: Gbnf) -> Next:
        allowed = grammar.allowed()
        return Next(
            np.flatnonzero(allowed & ~self._is_end),
            np.flatnonzero(allowed & self._closes),
            bool((allowed & self._is_end).any()),
        )
