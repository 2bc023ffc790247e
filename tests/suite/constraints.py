"""Constraints of a request in any spelling, and texts that follow them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from suite import language, schema


def _json(value: Any) -> str:
    return json.dumps(schema.instance(value), ensure_ascii=False)


def _object(value: Any) -> str:
    return '{"answer": "yes"}'


def _choice(value: Any) -> str:
    return str(value[0])


def _grammar(value: Any) -> str:
    return language.of_grammar(value, "root")


# The text that follows a constraint, by the field or the key of `structured_outputs`.
KINDS: Mapping[str, Callable[[Any], str]] = {
    "json": _json, "regex": language.of_regex, "choice": _choice, "grammar": _grammar,
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
        return language.of_regex(form["pattern"])
    if kind == "grammar":
        return _grammar(form["grammar"])
    if kind == "json_object":
        return _json(form["schema"]) if "schema" in form else _object(form)
    if kind == "json_schema":
        return _json(form.get("json_schema", form).get("schema") or {})
    return None
