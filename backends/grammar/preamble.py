"""Grammars with a free part: the reasoning before an answer, or the text before a marker."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..base import Preamble
from .regex import Range, in_set, literal

_GAP = "[ \\n]{0,4}"
# Parts of a grammar without rule names (literals, sets, comments, tokens), and rule names.
_NAME = re.compile(
    r"""("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\#[^\r\n]*|<[^>]*>)|([a-zA-Z0-9-]+)"""
)


def after(text: str, preamble: Preamble) -> str:
    """Return a grammar that allows reasoning before the text that it constrains.

    Args:
        text: checked GBNF.
    """
    answer = "answer"
    while answer in text:
        answer += "-"
    inner = renamed(text, "root", answer)
    end = preamble.end if ends_with_token(preamble) else literal(preamble.end)
    if ends_with_token(preamble):
        rules = {f"{answer}-thought": f"!{end}* {end} {_GAP} {answer}"}
    else:
        rules = until(preamble.end, f"{answer}-thought", f"{_GAP} {answer}")
    root = f"{answer}-thought"
    if not preamble.is_open:
        begin = token_or_text(preamble.begin, preamble)
        root = f"{_GAP} {begin} {root} | {answer}"
    rules["root"] = root
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items()) + inner


def ends_with_token(preamble: Preamble) -> bool:
    """Return True if reasoning ends with a token, and not with a text.

    Characters can end inside a token, where no token may follow (`boundaries`).
    """
    markers = (preamble.end,) if preamble.is_open else (preamble.begin, preamble.end)
    return all(token_or_text(one, preamble).startswith("<") for one in markers)


def renamed(text: str, rule: str, name: str) -> str:
    """Return GBNF with a rule renamed."""
    return _NAME.sub(lambda match: name if match[2] == rule else match[0], text)


def token_or_text(marker: str, preamble: Preamble) -> str:
    """Return GBNF for a marker: its token, if it is one that GBNF can name, or its text."""
    if marker in preamble.special and re.fullmatch(r"<[^<>\[][^<>]*>", marker):
        return marker
    return literal(marker)


def until(
    marker: str, name: str, then: str, may_end: bool = False, never: Sequence[Range] = ()
) -> dict[str, str]:
    """Return rules for text up to the first occurrence of a marker, and `then` after it.

    The rules are the states of Knuth, Morris and Pratt (`follow`).

    Args:
        name: the name of the main rule, and the prefix of the other names.
        may_end: True if the text may end without the marker.
        never: characters that do not appear in the text.
    """
    names = states(marker, name)
    rules = {}
    excluded = "".join(map(in_set, never))
    for own, known in zip(names, follow(marker), strict=True):
        parts = []
        for character, size in known.items():
            if size == len(marker):
                parts.append(f"{literal(character)} {then}")
            elif size:
                parts.append(f"{literal(character)} {names[size]}")
        begun = [character for character, size in known.items() if size]
        parts.append(f"[^{''.join(map(_in_set, begun))}{excluded}] {name}")
        rules[own] = " | ".join([*parts, '""'] if may_end else parts)
    return rules


def states(marker: str, name: str) -> list[str]:
    """Return the names of the rules of `until`, by the length of the marker's prefix."""
    return [name, *(f"{name}-{state}" for state in range(1, len(marker)))]


def follow(marker: str) -> list[dict[str, int]]:
    """Return the states after each character of a marker, for each state.

    A state is the length of the marker's prefix with which a text ends. Other characters lead to 0.
    """
    return [
        {
            character: max(
                size
                for size in range(state + 2)
                if marker[:size] == (marker[:state] + character)[state + 1 - size :]
            )
            for character in dict.fromkeys(marker)
        }
        for state in range(len(marker))
    ]


def _in_set(character: str) -> str:
    return f"\\x{ord(character):02x}" if character in "\\[]-^" else character
