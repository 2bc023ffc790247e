"""Grammars in Lark's language as GBNF (https://lark-parser.readthedocs.io/en/stable/grammar.html).

The converted grammar has no separate lexer: rules and terminals are rules of GBNF alike. Text that
`%ignore` names is allowed once after each terminal. Features that GBNF lacks are an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from re import _parser as parser  # type: ignore[attr-defined]
from typing import NamedTuple, NoReturn

from ..base import Grammar
from ..errors import shortened
from .gbnf import MAX_NESTING, UnsupportedSchema, WrongGrammar, check_size
from .regex import Encoding, Range, encoded, normal

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|//[^\n]*|\\\r?\n)
    |(?P<line>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*+"i?)
    |(?P<regex>/(?![/*])(?:[^/\\\n]|\\.)++/[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<name>_?[a-zA-Z][a-zA-Z0-9_]*)
    |(?P<number>-?\d+)
    |(?P<mark>->|\.\.|[()\[\]{}|:*+?~,.!])
    |(?P<foreign>[<&^])""",
    re.VERBOSE,
)
# Lark's own terminals (lark/grammars/common.lark), as regular expressions.
COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
_TIMES = ("*", "+", "?")
_DIRECTIVES = ("%import", "%ignore")
START = "start"


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


class _Item(NamedTuple):
    """An item of an alternative as GBNF; `rule` is set if it is only the name of a rule."""

    text: str
    rule: str = ""


_Alternatives = list[list[_Item]]


def rules_of(text: str, name: str, prefix: str, encoding: Encoding) -> dict[str, str]:
    """Return the rules of a grammar; `name` is the name of the rule for the whole text.

    Args:
        prefix: the beginning of the names of the other rules.

    Raises:
        WrongGrammar: the grammar is malformed; the message says where.
        UnsupportedSchema: GBNF lacks a feature that it uses.
    """
    try:
        return _Reader(text, prefix, encoding).rules(name)
    except RecursionError:
        raise UnsupportedSchema(
            "a Lark grammar that is nested this deeply is not enforced; "
            f"use at most {MAX_NESTING} levels of groups"
        ) from None


def _tokens(text: str) -> list[_Token]:
    found, at, line = [], 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise WrongGrammar(f"line {line}: unexpected {shortened(text[at : at + 20])!r}")
        kind = str(match.lastgroup)
        if kind == "foreign" or (kind == "directive" and match[0] not in _DIRECTIVES):
            raise UnsupportedSchema(f"'{match[0]}' in a Lark grammar is not enforced")
        if kind != "blank":
            found.append(_Token(kind, match[0], line))
        line += match[0].count("\n")
        at = match.end()
    return [*found, _Token("line", "", line), _Token("end", "", line)]


