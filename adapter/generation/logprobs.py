"""Turn tokens into log-probabilities in OpenAI's shapes (sans-I/O).

Contract 2.6 defines the legacy shape, contract 3.4 the shape for chat.
"""

from __future__ import annotations

import math
from codecs import utf_8_decode
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...backends.base import Alternative, Token
from ...schemas.openai.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob

if TYPE_CHECKING:
    from ...schemas.openai.completions import CompletionLogprobs

# The log-probability of an impossible token (contract 2.6); JSON has no infinity.
FLOOR = -9999.0


class Entry(NamedTuple):
    """A token that is shown.

    Args:
        offset: the number of code points in the text before it, or before the character that it
            continues.
        hidden: the ids of the tokens before it that are not shown: reasoning, and markers.
    """

    token: Token
    offset: int
    hidden: tuple[int, ...] = ()


class TokenAligner:
    """A queue that sets the offsets of tokens, until no stop sequence can cut them off.

    A token is kept if its first byte comes before the cut (contract 2.5). It is released as soon
    as the stop matcher has released that byte.

    Args:
        base: the offset of the first token, in code points; the length of the prompt if the prompt
            is not echoed.
        position: the number of bytes before the first token, as `take` counts them.
        incomplete: the bytes of a character that begins before the first token.
    """

    def __init__(self, base: int, position: int = 0, incomplete: bytes = b"") -> None:
        self._offset = base
        self._incomplete = incomplete
        self._position = position
        self._waiting: deque[tuple[int, Entry]] = deque()

    def place(self, tokens: Iterable[Token]) -> list[Entry]:
        """Return the entries of the prompt's tokens, which no stop sequence can cut off."""
        return [self._entry(token) for token in tokens]

    def add(self, tokens: Iterable[Token]) -> None:
        """Add generated tokens to the queue."""
        for token in tokens:
            self._waiting.append((self._position, self._entry(token)))
            self._position += len(token.data)

    def take(self, end: int) -> list[Entry]:
        """Remove the tokens whose first byte comes before byte `end`; return their entries."""
        entries = []
        while self._waiting and self._waiting[0][0] < end:
            entries.append(self._waiting.popleft()[1])
        return entries

    def take_whole(self, end: int) -> list[Entry]:
        """Remove the tokens that end at byte `end` or before it; return their entries."""
        entries = []
        while self._waiting:
            start, entry = self._waiting[0]
            if start >= end or start + len(entry.token.data) > end:
                break
            entries.append(entry)
            self._waiting.popleft()
        return entries

    def take_all(self) -> list[Entry]:
        """Remove all tokens, when none is cut off; return their entries."""
        entries = [entry for _, entry in self._waiting]
        self._waiting.clear()
        return entries

    def _entry(self, token: Token) -> Entry:
        data, offset, incomplete = token.data, self._offset, self._incomplete
        if data:
            if incomplete:
                # A token that does not continue the character comes after its U+FFFD.
                offset += not _continues(incomplete, data)
                data = incomplete + data
            text, size = utf_8_decode(data, "replace", False)
            self._incomplete = data[size:]
            self._offset += len(text)
        return Entry(token, offset)


def _continues(incomplete: bytes, data: bytes) -> bool:
    """Return True if the first byte of data belongs to an incomplete character before it."""
    try:
        utf_8_decode(incomplete + data[:1], "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def to_legacy(entries: Sequence[Entry], top: int, ids: bool = False) -> CompletionLogprobs:
    """Return the `logprobs` of `/v1/completions`.

    Args:
        top: the request's `logprobs`.
        ids: the request's `logprobs_token_ids`.
    """
    found: CompletionLogprobs = {
        "tokens": [_legacy_spelling(entry.token.spelling) for entry in entries],
        "token_logprobs": [
            None if entry.token.logprob is None else _finite(entry.token.logprob)
            for entry in entries
        ],
        "top_logprobs": [_legacy_top(entry.token) for entry in entries] if top else None,
        "text_offset": [entry.offset for entry in entries],
    }
    if ids:
        found["token_ids"] = [entry.token.id for entry in entries]
        found["top_token_ids"] = [_top_ids(entry.token) for entry in entries] if top else None
    return found


def to_chat(entries: Sequence[Entry]) -> ChatLogprobs:
    """Return the `logprobs` of `/v1/chat/completions`."""
    return {"content": [_chat_entry(entry.token) for entry in entries], "refusal": None}


def to_chat_with_ids(entries: Sequence[Entry]) -> ChatLogprobs:
    """Return the `logprobs` of chat with the model's ids: the request's `logprobs_token_ids`."""
    shown = to_chat(entries)
    for entry, found in zip(entries, shown["content"], strict=True):
        found["id"] = entry.token.id
        found["hidden_token_ids"] = [*entry.hidden]
        for alternative, one in zip(entry.token.top, found["top_logprobs"], strict=True):
            one["id"] = alternative.id
    return shown


def mean(entries: Sequence[Entry], end: Token | None) -> float:
    """Return the mean log-probability of a choice's tokens and of its end token (contract 2.8)."""
    tokens = [entry.token for entry in entries] + ([end] if end is not None else [])
    values = [_finite(token.logprob) for token in tokens if token.logprob is not None]
    return math.fsum(values) / len(values) if values else FLOOR


def to_response(entries: Sequence[Entry]) -> list[ChatTokenLogprob]:
    """Return the `logprobs` of `/v1/responses`, where `bytes` is never null (contract 9.1)."""
    shown = [_chat_entry(entry.token) for entry in entries]
    for token in shown:
        for one in (token, *token["top_logprobs"]):
            one["bytes"] = one["bytes"] or []
    return shown


def _legacy_top(token: Token) -> dict[str, float] | None:
    """Return the log-probabilities of the most likely tokens and of the token itself.

    If two of them have the same spelling, the higher log-probability counts.
    """
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    own = (token.spelling, token.logprob)
    for data, logprob in (*((other.spelling, other.logprob) for other in token.top), own):
        spelling = _legacy_spelling(data)
        top[spelling] = max(top.get(spelling, FLOOR), _finite(logprob))
    return top


def _top_ids(token: Token) -> dict[str, int] | None:
    """Return the ids for the keys of `_legacy_top`."""
    if token.logprob is None:
        return None
    found: dict[str, int] = {}
    best: dict[str, float] = {}
    own = Alternative(token.id, token.spelling, token.control, token.logprob)
    for other in (*token.top, own):
        spelling = _legacy_spelling(other.spelling)
        if spelling not in best or other.logprob > best[spelling]:
            found[spelling], best[spelling] = other.id, other.logprob
    return found


def _chat_entry(token: Token) -> ChatTokenLogprob:
    assert token.logprob is not None, "a generated token"
    return {
        "token": _chat_spelling(token.spelling),
        "logprob": _finite(token.logprob),
        "bytes": None if token.control else list(token.spelling),
        "top_logprobs": [_chat_top(alternative) for alternative in token.top],
    }


def _chat_top(alternative: Alternative) -> TopLogprob:
    return {
        "token": _chat_spelling(alternative.spelling),
        "logprob": _finite(alternative.logprob),
        "bytes": None if alternative.control else list(alternative.spelling),
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def _legacy_spelling(data: bytes) -> str:
    """Return a token as text, or its bytes as `bytes:\\xNN…` if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + _escaped(data)


def _chat_spelling(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _escaped(data)


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
