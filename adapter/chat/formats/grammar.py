"""GBNF for calls, so that they come as a format writes them and with arguments by their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from sys import getsizeof
from typing import Any, NamedTuple, TypeAlias

import orjson

from ....backends.base import Grammar, Passage
from ....backends.grammar import (
    WS,
    Unenforced,
    as_gbnf,
    literal,
    renamed,
    rules_of,
    token_or_text,
    until,
)
from ....backends.offload import Memo
from ....schemas import limits
from .harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from .mistral import ARGS
from .python_tag import MARKER as PYTHON_TAG
from .table import Format
from .xml_call import FUNCTION, PARAMETER, takes_text

Path: TypeAlias = tuple[str | int, ...]

_GAP = "[ \\n]{0,2}"
_NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$id"})
_OBJECT_KEYS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs"}
_TEXT_KEYS = _NOTES | {"type"}
_OTHER_KEYS = {"additionalProperties", "patternProperties", "required", "$ref", "allOf", "anyOf"}
_ANY = b'{"type":"object"}'
# Room is left for what may come before: a thought.
MAX_SIZE = limits.SCHEMA.most - 2_000
# What is not strict is left out of a grammar beyond this: each token would take longer.
WELL_FOLLOWED = 63_536
# Keywords that are left out of a schema one by one; each time all of it is read again.
_MOST_TAKEN_AWAY = 32
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class TooLarge(Exception):
    """There are so many functions that no grammar for all of them can be followed."""


class Request(NamedTuple):
    """What a grammar for calls is made of.

    Args:
        functions: the name of each, the schema of its arguments as JSON (None: it has none), and
            whether all of that is to be made sure of; else what no grammar can say is left out,
            and where there are too many for one grammar all that the schemas say.
        parallel: whether there may be several calls.
        forced: whether there is nothing but calls; else the first marker begins them.
        marks: markers that are tokens of the model's.
        answer: what there may be instead of calls.
    """

    form: Format
    functions: tuple[tuple[str, bytes | None, bool], ...]
    parallel: bool
    forced: bool
    marks: frozenset[str]
    answer: Grammar | None = None

    @property
    def size(self) -> int:
        """Characters of names and schemas."""
        own = sum(len(name) + len(schema or b"") for name, schema, _ in self.functions)
        return own + (len(self.answer.text) if self.answer is not None else 0)


_known: Memo[Request, str] = Memo(
    16 << 20, lambda request, text: 1_024 + 4 * request.size + getsizeof(text)
)


async def prepared(request: Request) -> str:
    """The grammar of a request, made in a thread and kept; see `grammar`."""
    return await _known.get(request, lambda: grammar(request))


def grammar(request: Request) -> str:
    """A grammar for an answer with calls.

    Raises:
        Unenforced: a schema that is to be made sure of; the path begins with the function's place.
        InvalidGrammar: what there may be instead of calls is wrong.
        TooLarge: see there.
    """
    form, functions, parallel, forced, marks, answer = request
    text = _grammar(form, functions, parallel, forced, marks)
    if len(text) > WELL_FOLLOWED:
        loose = [one if one[2] else (one[0], _ANY, False) for one in functions]
        text = _grammar(form, loose, parallel, forced, marks)
    if len(text) > MAX_SIZE:
        raise TooLarge
    return text if answer is None else beside(text, as_gbnf(answer))


def _grammar(
    form: Format,
    functions: Sequence[tuple[str, bytes | None, bool]],
    parallel: bool,
    forced: bool,
    marks: frozenset[str],
) -> str:
    rules = {"ws": WS}
    names = []
    for index, (name, schema, strict) in enumerate(functions):
        own = f"arguments-{index}"
        if form.title == "xml":
            rules |= _tags(schema, own, f"f{index}-", strict, index)
        else:
            rules |= _arguments(schema, own, f"f{index}-", strict, index)
        rules[f"call-{index}"] = _call(form, name, own, marks)
        names.append(f"call-{index}")
    rules["call"] = " | ".join(names)
    begin, rest = _around(form, parallel, marks)
    if forced:
        rules["root"] = f"{begin} {rest}"
    elif begin.startswith("<"):
        rules["root"] = f"!{begin}* ({begin} {rest})?"
    else:
        rules |= until(form.begin, "free", rest, may_end=True)
        rules["root"] = "free"
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def _arguments(
    text: bytes | None, name: str, prefix: str, strict: bool, index: int
) -> Mapping[str, str]:
    schema = _NO_ARGUMENTS if text is None else orjson.loads(text)
    if strict:
        try:
            return rules_of(_as_object(schema), name, prefix)
        except Unenforced as error:
            raise Unenforced(error.reason, (index, *error.path)) from None
    # What cannot be made sure of is taken away, until all of the rest can.
    for _ in range(_MOST_TAKEN_AWAY):
        try:
            return rules_of(_as_object(schema), name, prefix)
        except Unenforced as error:
            if not _without(schema, error.path):
                break
    return rules_of({"type": "object"}, name, prefix)


def _tags(
    text: bytes | None, name: str, prefix: str, strict: bool, index: int
) -> Mapping[str, str]:
    """Rules for arguments in tags: those of the schema, in its order."""
    schema = {} if text is None else orjson.loads(text)
    properties = schema.get("properties") or {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if strict:
        _check_said(schema, _OBJECT_KEYS, (index,))
    required = frozenset(schema.get("required", ()))
    rules: dict[str, str] = {}
    parts = []
    for place, (key, value) in enumerate(properties.items()):
        own = f"{prefix}value-{place}"
        end = '"\\n</parameter>\\n"'
        path = (index, "properties", key)
        if not takes_text(value):
            inner = {**shared, **value} if isinstance(value, dict) else value
            rules |= _value(inner, own, f"{prefix}v{place}-", path if strict else None)
            rules[f"{own}-end"] = f"{own} {end}"
        elif values := value.get("enum", [value["const"]] if "const" in value else []):
            listed = " | ".join(literal(one) for one in values)
            rules[f"{own}-end"] = f"({listed}) {end}"
        else:
            if strict:
                _check_said(value, _TEXT_KEYS, path)
            rules |= until("\n</parameter>", f"{own}-end", '"\\n"')
        tag = f'{literal(f"{PARAMETER}{key}>")} "\\n" {own}-end'
        parts.append(tag if key in required else f"({tag})?")
    return {**rules, name: " ".join(parts) or '""'}


def _check_said(schema: Mapping[str, Any], known: frozenset[str], path: Path) -> None:
    """Raise `Unenforced` for a keyword that arguments in tags cannot be held to."""
    for key in schema:
        if key not in known:
            raise Unenforced(f"'{key}' is not enforced in this model's format", (*path, key))


def _value(schema: Any, name: str, prefix: str, path: Path | None) -> Mapping[str, str]:
    """Rules for any value; without a path what cannot be made sure of is left out."""
    for _ in range(_MOST_TAKEN_AWAY):
        try:
            return rules_of(schema, name, prefix)
        except Unenforced as error:
            if path is not None:
                raise Unenforced(error.reason, (*path, *error.path)) from None
            if not _without(schema, error.path):
                break
    return rules_of(True, name, prefix)


def _as_object(schema: Any) -> Any:
    """Arguments are an object; one whose properties are none has none."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("properties") == {} and not schema.keys() & _OTHER_KEYS:
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **schema}


