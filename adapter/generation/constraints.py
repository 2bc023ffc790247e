"""The grammar of a completion, from `response_format` or an engine's own grammar fields."""

from __future__ import annotations

import orjson

from ...backends.base import Capabilities, Grammar
from ...backends.errors import Unsupported, shortened
from ...backends.grammar import Unenforced, check_schema
from ...schemas.openai.chat import ChatRequest
from ...schemas.openai.common import GRAMMAR_FIELDS
from ...schemas.openai.completions import CompletionRequest
from ...schemas.openai.formats import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from ..errors import InvalidRequest

_FIELD = "response_format"
_NAMED = frozenset((*GRAMMAR_FIELDS, _FIELD))
_SCHEMA = f"{_FIELD}.json_schema.schema"
_OBJECT = '{"type":"object"}'


def grammar_of(
    request: CompletionRequest | ChatRequest, capabilities: Capabilities
) -> Grammar | None:
    """Return the grammar of the completion, or None if the request sets none.

    Raises:
        InvalidRequest: two fields set a grammar, or a schema is invalid.
        Unsupported: the engine does not support grammars of this kind.
    """
    if _NAMED.isdisjoint(request.__pydantic_fields_set__):
        return None
    found = [_field(request, name) for name in GRAMMAR_FIELDS if _has(request, name)]
    form = _response_format(request)
    if form is not None:
        found.append(form)
    if not found:
        return None
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(
            f"Invalid '{second}': only one grammar is allowed, and '{first}' is set already. Omit "
            "one of them.",
            second,
            "invalid_value",
        )
    grammar = found[0]
    if grammar.kind not in capabilities.grammars:
        taken = sorted(n for n, k in GRAMMAR_FIELDS.items() if k in capabilities.grammars)
        hint = f"Use one of: {', '.join(taken)}. The in-process engine supports it."
        raise Unsupported(grammar.param, capabilities.engine, hint)
    return grammar


def _has(request: CompletionRequest | ChatRequest, name: str) -> bool:
    return name in request.__pydantic_fields_set__ and getattr(request, name) is not None


def _field(request: CompletionRequest | ChatRequest, name: str) -> Grammar:
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
    # Other keys that describe the answer would be dropped.
    for name, value in (form.__pydantic_extra__ or {}).items():
        if value is not None:
            raise InvalidRequest(
                f"Unknown parameter: '{_FIELD}.{shortened(name)}'. Send the schema as "
                f"'{_SCHEMA}', or a 'grammar'.",
                f"{_FIELD}.{name}",
                "unknown_parameter",
            )
    if isinstance(form, TextFormat):
        return None
    if form.schema_ is not None:
        if isinstance(form, JsonSchemaFormat) and form.json_schema is not None:
            raise InvalidRequest(
                f"Invalid '{_FIELD}.schema': '{_FIELD}.json_schema' is set already. Omit one of "
                "them.",
                f"{_FIELD}.schema",
                "invalid_value",
            )
        _check(form.schema_, "", f"{_FIELD}.schema")
        return Grammar("json_schema", orjson.dumps(form.schema_).decode(), f"{_FIELD}.schema")
    if isinstance(form, JsonObjectFormat):
        return Grammar("json_schema", _OBJECT, _FIELD)
    named: JsonSchema | None = form.json_schema
    if named is None:
        raise InvalidRequest(
            f"Missing required parameter: '{_FIELD}.json_schema'.",
            f"{_FIELD}.json_schema",
            "missing_required_parameter",
        )
    if named.schema_ is None:
        return Grammar("json_schema", _OBJECT, _FIELD)
    _check(named.schema_, f" for response_format '{shortened(named.name)}'", _FIELD)
    return Grammar("json_schema", orjson.dumps(named.schema_).decode(), _SCHEMA)


def _check(schema: object, name: str, param: str) -> None:
    try:
        check_schema(schema)
    except Unenforced as error:
        where = f"In context={error.context}, " if error.path else ""
        raise InvalidRequest(f"Invalid schema{name}: {where}{error.reason}.", param) from None