class _Reader:
    """A recursive-descent parser of one grammar."""

    def __init__(self, text: str, prefix: str, encoding: Encoding) -> None:
        self._todo = _tokens(text)
        self._at = 0
        self._prefix = prefix
        self._encoding = encoding
        self._bodies: dict[str, _Alternatives] = {}
        self._names: dict[str, str] = {}
        self._imported: dict[str, str] = {}
        self._ignored: list[str] = []
        # The name of the rule that is read. Nothing is ignored inside a terminal.
        self._own = ""

    def rules(self, name: str) -> dict[str, str]:
        """Return the rules; see `rules_of`."""
        self._read_ignored()
        while self._next.kind != "end":
            self._statement()
        if START not in self._bodies:
            raise WrongGrammar(f"there is no rule '{START}'")
        for used in self._names:
            if used not in self._bodies and used not in self._imported:
                raise WrongGrammar(f"there is no rule '{shortened(used)}'")
        own = {self._name(rule): _body(rule, found) for rule, found in self._bodies.items()}
        for rule in self._imported.keys() & self._names.keys():
            own[self._name(rule)] = encoded(self._imported[rule], self._encoding)
        start = self._name(START)
        if not self._ignored:
            return {**own, name: start}
        skipped = " | ".join(self._ignored)
        return {**own, self._skip: skipped, name: start}

    def _read_ignored(self) -> None:
        """Read the `%ignore` statements, which also apply to the rules before them."""
        for at, token in enumerate(self._todo):
            if token.text == "%ignore":
                self._at = at + 1
                self._own = "IGNORED"
                self._ignored.append(_joined(self._alternatives()))
        self._at = 0

    @property
    def _next(self) -> _Token:
        return self._todo[self._at]

    @property
    def _skip(self) -> str:
        return f"{self._prefix}skip"

    def _take(self) -> _Token:
        token = self._todo[self._at]
        self._at += token.kind != "end"
        return token

    def _wrong(self) -> NoReturn:
        token = self._next
        shown = shortened(token.text.strip()) or "the end of the line"
        raise WrongGrammar(f"line {token.line}: unexpected '{shown}'")

    def _expect(self, text: str) -> None:
        if self._next.text != text:
            self._wrong()
        self._take()

    def _name(self, rule: str) -> str:
        return self._names.setdefault(rule, f"{self._prefix}{len(self._names)}")

    def _statement(self) -> None:
        while self._next.text in ("?", "!"):
            self._take()
        token = self._take()
        if token.kind == "line":
            return
        if token.text == "%import":
            self._import()
        elif token.text == "%ignore":
            # It has been read already.
            while self._next.kind not in ("line", "end"):
                self._take()
        elif token.kind == "name":
            self._rule(token.text)
        else:
            self._at -= 1
            self._wrong()

    def _import(self) -> None:
        """Read the names after `%import common`, which is the only library."""
        if self._take().text != "common":
            raise UnsupportedSchema("an import from another library than 'common' is not enforced")
        many = self._next.text == "("
        self._expect("(" if many else ".")
        while True:
            name = self._take().text
            if name not in COMMON:
                raise UnsupportedSchema(f"'common.{shortened(name)}' is not enforced")
            own = name
            if self._next.text == "->":
                self._take()
                own = self._take().text
            self._imported[own] = COMMON[name]
            if not many:
                return
            if self._next.text != ",":
                break
            self._take()
        self._expect(")")

    def _rule(self, name: str) -> None:
        if self._next.text == ".":
            self._take()
            self._take()
        if self._next.text in ("{", "["):
            raise UnsupportedSchema("templates and attributes of Lark rules are not enforced")
        self._expect(":")
        if name in self._bodies:
            raise WrongGrammar(f"rule '{shortened(name)}' is defined twice")
        self._own = name
        self._name(name)
        self._bodies[name] = self._alternatives()

    def _alternatives(self, close: str = "") -> _Alternatives:
        found: _Alternatives = [[]]
        while True:
            self._skip_lines(bool(close))
            if self._next.text == "|":
                self._take()
                found.append([])
            elif self._next.text == "->":
                self._take()
                if self._take().kind != "name":
                    self._at -= 1
                    self._wrong()
            elif self._next.text == close or self._next.kind in ("line", "end"):
                return found
            else:
                found[-1].append(self._item())

    def _skip_lines(self, inside: bool) -> None:
        """Skip line ends inside brackets, or before a line that begins with `|`."""
        at = self._at
        while self._todo[at].kind == "line":
            at += 1
        if inside or self._todo[at].text == "|":
            self._at = at

    def _item(self) -> _Item:
        item = self._atom()
        if self._next.text in _TIMES:
            return _Item(f"({item.text}){self._take().text}")
        if self._next.text == "~":
            self._take()
            least = most = self._count()
            if self._next.text == "..":
                self._take()
                most = self._count()
            return _Item(f"({item.text}){{{least},{most}}}")
        if self._next.text == "{":
            raise UnsupportedSchema("templates and '{…}' in a Lark grammar are not enforced")
        return item

    def _count(self) -> int:
        if self._next.kind != "number":
            self._wrong()
        return int(self._take().text[:9])

    def _atom(self) -> _Item:
        token = self._take()
        if token.text in ("(", "["):
            inner = _joined(self._alternatives(")" if token.text == "(" else "]"))
            self._expect(")" if token.text == "(" else "]")
            return _Item(f"({inner})" + ("?" if token.text == "[" else ""))
        if token.kind == "string":
            return self._terminal(self._string(token))
        if token.kind == "regex":
            return self._terminal(self._regex(token))
        if token.kind != "name":
            self._at -= 1
            self._wrong()
        name = self._name(token.text)
        if token.text.lstrip("_")[:1].isupper():
            return self._terminal(name)
        return _Item(name, token.text)

    def _terminal(self, text: str) -> _Item:
        """Return a terminal, in a rule with the ignored text after it."""
        is_rule = not self._own.lstrip("_")[:1].isupper()
        return _Item(f"({text} {self._skip}?)" if self._ignored and is_rule else text)

    def _string(self, token: _Token) -> str:
        text = _unescaped(token)
        if self._next.text == ".." and len(text) == 1:
            self._take()
            last = _unescaped(self._take())
            if len(last) != 1:
                self._at -= 1
                self._wrong()
            return self._encoding.one(normal([Range(ord(text), ord(last))]))
        if not text:
            return '""'
        if not token.text.endswith("i"):
            return self._encoding.text(text)
        both = [sorted({one, *(c for c in (one.lower(), one.upper()) if len(c) == 1)})
                for one in text]  # fmt: skip
        return " ".join(
            self._encoding.one(normal([Range(ord(one), ord(one)) for one in options]))
            for options in both
        )

    def _regex(self, token: _Token) -> str:
        body, _, flags = token.text[1:].rpartition("/")
        if flags:
            raise UnsupportedSchema(
                "flags of regular expressions in a Lark grammar are not enforced"
            )
        return f"({encoded(body.replace(chr(92) + '/', '/'), self._encoding)})"


