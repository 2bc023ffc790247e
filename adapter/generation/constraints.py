"""The grammar of an answer, from `response_format`, `text.format` or an engine's own fields."""

from __future__ import annotations

import orjson

from ...backends.base import Capabilities, Grammar
from ...backends.errors import Unsupported, shortened
from ...backends.grammar import UnsupportedSchema, check_schema
from ...schemas.openai.chat import ChatRequest
from ...schemas.openai.common import GRAMMAR_FIELDS, Request
from ...schemas.openai.completions import CompletionRequest
from ...schemas.openai.messages import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from ...schemas.openai.responses import FlatSchemaFormat, ResponseRequest
from ..errors import InvalidRequest, missing, wrong_value
from ..validation import TextRequest

_FIELD, _FLAT = "response_format", "text.format"
_NAMED = frozenset((*GRAMMAR_FIELDS, _FIELD, "text"))
_SCHEMA = f"{_FIELD}.json_schema.schema"
_OBJECT = '{"type":"object"}'


def grammar_of(request: TextRequest, capabilities: Capabilities) -> Grammar | None:
    """Return the grammar of the answer, or None if the request sets none.

    Raises:
        InvalidRequest: two fields set a grammar, or a schema is invalid.
        Unsupported: the engine does not support grammars of this kind.
    """
    if _NAMED.isdisjoint(request.__pydantic_fields_set__):
        return None
    found = [_field(request, name) for name in GRAMMAR_FIELDS if _has(request, name)]
    form = (
        _text_format(request) if isinstance(request, ResponseRequest) else _response_format(request)
    )
    if form is not None:
        found.append(form)
    if not found:
        return None
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise wrong_value(
            second, f"only one grammar is allowed, and '{first}' is set already. Omit one of them."
        )
    grammar = found[0]
    if grammar.kind not in capabilities.grammars:
        taken = sorted(n for n, k in GRAMMAR_FIELDS.items() if k in capabilities.grammars)
        instead = f"Use one of: {', '.join(taken)}. " if taken else ""
        hint = instead + "The in-process engine supports it."
        raise Unsupported(grammar.param, capabilities.engine, hint)
    return grammar


def _has(request: TextRequest, name: str) -> bool:
    return name in request.__pydantic_fields_set__ and getattr(request, name) is not None


def _field(request: TextRequest, name: str) -> Grammar:
    value = getattr(request, name)
    if isinstance(value, str):
        return Grammar(GRAMMAR_FIELDS[name], value, name)
    _check(value, "", name)
    return Grammar(GRAMMAR_FIELDS[name], orjson.dumps(value).decode(), name)


def _response_format(request: CompletionRequest | ChatRequest) -> Grammar | None:
    """Return the grammar of `response_format` (contract 3.7)."""
    form = request.response_format
    if form is None:
        return None
    _check_known(form, _FIELD, _SCHEMA)
    if isinstance(form, TextFormat):
        return None
    if form.schema_ is not None:
        if isinstance(form, JsonSchemaFormat) and form.json_schema is not None:
            raise wrong_value(
                f"{_FIELD}.schema", f"'{_FIELD}.json_schema' is set already. Omit one of them."
            )
        _check(form.schema_, "", f"{_FIELD}.schema")
        return Grammar("json_schema", orjson.dumps(form.schema_).decode(), f"{_FIELD}.schema")
    if isinstance(form, JsonObjectFormat):
        return Grammar("json_schema", _OBJECT, _FIELD)
    named: JsonSchema | None = form.json_schema
    if named is None:
        raise missing(f"{_FIELD}.json_schema")
    if named.schema_ is None:
        return Grammar("json_schema", _OBJECT, _FIELD)
    _check(named.schema_, f" for response_format '{shortened(named.name)}'", _FIELD)
    return Grammar("json_schema", orjson.dumps(named.schema_).decode(), _SCHEMA)


def _text_format(request: ResponseRequest) -> Grammar | None:
    """Return the grammar of `text.format`, which is flat (contract of responses, 9.2)."""
    form = None if request.text is None else request.text.format
    if form is None:
        return None
    path = f"{_FLAT}.schema"
    _check_known(form, _FLAT, path)
    if isinstance(form, TextFormat):
        return None
    if not isinstance(form, FlatSchemaFormat):
        return Grammar("json_schema", _OBJECT, _FLAT)
    _check(form.schema_, f" for response_format '{shortened(form.name)}'", path)
    return Grammar("json_schema", orjson.dumps(form.schema_).decode(), path)


def _check_known(form: Request, field: str, schema: str) -> None:
    """Reject other keys that describe the answer, which would be dropped."""
    for name, value in (form.__pydantic_extra__ or {}).items():
        if value is not None:
            raise InvalidRequest(
                f"Unknown parameter: '{field}.{shortened(name)}'. Send the schema as '{schema}', "
                "or a 'grammar'.",
                f"{field}.{name}",
                "unknown_parameter",
            )


def _check(schema: object, name: str, param: str) -> None:
    try:
        check_schema(schema)
    except UnsupportedSchema as error:
        where = f"In context={error.context}, " if error.path else ""
        raise InvalidRequest(f"Invalid schema{name}: {where}{error.reason}.", param) from None
