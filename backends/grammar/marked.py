"""Strings as GBNF, also those without escapes, which end at the first mark inside them."""

from __future__ import annotations

from collections.abc import Sequence

from .characters import LAST, Encoding, Range, Unsaid, complement, literal, normal, one_of
from .notation import UNUSUAL, Notation
from .regex import containing
from .unenforced import Unenforced

_ANY = normal([Range(0, LAST)])


def matching(pattern: str, notation: Notation) -> str:
    """Return GBNF for strings that contain a match of a regular expression.

    Without escapes, a string lacks one of the characters of the mark that ends it, unless no match
    contains one of them.

    Raises:
        Unenforced: see `regex.containing`; or no match can be written.
    """
    quote = notation.quote
    if not notation.end:
        return f"{quote} {containing(pattern, notation.encoding)} {quote}"
    whole = containing(pattern, _without(""))
    options = []
    for character in dict.fromkeys(notation.end):
        try:
            found = containing(pattern, _without(character))
        except Unsaid:
            continue
        if found == whole:
            options = [found]
            break
        options.append(found)
    if not options:
        raise Unenforced("this model's tool-call format cannot express its matches")
    return f"{quote} {_any(options)} {quote}"


def counted(least: int, most: int | None, notation: Notation) -> str:
    """Return GBNF for strings with a number of characters; `most` is not 0.

    Without escapes, a string lacks one of the characters of the mark that ends it. Without `most`,
    it can have all of them after the first characters.
    """
    quote = notation.quote
    if not notation.end:
        one = notation.encoding.one(_ANY)
        return f"{quote} {one}{_times(least, most)} {quote}"
    ones = [_without(character).one(_ANY) for character in dict.fromkeys(notation.end)]
    options = [f"{one}{_times(least, most)} {quote}" for one in ones]
    if most is None:
        rest = f"({_begun(notation)} | {ones[0]} {notation.states[0]})"
        options = [f"{ones[0]}{{{least - 1}}} {rest}", *options] if least > 1 else [rest]
    return f"{quote} {_any(options)}"


def _begun(notation: Notation) -> str:
    """Return GBNF for a string that begins with the first character of the mark at its end.

    No other character of the mark is the first one again.
    """
    mark, (anything, again, *_) = notation.end, notation.states
    first = literal(mark[0])
    found = ""
    for following in reversed(mark[1:]):
        others = complement([*map(_range, {mark[0], following}), *UNUSUAL])
        more = f" | {literal(following)} {found}" if found else ""
        found = f"({first} {again} | {one_of(others)} {anything}{more})"
    return f"{first} {found}"


def _range(character: str) -> Range:
    return Range(ord(character), ord(character))


def _without(character: str) -> Encoding:
    """Return an encoding as plain text without a character, and without unusual ones."""

    def one(ranges: Sequence[Range]) -> str:
        outside = [*complement(ranges), *map(_range, character)]
        wanted = complement(outside)
        if not wanted:
            raise Unsaid
        return one_of(complement([*outside, *UNUSUAL]) or wanted)

    return Encoding(one, literal)


def _times(least: int, most: int | None) -> str:
    return f"{{{least},}}" if most is None else f"{{{least},{most}}}"


def _any(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