def _unescaped(token: _Token) -> str:
    if token.kind != "string":
        raise WrongGrammar(f"line {token.line}: unexpected '{shortened(token.text)}'")
    body = token.text.removesuffix("i")[1:-1]
    try:
        return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", _character, body)
    except (ValueError, OverflowError):
        raise WrongGrammar(
            f"line {token.line}: an escape is not a character; the last one is \\U0010FFFF"
        ) from None


def _character(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b", "v": "\v"}.get(code, code)


def _body(rule: str, alternatives: _Alternatives) -> str:
    """Return a rule as GBNF, without direct left recursion, which engines do not follow.

    `a: a x | y` is `a: y x*`.
    """
    tails = [one[1:] for one in alternatives if one and one[0].rule == rule]
    if not tails:
        return _joined(alternatives)
    others = [one for one in alternatives if not one or one[0].rule != rule]
    if not others:
        raise WrongGrammar(f"rule '{shortened(rule)}' never ends")
    return f"({_joined(others)}) ({_joined(tails)})*"


def _joined(alternatives: Sequence[Sequence[_Item]]) -> str:
    return " | ".join(" ".join(item.text for item in one) or '""' for one in alternatives)


# Errors of Python's parser for syntax of other dialects: `\\p{L}`, `(?<name>…)`.
_FOREIGN = ("bad escape", "unknown extension")


def embedded(grammar: Grammar, name: str, prefix: str, encoding: Encoding) -> dict[str, str]:
    """Return the rules for a text that matches a regular expression or a Lark grammar.

    Args:
        name: the name of the main rule; the names of the others begin with `prefix`.

    Raises:
        WrongGrammar: it is malformed, or too long.
        UnsupportedSchema: GBNF lacks a feature that it uses.
    """
    check_size(grammar.text)
    if grammar.kind == "lark":
        return rules_of(grammar.text, name, prefix, encoding)
    try:
        parser.parse(grammar.text)
    except re.error as error:
        if error.msg.startswith(_FOREIGN):
            raise UnsupportedSchema(
                f"a regular expression with a {error.msg} is not enforced"
            ) from None
        raise WrongGrammar(f"it is not a valid regular expression: {error}") from None
    except (RecursionError, OverflowError, ValueError):
        # The conversion below raises the error.
        pass
    return {name: encoded(grammar.text, encoding)}
