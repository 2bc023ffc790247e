"""Custom tools: the grammars of their inputs, and inputs read from arguments as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

import orjson

from ...backends.base import Grammar
from ...backends.grammar import WS, UnsupportedSchema, in_request
from ...backends.grammar.gbnf import WrongGrammar, check
from ...backends.offload import Memo
from ...schemas.limits import SCHEMA
from .formats import ToolCallFormat
from .formats.base import FunctionSchema
from .parsers import INPUT
from .tools import ToolSet


class _Input(NamedTuple):
    form: ToolCallFormat
    grammar: Grammar


# True for each grammar that a format can enforce.
_known: Memo[_Input, bool] = Memo(4 << 20, lambda key, _: 512 + 4 * len(key.grammar.text))


async def enforceable(tool_set: ToolSet | None, form: ToolCallFormat) -> Mapping[str, Grammar]:
    """Return the grammars of custom tools that can be enforced in a format, by tool name.

    Raises:
        InvalidGrammar: a grammar is malformed; the error names it.
    """
    found = {}
    for name, grammar in tool_set.custom.items() if tool_set is not None else ():
        if grammar is None:
            continue
        key = _Input(form, grammar._replace(param=""))
        try:
            if await _known.get(key, lambda key=key: _is_enforceable(key)):  # type: ignore[misc]
                found[name] = key.grammar
        except WrongGrammar as error:
            raise in_request(error, grammar) from None
    return found


def unenforced(tool_set: ToolSet | None, enforced: Mapping[str, Grammar]) -> list[str]:
    """Return the paths of the formats that nothing enforces, for `x-latimer-inexact`."""
    if tool_set is None or not tool_set.custom:
        return []
    return [
        f"{tool_set.paths[index]}.format"
        for index, function in tool_set.functions
        if tool_set.custom.get(function.name) is not None and function.name not in enforced
    ]


def _is_enforceable(key: _Input) -> bool:
    try:
        rules = key.form.rules(FunctionSchema("f", None, False, key.grammar), "root", "f-", 0)
    except UnsupportedSchema:
        return False
    try:
        check("".join(f"{name} ::= {rule}\n" for name, rule in {"ws": WS, **rules}.items()),
              SCHEMA.maximum)  # fmt: skip
    except WrongGrammar:
        # The grammar is valid, but an engine cannot enforce it.
        return False
    return True


_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Complete characters of a JSON string. Half of a surrogate pair waits for the other half.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}(?=.{6}|[^\\]|\\[^u])|'
    r"\\u(?![dD][89abAB])[0-9a-fA-F]{4})+",
    re.DOTALL,
)


class InputReader:
    """A parser of a custom tool's input from the arguments of its function."""

    def __init__(self) -> None:
        self._text = ""
        self._begun = False

    def feed(self, text: str) -> str:
        """Return the text of the input that the next part of the arguments completes."""
        self._text += text
        if not self._begun:
            begin = _BEGIN.match(self._text)
            if begin is None:
                return ""
            self._begun, self._text = True, self._text[begin.end() :]
        found = _CHARACTERS.match(self._text)
        if found is None:
            return ""
        self._text = self._text[found.end() :]
        return _unescaped(found[0])

    def end(self) -> str:
        """Return the input of arguments with another format than `{"input": "…"}`."""
        if self._begun:
            return ""
        try:
            value = orjson.loads(self._text)[INPUT]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return ""
        return value if isinstance(value, str) else orjson.dumps(value).decode()


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    value: str = json.loads(f'"{text}"', strict=False)
    # A lone surrogate is not a character.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
