"""Tokens and their bytes.

llama.cpp searches for control tokens one by one, and copies the rest of the text each time. 400 KB
of control tokens take 2.5 s, and four times as much takes sixteen times as long. A call cannot be
interrupted. So a long text is split before control tokens, where this does not change the result,
and tokenized in pieces.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain

import llama_cpp

from ...schemas.limits import WORD
from ..base import Special, TokenIds
from ..errors import WordTooLong
from ..sentencepiece import decode_piece
from ..spellings import Spellings
from .library import Calls, LoadedModel

# The minimum size of a piece in bytes; the last piece may be smaller.
PIECE = 4_096


def tokenize(
    vocabulary: object, data: bytes, add_special: bool, parse_special: bool
) -> tuple[int, ...]:
    """Return the token ids of a UTF-8 text, without splitting it.

    Args:
        vocabulary: llama.cpp's pointer.
    """
    # There is rarely more than one token per byte, and BOS, EOS and a space may be added. Spaces
    # that are not in the vocabulary take three tokens each; then a second call is needed.
    capacity = len(data) + 3
    while True:
        buffer = (llama_cpp.llama_token * capacity)()
        count: int = llama_cpp.llama_tokenize(
            vocabulary, data, len(data), buffer, capacity, add_special, parse_special
        )
        if count >= 0:
            return tuple(buffer[:count])
        capacity = -count


class Cutter:
    """A splitter of texts before control tokens.

    Args:
        special: the tokens that the tokenizer finds anywhere in a text: the spelling of each, and
            True if the token includes the whitespace before it.
    """

    def __init__(self, special: Iterable[tuple[bytes, bool]]) -> None:
        spellings = dict(special)
        beginnings = {text[:end] for text in spellings for end in range(1, len(text) + 1)}
        ends = {text[start:] for text in spellings for start in range(len(text))}
        inner = _inner(spellings)
        safe = [
            spelling
            for spelling, takes_whitespace in spellings.items()
            if not takes_whitespace
            and spelling not in inner
            and not _may_overlap(spelling, beginnings, ends)
        ]
        self._spellings = Spellings(safe)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces of a text, which can be tokenized one by one."""
        start = 0
        while len(data) - start > PIECE:
            found = next(self._spellings.matches(data, start + PIECE), None)
            if found is None:
                break
            yield data[start : found.start()]
            start = found.start()
        yield data[start:]


def _inner(spellings: Collection[bytes]) -> set[bytes]:
    """Return the parts of spellings that are as long as another one, of which they may be.

    Gemma 3 has 6,000 special tokens; to search each one in all others takes seconds.
    """
    sizes = {len(spelling) for spelling in spellings}
    return {
        spelling[start : start + size]
        for spelling in spellings
        for size in sizes
        if size < len(spelling)
        for start in range(len(spelling) - size + 1)
    }


def _may_overlap(spelling: bytes, beginnings: set[bytes], ends: set[bytes]) -> bool:
    """Return True if another token could overlap an edge of a spelling."""
    size = len(spelling)
    return any(spelling[start:] in beginnings for start in range(1, size)) or any(
        spelling[:end] in ends for end in range(1, size)
    )


# The comparisons with a special token that take as long as the rest of the work on a character.
_COMPARED = 20
# The size of the cache of strings and the tokens that they spell.
MOST_SPECIALS = 64


# A call that finds the next run of characters holds the interpreter lock, so long runs have parts.
_PART = 65_536
_RUN = re.compile(rf"\S{{1,{_PART}}}+|\s{{1,{_PART}}}+")


