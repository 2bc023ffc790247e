"""Instances of regular expressions and of small grammars in GBNF or Lark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from re import _constants as kind  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_RULE = re.compile(r"^([\w-]+)\s*(?:::=|:)\s*(.*)$", re.MULTILINE)
_ITEM = re.compile(r'"([^"]*)"|/([^/]*)/|(\[[^\]]*\])|([\w-]+)|([()|])|(\S)')


def of_regex(pattern: str) -> str:
    """Return a short text that matches a regular expression.

    Raises:
        ValueError: the regular expression is invalid.
    """
    try:
        return "".join(_one(item) for item in parser.parse(pattern))
    except re.error as error:
        raise ValueError(str(error)) from None


def _one(item: tuple[Any, Any]) -> str:
    name, value = item
    if name is kind.LITERAL:
        return chr(value)
    if name is kind.IN:
        return _one(value[0])
    if name is kind.RANGE:
        return chr(value[0])
    if name is kind.BRANCH:
        return "".join(map(_one, value[1][0]))
    if name is kind.SUBPATTERN:
        return "".join(map(_one, value[-1]))
    if name is kind.MAX_REPEAT:
        return "".join(map(_one, value[2])) * int(value[0])
    return ""


def of_grammar(definition: str, start: str) -> str:
    """Return the text of the first alternative of each rule of a grammar.

    Raises:
        ValueError: the grammar is invalid, or has no start rule.
    """
    rules = dict(_RULE.findall(definition))
    if start not in rules:
        raise ValueError(f"there is no rule {start}")
    return _rule(rules, start)


def _rule(rules: Mapping[str, str], name: str) -> str:
    if name not in rules:
        raise ValueError(f"there is no rule {name}")
    items = _ITEM.findall(rules[name])
    text, rest = _alternatives(rules, items)
    if rest:
        raise ValueError(f"rule {name} has a closing parenthesis too many")
    return text


def _alternatives(rules: Mapping[str, str], items: list[Any]) -> tuple[str, list[Any]]:
    """Return the text of the first alternative, and the items from a closing parenthesis on."""
    texts = [""]
    while items:
        (literal, pattern, chars, name, sign, other), *items = items
        if other:
            raise ValueError(f"unexpected {other}")
        if sign == ")":
            return texts[0], [sign, *items]
        if sign == "|":
            texts.append("")
        elif sign == "(":
            inner, after = _alternatives(rules, items)
            if not after:
                raise ValueError("a parenthesis is open")
            texts[-1] += inner
            items = after[1:]
        else:
            texts[-1] += literal or (of_regex(pattern or chars) if pattern or chars else "")
            texts[-1] += _rule(rules, name) if name else ""
    return texts[0], []
