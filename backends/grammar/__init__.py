"""JSON schemas and regular expressions as GBNF, for engines that accept GBNF only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from sys import getsizeof

from ...schemas.limits import SCHEMA
from ..base import Generation, Grammar
from ..errors import InvalidGrammar, shortened
from ..offload import Memo
from .ambiguity import TooManyWays
from .boundaries import Inside, check_boundaries
from .gbnf import (
    MAX_SIZE,
    UnsupportedSchema,
    WrongGrammar,
    check,
    check_size,
    parts_of,
    tokens,
)
from .preamble import after
from .regex import to_gbnf as regex_to_gbnf
from .repetitions import accepted
from .schema import to_gbnf as schema_to_gbnf

_MOST_BYTES = 16 << 20


def _spelled(token: str) -> str:
    """Return the text of a token in GBNF; that of an id is unknown."""
    return "" if token.startswith("<[") else token


def gbnf_of(grammar: Grammar, piece: Callable[[str], str] = _spelled) -> str:
    """Return a grammar as GBNF that is safe to send to an engine.

    Args:
        piece: returns the text of a token in GBNF.

    Raises:
        UnsupportedSchema: GBNF cannot enforce a part of it.
        WrongGrammar: it is invalid, or not safe to send to an engine.
    """
    check_length(grammar)
    text = grammar.text
    if grammar.kind == "json_schema":
        text = schema_to_gbnf(text)
    elif grammar.kind == "regex":
        text = regex_to_gbnf(text)
    found = check(text, SCHEMA.maximum)
    if grammar.after is not None:
        text = after(text, grammar.after)
        found = check(text, SCHEMA.maximum)
    if found and not grammar.is_own:
        # The adapter's own have no token where it could be inside another, and may be very large.
        _check_tokens(text, piece)
    return accepted(text)


def _check_tokens(text: str, piece: Callable[[str], str]) -> None:
    """Raise `WrongGrammar` if tokens in checked GBNF could end llama.cpp."""
    try:
        check_boundaries(parts_of(text), piece)
    except Inside as error:
        raise WrongGrammar(
            f"'{shortened(str(error))}' can come after characters that end inside a token, and "
            "llama.cpp would crash; put it at the start or after another token, or use a set of "
            "characters instead"
        ) from None
    except TooManyWays:
        raise WrongGrammar("it has too many tokens after characters") from None


def check_length(grammar: Grammar) -> None:
    """Raise `WrongGrammar` for a text that is too long to parse."""
    is_schema = grammar.kind == "json_schema" or grammar.is_own
    check_size(grammar.text, SCHEMA.maximum if is_schema else MAX_SIZE)


def as_gbnf(grammar: Grammar) -> str:
    """Return a grammar as GBNF, like `gbnf_of`, with errors that name the request's field.

    Raises:
        InvalidGrammar: it is invalid; the error names the field, and the place inside a schema.
    """
    try:
        return gbnf_of(grammar)
    except (UnsupportedSchema, WrongGrammar) as error:
        raise in_request(error, grammar) from None


def in_request(error: UnsupportedSchema | WrongGrammar, grammar: Grammar) -> InvalidGrammar:
    """Return the error of a grammar with the name of the request's field."""
    if isinstance(error, UnsupportedSchema):
        return InvalidGrammar(grammar.param + error.where, error.reason)
    return InvalidGrammar(grammar.param, str(error))


# The size of a cache entry without its texts, in bytes.
_ENTRY = 512
_known: Memo[Grammar, str] = Memo(
    _MOST_BYTES, lambda key, text: _ENTRY + getsizeof(key.text) + getsizeof(text)
)


async def with_gbnf(job: Generation) -> Generation:
    """Return a job with its grammar, if any, as GBNF that is safe to send to the engine.

    Raises:
        InvalidGrammar: see `as_gbnf`.
    """
    grammar = job.grammar
    if grammar is None:
        return job
    try:
        text = await _known.get(grammar._replace(param=""), lambda: gbnf_of(grammar))
    except (UnsupportedSchema, WrongGrammar) as error:
        raise in_request(error, grammar) from None
    return replace(job, grammar=Grammar("gbnf", text, grammar.param))


_with_tokens: Memo[str, bool] = Memo(_MOST_BYTES, lambda text, _: _ENTRY + getsizeof(text))


async def has_tokens(text: str) -> bool:
    """Return True if a grammar that `with_gbnf` returned has tokens, such as `<[5]>`."""
    return "<" in text and await _with_tokens.get(text, lambda: bool(tokens(text)))