class Vocabulary:
    """A model's vocabulary; thread-safe, because everything that it caches can be recomputed.

    `pieces` has the exact bytes that each token adds to the text, by token id. They may end inside
    a character, and are empty for control and end tokens.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.pointer = model.vocab
        # What uses `pointer` in other threads than the engine's is counted here.
        self.calls = Calls()
        self.size: int = llama_cpp.llama_vocab_n_tokens(self.pointer)
        self.ends = frozenset(
            token for token in range(self.size) if llama_cpp.llama_vocab_is_eog(self.pointer, token)
        )
        self.pieces = [self._piece(token, special=False) for token in range(self.size)]
        self._spellings: dict[int, bytes] = {}
        # These tables are made here, because a loop over all tokens would block the event loop.
        self._added = self._with(llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED, range(self.size))
        # The control tokens and the added ones.
        self._marked = [
            token for token, piece in enumerate(self.pieces) if not piece or token in self._added
        ]
        spelled = [self.token(token)[0] for token in self._marked]
        # The length of the longest token in bytes.
        self.longest = max(map(len, chain(self.pieces, spelled)))
        # The cutters for texts without and with `parse_special`.
        self._cutters = self._new_cutters()
        # The usual first character of special tokens, and the number of tokens with it.
        self._first, self._first_count = self._usual_first()
        # The tokens that stop sequences spell: all jobs of a request look up the same ones.
        self._specials: dict[str, int | None] = {}
        self.adds_bos: bool = llama_cpp.llama_vocab_get_add_bos(self.pointer)
        self.bos_id: int = llama_cpp.llama_vocab_bos(self.pointer)
        self.bos = self._spelling(self.bos_id)
        self.eos = self._spelling(llama_cpp.llama_vocab_eos(self.pointer))
        # If the tokenizer appends EOS or SEP to a text, it would append one to every piece.
        self._ends_texts = bool(
            llama_cpp.llama_vocab_get_add_eos(self.pointer)
            or llama_cpp.llama_vocab_get_add_sep(self.pointer)
        )
        self.adds_space = self.pieces[self._tokens("a")[0]][:1] == b" "
        ends = (
            llama_cpp.llama_vocab_fim_pre(self.pointer),
            llama_cpp.llama_vocab_fim_suf(self.pointer),
            llama_cpp.llama_vocab_fim_mid(self.pointer),
        )
        self.fim: tuple[int, int, int] | None = ends if min(ends) >= 0 else None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """Return the token ids of a text, as llama.cpp tokenizes it.

        Raises:
            WordTooLong: a word or a run of whitespace is too long.
            EngineError: the engine was shut down.
        """
        if len(text) > WORD.maximum:
            _check_runs(text)
        data = text.encode()
        with self.calls.counted():
            if len(data) <= PIECE or self._ends_texts:
                return tokenize(self.pointer, data, add_special, parse_special)
            ids: list[int] = []
            for piece in self._cutters[parse_special].pieces(data):
                ids += tokenize(self.pointer, piece, add_special and not ids, parse_special)
            return tuple(ids)

    def weight(self, text: str) -> int:
        """Return the length of ordinary text that takes as long to tokenize as a text.

        llama.cpp compares each special token with each place that begins like it. With the 256
        tokens of Llama 3, 16 KB of `<` take ten times as long as words.
        """
        return len(text) + text.count(self._first) * self._first_count // _COMPARED

    def _with(self, attribute: int, tokens: Iterable[int]) -> frozenset[int]:
        """Return the tokens that have one of llama.cpp's attributes."""
        attributes = llama_cpp.llama_vocab_get_attr
        return frozenset(one for one in tokens if attributes(self.pointer, one) & attribute)

    def _new_cutters(self) -> tuple[Cutter, Cutter]:
        take_whitespace = self._with(llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP, self._marked)
        control: list[tuple[bytes, bool]] = []
        added: list[tuple[bytes, bool]] = []
        for token in self._marked:
            spelling, is_control = self.token(token)
            if spelling:
                (control if is_control else added).append((spelling, token in take_whitespace))
        return Cutter(added), Cutter([*added, *control])

    def _usual_first(self) -> tuple[str, int]:
        # An empty piece begins like any.
        likely = (token for token in self._marked if self.pieces[token][:1] in b"<[")
        firsts = Counter(self.token(token)[0][:1].decode(errors="replace") for token in likely)
        del firsts[""]
        return firsts.most_common(1)[0] if firsts else ("<", 0)

    def close(self) -> None:
        """Wait for the calls of other threads, and reject later ones."""
        self.calls.close()

    def detokenize(self, ids: TokenIds) -> bytes:
        """Return a prompt's text, with control tokens spelled out and without added spaces."""
        return b"".join(self.shown(ids))

    def shown(self, ids: TokenIds, text: bytes | None = None) -> list[bytes]:
        """Return the bytes that each token of a prompt shows; see `sentencepiece.decode_piece`."""
        return decode_piece([self.token(token) for token in ids], self.adds_space, text)

    def token(self, token: int) -> tuple[bytes, bool]:
        """Return a token's spelling, and True if it is a control token."""
        data = self.pieces[token]
        if data:
            return data, False
        spelling = self._spellings.get(token)
        if spelling is None:
            with self.calls.counted():
                spelling = self._spellings[token] = self._piece(token, special=True)
        return spelling, True

    @cached_property
    def special_count(self) -> int:
        """The number of special tokens that the tokenizer adds to a text: BOS, EOS, CLS, SEP."""
        return len(self.tokenize("", add_special=True, parse_special=False))

    @cached_property
    def covers_texts(self) -> bool:
        """True if the tokens of a text cover all of its bytes.

        WordPiece and Unigram drop whitespace, and have one token for any unknown word.
        """
        with self.calls.counted():
            kind = llama_cpp.llama_vocab_type(self.pointer)
        return kind not in (llama_cpp.LLAMA_VOCAB_TYPE_WPM, llama_cpp.LLAMA_VOCAB_TYPE_UGM)

    @cached_property
    def specials(self) -> tuple[Special, ...]:
        """The control tokens and the added ones, except those without a spelling."""
        spelled = map(self.token, self._marked)
        return tuple(
            Special(spelling.decode(errors="replace"), control)
            for spelling, control in spelled
            if spelling
        )

    def is_added(self, token: int) -> bool:
        """Return True if a token was added to the vocabulary (user-defined), not learnt."""
        return token in self._added

    def control_token(self, spelling: str) -> int | None:
        """Return the control token that a string spells, or None unless it is exactly one."""
        token = self.special_token(spelling)
        return token if token is not None and not self.pieces[token] else None

    def special_token(self, spelling: str) -> int | None:
        """Return the control or added token that a string spells, or None unless exactly one."""
        token = self._specials.get(spelling, -1)
        if token == -1:
            token = self._special_token(spelling)
            if len(self._specials) >= MOST_SPECIALS:
                self._specials.clear()
            self._specials[spelling] = token
        return token

    def _special_token(self, spelling: str) -> int | None:
        # Whitespace before a token may be part of it.
        if len(spelling.strip()) > self.longest:
            return None
        ids = self.tokenize(spelling, add_special=False, parse_special=True)
        if len(ids) == 1 and (not self.pieces[ids[0]] or self.is_added(ids[0])):
            return ids[0]
        return None

    def _tokens(self, text: str) -> TokenIds:
        return self.tokenize(text, add_special=False, parse_special=False)

    def _spelling(self, token: int) -> str:
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    def _piece(self, token: int, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_token_to_piece(self.pointer, token, buffer, 256, 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = llama_cpp.llama_token_to_piece(self.pointer, token, buffer, -size, 0, special)
        return buffer.raw[:size]


def _check_runs(text: str) -> None:
    """Reject a word, or a run of whitespace, that overflows the stack in llama.cpp's recursion."""
    begin, is_continued = 0, False
    for run in _RUN.finditer(text):
        start, end = run.span()
        if not is_continued or text[start].isspace() != text[begin].isspace():
            begin = start
        if end - begin > WORD.maximum:
            raise WordTooLong(WORD.maximum, text[begin : begin + 20])
        is_continued = end - start == _PART
