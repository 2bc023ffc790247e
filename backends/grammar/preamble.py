"""Grammars of which a part is free text: what comes before an answer, or before a marker."""

from __future__ import annotations

import re

from ..base import Preamble
from .characters import literal

_GAP = "[ \\n]{0,4}"
# What of a grammar is no name of a rule: literals, sets, comments, tokens.
_NAME = re.compile(
    r"""("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\#[^\r\n]*|<[^>]*>)|([a-zA-Z0-9-]+)"""
)


def after(text: str, preamble: Preamble) -> str:
    """A grammar that begins behind what a model thinks.

    Args:
        text: GBNF, checked.
    """
    answer = "answer"
    while answer in text:
        answer += "-"
    inner = renamed(text, "root", answer)
    end = token_or_text(preamble.end, preamble)
    if end.startswith("<"):
        rules = {f"{answer}-thought": f"!{end}* {end} {_GAP} {answer}"}
    else:
        rules = until(preamble.end, f"{answer}-thought", f"{_GAP} {answer}")
    root = f"{answer}-thought"
    if not preamble.is_open:
        begin = token_or_text(preamble.begin, preamble)
        root = f"{_GAP} {begin} {root} | {answer}"
    rules["root"] = root
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items()) + inner


def renamed(text: str, rule: str, name: str) -> str:
    """GBNF in which a rule has another name."""
    return _NAME.sub(lambda match: name if match[2] == rule else match[0], text)


def token_or_text(marker: str, preamble: Preamble) -> str:
    """GBNF for a marker: the token, where it is one and GBNF can spell it."""
    if marker in preamble.special and re.fullmatch(r"<[^<>\[][^<>]*>", marker):
        return marker
    return literal(marker)


def until(marker: str, name: str, then: str, may_end: bool = False) -> dict[str, str]:
    """Rules for text up to a marker's first occurrence, and what comes behind it.

    The states are those of Knuth, Morris and Pratt: how much of the marker the text ends with.

    Args:
        name: of the rule for all of it; the others' names begin with it.
        may_end: whether the text may end without a marker.
    """
    names = [name, *(f"{name}-{state}" for state in range(1, len(marker)))]
    rules = {}
    for state, own in enumerate(names):
        follow = {
            character: max(
                size
                for size in range(state + 2)
                if marker[:size] == (marker[:state] + character)[state + 1 - size :]
            )
            for character in dict.fromkeys(marker)
        }
        parts = []
        for character, size in follow.items():
            if size == len(marker):
                parts.append(f"{literal(character)} {then}")
            elif size:
                parts.append(f"{literal(character)} {names[size]}")
        known = [character for character, size in follow.items() if size]
        parts.append(f"[^{''.join(map(_in_set, known))}] {name}")
        rules[own] = " | ".join([*parts, '""'] if may_end else parts)
    return rules


def _in_set(character: str) -> str:
    return f"\\x{ord(character):02x}" if character in "\\[]-^" else character
