"""JSON schemas and regular expressions as GBNF, for engines that take nothing else."""

from __future__ import annotations

from functools import lru_cache

from ..base import Grammar
from ..errors import InvalidGrammar
from ..gbnf import checked
from .characters import literal
from .passage import after, renamed, token_or_text, until
from .regex import to_gbnf as regex_to_gbnf
from .schema import WS, check_schema, path_to, rules_of
from .schema import to_gbnf as schema_to_gbnf
from .unenforced import Unenforced

__all__ = [
    "WS",
    "Unenforced",
    "as_gbnf",
    "check_schema",
    "literal",
    "path_to",
    "renamed",
    "rules_of",
    "token_or_text",
    "until",
]


@lru_cache(maxsize=64)
def as_gbnf(grammar: Grammar) -> str:
    """A grammar in GBNF, as an engine can be given it.

    Raises:
        InvalidGrammar: it is wrong, or says something that GBNF cannot make sure of; the field is
            the request's own, with the place inside a schema.
    """
    text = grammar.text
    try:
        if grammar.kind == "json_schema":
            text = schema_to_gbnf(text)
        elif grammar.kind == "regex":
            text = regex_to_gbnf(text)
        text = checked(grammar._replace(text=text))
    except Unenforced as error:
        raise InvalidGrammar(grammar.param + error.where, error.reason) from None
    if grammar.after is None:
        return text
    return checked(grammar._replace(text=after(text, grammar.after)))
