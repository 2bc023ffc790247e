"""Instances of JSON schemas, expressions and grammars, and texts that follow a constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from re import _constants as kind  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_RULE = re.compile(r"^([\w-]+)\s*(?:::=|:)\s*(.*)$", re.MULTILINE)
_ITEM = re.compile(r'"([^"]*)"|/([^/]*)/|(\[[^\]]*\])|([\w-]+)|([()|])|(\S)')
TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


def instance(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """Return a small instance of a schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return instance(target, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return instance(schema["anyOf"][0], root)
    kind = schema.get("type", "object")
    if kind == "object" and "required" in schema:
        return {name: instance(schema["properties"][name], root) for name in schema["required"]}
    if kind == "object":
        return {name: instance(one, root) for name, one in schema.get("properties", {}).items()}
    if kind == "array" and isinstance(schema.get("items"), list):
        # A tuple as drafts before 2020-12 have it.
        return [instance(one, root) for one in schema["items"]]
    if kind == "array":
        return [instance(schema.get("items", {}), root)] * schema.get("minItems", 0)
    return {"string": "a", "number": 0.5, "integer": 0, "boolean": True, "null": None}[kind]


def problem(schema: Any) -> str | None:
    """Return the error in a schema, or None if it is valid."""
    if not isinstance(schema, dict):
        return "a schema is an object"
    kind = schema.get("type")
    for one in kind if isinstance(kind, list) else [kind]:
        if one is not None and one not in TYPES:
            return f"there is no type {one!r}"
    return None


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


def _json(value: Any) -> str:
    return json.dumps(instance(value), ensure_ascii=False)


def _object(value: Any) -> str:
    return '{"answer": "yes"}'


def _choice(value: Any) -> str:
    return str(value[0])


def _grammar(value: Any) -> str:
    return of_grammar(value, "root")


# The text that follows a constraint, by the field or the key of `structured_outputs`.
KINDS: Mapping[str, Callable[[Any], str]] = {
    "json": _json, "regex": of_regex, "choice": _choice, "grammar": _grammar,
    "json_object": _object,
}  # fmt: skip
FIELDS = {**{f"guided_{name}": one for name, one in KINDS.items()}, "grammar": _grammar,
          "json_schema": _json}  # fmt: skip


def text_of(sent: Mapping[str, Any]) -> str | None:
    """Return a text that follows the constraint of a request, or None without a constraint."""
    for name, make in FIELDS.items():
        if sent.get(name):
            return make(sent[name])
    for name, value in (sent.get("structured_outputs") or {}).items():
        return KINDS[name](value)
    form = sent.get("format")
    if form:
        return _object(form) if form == "json" else _json(form)
    return _formatted(sent.get("response_format") or {"type": "text"})


def _formatted(form: Mapping[str, Any]) -> str | None:
    kind = form.get("type")
    if kind == "regex":
        return of_regex(form["pattern"])
    if kind == "grammar":
        return _grammar(form["grammar"])
    if kind == "json_object":
        return _json(form["schema"]) if "schema" in form else _object(form)
    if kind == "json_schema":
        return _json(form.get("json_schema", form).get("schema") or {})
    return None
