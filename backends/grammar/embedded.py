"""Regular expressions and Lark grammars as parts of GBNF."""

from __future__ import annotations

import re
from re import _parser as parser  # type: ignore[attr-defined]

from ..base import Grammar
from .characters import Encoding
from .gbnf import MAX_SIZE, WrongGrammar
from .lark import rules_of
from .regex import encoded
from .unenforced import Unenforced

# Errors of Python's parser for syntax of other dialects: `\\p{L}`, `(?<name>…)`.
_FOREIGN = ("bad escape", "unknown extension")


def embedded(grammar: Grammar, name: str, prefix: str, encoding: Encoding) -> dict[str, str]:
    """Return the rules for a text that matches a regular expression or a Lark grammar.

    Args:
        name: the name of the main rule; the names of the others begin with `prefix`.

    Raises:
        WrongGrammar: it is malformed, or too long.
        Unenforced: GBNF lacks a feature that it uses.
    """
    if len(grammar.text) > MAX_SIZE:
        raise WrongGrammar(
            f"it is {len(grammar.text)} characters long; at most {MAX_SIZE} are allowed"
        )
    if grammar.kind == "lark":
        return rules_of(grammar.text, name, prefix, encoding)
    try:
        parser.parse(grammar.text)
    except re.error as error:
        if error.msg.startswith(_FOREIGN):
            raise Unenforced(f"a regular expression with a {error.msg} is not enforced") from None
        raise WrongGrammar(f"it is not a valid regular expression: {error}") from None
    except (RecursionError, OverflowError, ValueError):
        # The conversion below raises the error.
        pass
    return {name: encoded(grammar.text, encoding)}
