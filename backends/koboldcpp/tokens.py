"""The tokens that koboldcpp reports after a call, aligned with the call's text (sans-I/O).

koboldcpp reports log-probabilities after sampling, so they are the model's own only with neutral
sampling parameters. Its lowest probability is 1e-4, and it lists at most ten alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...schemas.native.koboldcpp import LastLogprobs, TokenLogprob
from ..base import Alternative, Generation, Sampling, Token
from ..errors import EngineError, Unsupported, parse_logprob
from .translate import ENGINE

MOST = 10
# The logarithm of 1e-4, which is reported for every lower probability.
FLOOR = -9.2103


class CallTokens(NamedTuple):
    """The tokens of a call.

    Args:
        tokens: the tokens of its text.
        end: the end token of the call, or None.
        inexact: True if a token is less likely than the engine can report, or its bytes are a
            guess.
    """

    tokens: list[Token]
    end: Token | None
    inexact: bool


def check(job: Generation) -> None:
    """Raise `Unsupported` for log-probabilities that koboldcpp does not report."""
    if job.prompt.logprobs is not None:
        raise Unsupported(
            "logprobs",
            ENGINE,
            "For log-probabilities of the prompt ('echo'), use the in-process engine or "
            "llama-server.",
        )
    if job.logprobs is None:
        return
    neutral = replace(job.sampling, extras={}) == Sampling(extras={}) and not job.sampling.extras
    if job.grammar is not None:
        raise Unsupported(
            "logprobs",
            ENGINE,
            "It returns log-probabilities after the grammar. Omit 'response_format', grammars, "
            "strict tools and a 'tool_choice' that forces a call, or use the in-process engine or "
            "llama-server.",
        )
    if not neutral:
        raise Unsupported(
            "logprobs",
            ENGINE,
            "It returns log-probabilities after sampling. Omit temperature, top_p, penalties, "
            "logit_bias and all other samplers, or use the in-process engine or llama-server.",
        )
    if job.logprobs > MOST:
        raise Unsupported(
            "top_logprobs",
            ENGINE,
            f"It returns at most {MOST}. Send a smaller value, or use llama-server.",
        )


def read(
    last: LastLogprobs, text: bytes, ended: bool, top: int, control: frozenset[str]
) -> CallTokens:
    """Return a call's tokens, each with its bytes in the text.

    koboldcpp drops broken UTF-8, so tokens inside a character are empty. A run of them fills the
    text up to the next token that is found. If the run has one byte per token, the bytes are exact;
    otherwise they are a guess.

    Args:
        text: the text of the call.
        ended: True if an end token closed the call.
        control: the spellings of the known control tokens.

    Raises:
        EngineError: the tokens are not those of the text.
    """
    entries = last["content"]
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
            # A stop sequence cut it off.
            tokens.append(_token(entry, text[position:], top, control))
            position = len(text)
        else:
            tokens.append(_token(entry, b"", top, control | {entry["token"]}))
    inexact |= 0 < len(waiting) != len(text) - position
    tokens += _shared(waiting, text[position:], top, control)
    if b"".join(token.data for token in tokens) != text:
        raise EngineError(f"{ENGINE} returned the tokens of another text.")
    low = any(token.logprob is not None and token.logprob <= FLOOR for token in tokens)
    return CallTokens(tokens, end, inexact or low)


def _shared(
    entries: Sequence[TokenLogprob], data: bytes, top: int, control: frozenset[str]
) -> list[Token]:
    """Return tokens inside characters, with equal shares of the bytes."""
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
        parse_logprob(entry["logprob"]),
        alternatives[:top],
    )
