"""The tokens that koboldcpp tells when a call has ended, laid on the call's text (sans-I/O).

It tells log-probabilities after sampling, so they are the model's own only where nothing shapes
them; 1e-4 is the least probability that it knows, and ten alternatives the most it tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...schemas.native.koboldcpp import LastLogprobs, TokenLogprob
from ..base import Alternative, Generation, Sampling, Token
from ..errors import EngineError, Unsupported, told_logprob
from .translate import ENGINE

MOST = 10
# The logarithm of 1e-4, which stands for everything below it too.
FLOOR = -9.2103


class Told(NamedTuple):
    """A call's tokens.

    Args:
        tokens: those of its text.
        end: the end token that closed it, if one did.
        inexact: whether one is less likely than the engine can tell, or its bytes are not known.
    """

    tokens: list[Token]
    end: Token | None
    inexact: bool


def check(job: Generation) -> None:
    """Raise `Unsupported` for log-probabilities that it does not know."""
    if job.prompt.logprobs is not None:
        raise Unsupported(
            "logprobs",
            ENGINE,
            "With 'echo', the in-process engine and llama-server tell those of the prompt.",
        )
    if job.logprobs is None:
        return
    neutral = replace(job.sampling, extras={}) == Sampling(extras={}) and not job.sampling.extras
    if not neutral or job.grammar is not None:
        raise Unsupported(
            "logprobs",
            ENGINE,
            "It tells what is left after sampling: leave out temperature, top_p, penalties, biases "
            "and all else that shapes it, or use the in-process engine or llama-server.",
        )
    if job.logprobs > MOST:
        raise Unsupported(
            "top_logprobs", ENGINE, f"It tells at most {MOST}; llama-server tells all."
        )


def read(told: LastLogprobs, text: bytes, ended: bool, top: int, control: frozenset[str]) -> Told:
    """A call's tokens, each with the bytes that it has in the text.

    What was decoded with broken UTF-8 left out is empty: a run of such tokens fills the text up to
    the next that is found. If it has as many bytes, each is one; else who has which is a guess.

    Args:
        text: the call's text.
        ended: whether an end token closed the call.
        control: how the control tokens that are known are spelled.

    Raises:
        EngineError: the tokens are not those of the text.
    """
    entries = told["content"]
    end = _token(entries[-1], b"", top, control | {entries[-1]["token"]}) if ended else None
    entries = entries[:-1] if ended else entries
    tokens: list[Token] = []
    waiting: list[TokenLogprob] = []
    position, inexact = 0, False
    for entry in entries:
        if position == len(text) and not waiting:
            break
        data = entry["token"].encode()
        found = text.find(data, position) if data else -1
        if not data:
            waiting.append(entry)
        elif found == position or (found > position and waiting):
            inexact |= 0 < len(waiting) != found - position
            tokens += _shared(waiting, text[position:found], top, control)
            tokens.append(_token(entry, data, top, control))
            waiting, position = [], found + len(data)
        elif data.startswith(text[position:]):
            # A stop cut it off.
            tokens.append(_token(entry, text[position:], top, control))
            position = len(text)
        else:
            tokens.append(_token(entry, b"", top, control | {entry["token"]}))
    inexact |= 0 < len(waiting) != len(text) - position
    tokens += _shared(waiting, text[position:], top, control)
    if b"".join(token.data for token in tokens) != text:
        raise EngineError(f"{ENGINE} told the tokens of another text.")
    low = any(token.logprob is not None and token.logprob <= FLOOR for token in tokens)
    return Told(tokens, end, inexact or low)


def _shared(
    entries: Sequence[TokenLogprob], data: bytes, top: int, control: frozenset[str]
) -> list[Token]:
    """Tokens inside characters, with even shares of the bytes."""
    count = len(entries)
    bounds = [index * len(data) // count for index in range(count + 1)] if count else []
    return [
        _token(entry, data[bounds[i] : bounds[i + 1]], top, control)
        for i, entry in enumerate(entries)
    ]


def _token(entry: TokenLogprob, data: bytes, top: int, control: frozenset[str]) -> Token:
    spelling = entry["token"].encode()
    is_control = entry["token"] in control
    alternatives = tuple(
        Alternative(
            other["token_id"], other["token"].encode(), other["token"] in control, other["logprob"]
        )
        for other in entry["top_logprobs"]
        if other["logprob"] > FLOOR and other["token"]
    )
    return Token(
        entry["token_id"],
        b"" if is_control else data,
        spelling if is_control else data,
        is_control,
        told_logprob(entry["logprob"]),
        alternatives[:top],
    )