def _without(schema: Any, path: Sequence[str | int]) -> bool:
    """Take away what is at a path, or the nearest that can be; whether anything was.

    A path may lead on through what a reference stands for, which is elsewhere.
    """
    nearest: tuple[dict[str, Any], str] | None = None
    for key in path:
        if isinstance(schema, dict) and isinstance(key, str) and key in schema:
            nearest = schema, key
        elif not isinstance(schema, list) or not isinstance(key, int) or key >= len(schema):
            break
        schema = schema[key]
    if nearest is None:
        return False
    del nearest[0][nearest[1]]
    return True


def _call(form: Format, name: str, arguments: str, marks: frozenset[str]) -> str:
    """One call, as it stands between the markers."""
    if form.title == "mistral-args":
        return f"{literal(name)} {_marker(ARGS, marks)} {arguments}"
    if form.title == "harmony":
        constrain, message = _marker(CONSTRAIN, marks), _marker(MESSAGE, marks)
        return f'{literal(name)} " "? ({constrain} "json")? {message} {arguments}'
    if form.title == "xml":
        return f'{literal(f"{FUNCTION}{name}>")} "\\n" {arguments} "</function>"'
    keys = [f'{literal(json.dumps(key))} ws ":" ws' for key in (form.name, form.arguments)]
    own = literal(json.dumps(name))
    return f'"{{" ws {keys[0]} {own} ws "," ws {keys[1]} {arguments} ws "}}"'


def _around(form: Format, parallel: bool, marks: frozenset[str]) -> tuple[str, str]:
    """The marker that begins calls, and all that comes behind it."""
    begin = _marker(form.begin, marks) if form.begin else ""
    end = f" {_GAP} {_marker(form.end, marks)}" if form.end else ""
    if form.title == "harmony":
        channel, message = _marker(CHANNEL, marks), _marker(MESSAGE, marks)
        over = _marker(END, marks)
        thought = f"!{over}*" if over.startswith("<") else "[^<]*"
        start = _marker(START, marks)
        before = f'({channel} "analysis" {message} {thought} {over} {start} "assistant")?'
        return f'{before} {channel} "commentary to=functions."', "call"
    if form.listed:
        more = f' ({_GAP} "," {_GAP} call)*' if parallel else ""
        return begin, f'{_GAP} "[" {_GAP} call{more} {_GAP} "]"{end}'
    if form.title == "llama3":
        return f"{_marker(PYTHON_TAG, marks)}?", "call"
    if not begin:
        return "", "call"
    gap = "" if form.title == "mistral-args" else f"{_GAP} "
    more = f" ({_GAP} {begin} {gap}call{end})*" if parallel else ""
    return begin, f"{gap}call{end}{more}"


def _marker(marker: str, marks: frozenset[str]) -> str:
    return token_or_text(marker, Passage("", "", False, marks))


def beside(calls: str, answer: str) -> str:
    """A grammar for what is either calls or another answer; both are GBNF."""
    own = renamed(calls, "root", "calls")
    other = renamed(answer, "root", "answer")
    rules = dict.fromkeys([*own.splitlines(), *other.splitlines()])
    return "root ::= calls | answer\n" + "".join(f"{rule}\n" for rule in rules)
