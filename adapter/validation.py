"""Turn request bodies into typed requests, and their fields into sampling and grammars.

Fields that are unknown or unsupported are noted in headers, or rejected.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from operator import eq, gt, is_, not_
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

import orjson
from pydantic import TypeAdapter, ValidationError

from ..backends import offload
from ..backends.base import Capabilities, Grammar, Sampling
from ..backends.errors import Unsupported, shortened
from ..backends.grammar.dialects import check_schema, modern
from ..backends.grammar.gbnf import UnsupportedSchema
from ..schemas.openai.chat import ChatRequest
from ..schemas.openai.common import (
    GRAMMAR_FIELDS,
    SAMPLING_EXTRAS,
    Request,
    StreamOptions,
    is_huge,
    joined,
    length_error,
    range_error,
)
from ..schemas.openai.messages import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from . import dialects
from .errors import InvalidRequest, about, missing, wrong_type, wrong_value
from .hosted import HostedLimit, refused
from .request import Exchange, parameters

if TYPE_CHECKING:
    from ..schemas.anthropic.messages import CountTokensRequest
    from ..schemas.openai.completions import CompletionRequest
    from ..schemas.openai.responses import ResponseRequest

    # The requests for generated text.
    TextRequest: TypeAlias = CompletionRequest | ChatRequest | ResponseRequest | CountTokensRequest

T = TypeVar("T")
R = TypeVar("R", bound=Request)

# The fields that contain objects with fields of their own.
NESTED = frozenset(
    {
        "adapter", "allowed_tools", "assistant", "audio", "content", "conversation", "custom",
        "documents", "file", "format", "function", "function_call", "functions", "grammar",
        "image_url", "input", "input_audio", "items", "json_schema", "messages", "output",
        "output_config", "output_format", "prediction", "prompt_cache_breakpoint",
        "prompt_cache_options", "reasoning", "response_format", "source", "stream_options",
        "summary", "system", "templates", "text", "tool_calls", "tool_choice", "tools", "user",
        "voice", "web_search_options",
    }
)  # fmt: skip

_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
# The fields that `_read` notes in the exchange.
_OF_EXCHANGE = frozenset({"background", "conversation", "safety_identifier", "store", "user"})
_END_USERS = frozenset({"safety_identifier", "user"})
# The fields with which a response is kept in a way although it is not stored.
_KEPT = ("background", "conversation")
_TEXT_MESSAGE = frozenset({"role", "content"})

MAX_LISTED = 20
MAX_HEADER = 1024


def read(
    exchange: Exchange, adapter: TypeAdapter[R], limits: Sequence[HostedLimit] = ()
) -> Awaitable[R]:
    """Parse and validate a request's body; see `Exchange.json` and `parse`.

    Fields of other servers are replaced by Latimer's own (`dialects`).
    """
    return exchange.read_json(partial(_read, exchange, adapter, limits))


def _read(
    exchange: Exchange,
    adapter: TypeAdapter[R],
    limits: Sequence[HostedLimit],
    body: Mapping[str, Any],
) -> R:
    # A request that is refused counts for its model, too.
    exchange.asked = body.get("model") or ""
    request = parse(adapter, limits, body)
    where = request.endpoint
    if exchange.defaults is not None and where is not None:
        known = type(request).model_fields.keys()
        # A limit by its other name is a limit, too.
        has = body.keys() if _LIMITS.isdisjoint(body) else body.keys() | _LIMITS
        defaults = exchange.defaults(body).items()
        values = {name: one for name, one in defaults if name in known and name not in has}
        if values:
            body = {**values, **body}
            request = parse(adapter, limits, body)
    by_default = request.is_stored_by_default
    if not _OF_EXCHANGE.isdisjoint(body):
        stored = body.get("store")
        if stored or (by_default and (stored is None or any(map(body.get, _KEPT)))):
            exchange.to_store = body
        if not _END_USERS.isdisjoint(body):
            exchange.end_user = end_user_of(body)
    elif by_default:
        exchange.to_store = body
    if where is not None and body.get("stream"):
        # The response of an engine itself has no comments.
        exchange.wants_stream = body.get("oai_compat") is not False
    extra = request.__pydantic_extra__
    if where is not None and extra:
        draft = exchange.draft = dialects.replaced(body, extra, where)
        if draft is not None:
            # OpenAI's limits concern the fields that the client sent, which are checked.
            return parse(adapter, (), draft.body)
    return request


def read_query(exchange: Exchange, adapter: TypeAdapter[R], strict: bool) -> R:
    """Return the query of a request; unknown parameters are listed in a header.

    Args:
        strict: reject unknown parameters.

    Raises:
        InvalidRequest: the query is invalid; with OpenAI's message.
    """
    query = parse(adapter, (), parameters(exchange.scope["query_string"]))
    note_unknown(exchange, query, strict)
    return query


def end_user_of(body: Mapping[str, Any]) -> str:
    """Return the end user that a request's body names, or an empty text."""
    # OpenAI replaces `user` by `safety_identifier`; a request can have both.
    name = body.get("safety_identifier") or body.get("user")
    return name if name and isinstance(name, str) else ""


def unknown_fields(request: Request, path: str = "") -> list[str]:
    """Return the paths of unknown fields, at every depth."""
    found: list[str] = []
    if request.__pydantic_extra__:
        found += [path + name for name in request.__pydantic_extra__]
    for name in request.__pydantic_fields_set__ & NESTED:
        value = getattr(request, name)
        if isinstance(value, Request):
            found += unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list) and not (value and isinstance(value[0], int)):
            for index, item in enumerate(value):
                if isinstance(item, Request) and (
                    # Most messages are a role and a text.
                    item.__pydantic_fields_set__ != _TEXT_MESSAGE
                    or item.__pydantic_extra__
                    or type(item.content) is not str  # type: ignore[attr-defined]
                ):
                    found += unknown_fields(item, f"{path}{name}[{index}].")
    return found


def refuse_unserved(
    request: Request, unserved: Mapping[str, tuple[Callable[[Any], bool] | None, str]], engine: str
) -> None:
    """Raise `Unsupported` for a valid field that asks for an unsupported feature.

    Args:
        unserved: for each field, a function that returns True for values without effect, or None,
            and a hint for the error.
    """
    # The fields are sorted, so that the same request always gets the same error.
    for name in sorted(request.__pydantic_fields_set__ & unserved.keys()):
        neutral, hint = unserved[name]
        value = getattr(request, name)
        if value is not None and (neutral is None or not neutral(value)):
            raise Unsupported(name, engine, hint)


def sampling_of(request: TextRequest, capabilities: Capabilities) -> Sampling:
    """Return the sampling of a request, with OpenAI's defaults.

    Raises:
        Unsupported: the engine refuses a field of the request, or lacks an extra.
    """
    if not capabilities.refused.keys().isdisjoint(request.__pydantic_fields_set__):
        _refuse(request, capabilities)
    extras: dict[str, Any] = {}
    for name in sorted(SAMPLING_EXTRAS.intersection(request.__pydantic_fields_set__)):
        value = getattr(request, name)
        if value is None or (name in _NEUTRAL and _NEUTRAL[name](value)):
            continue
        if name == "smoothing_curve" and not request.smoothing_factor:
            continue
        if name == "adaptive_decay" and not _is_adaptive(request.adaptive_target):
            continue
        if name not in capabilities.extras:
            hint = "Omit it, or use an engine that supports it."
            raise Unsupported(name, capabilities.engine, hint)
        extras[name] = value
    if "min_tokens" in extras:
        _check_least(request, extras["min_tokens"])
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), bias) for token, bias in request.logit_bias.items())
        if request.logit_bias
        else (),
        extras=extras,
    )


def _is_adaptive(target: float | None) -> bool:
    return target is not None and target >= 0


# The fields that have values without effect besides null, and whether a value is one.
_NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            "echo", "frequency_penalty", "logit_bias", "min_tokens", "presence_penalty",
            "smoothing_factor", "stop", "stop_sequences", "stream", "suffix", "tools", "top_a",
            "top_logprobs",
        ),
        not_,
    ),
    **dict.fromkeys(
        ("best_of", "n", "smoothing_curve", "temperature", "tfs", "top_p"), partial(eq, 1)
    ),
    # 0 asks for tokens without alternatives.
    "logprobs": partial(is_, False),
    "oai_compat": bool,
    "parse_special": bool,
    "adaptive_target": partial(gt, 0),
}  # fmt: skip


def _refuse(request: TextRequest, capabilities: Capabilities) -> None:
    """Raise `Unsupported` for a field with an effect that the engine refuses."""
    unserved = {name: (_NEUTRAL.get(name), hint) for name, hint in capabilities.refused.items()}
    if not request.logit_bias:
        # A prompt of token ids in another vocabulary becomes text without the engine.
        unserved.pop("logit_bias_vocabulary", None)
    refuse_unserved(request, unserved, capabilities.engine)


def _check_least(request: TextRequest, least: int) -> None:
    most = request.most_tokens
    if most is not None and least > most:
        raise wrong_value("min_tokens", f"{least} is more than 'max_tokens', {most}.")
    if stops_of(request.stop):
        raise wrong_value(
            "min_tokens",
            "not supported together with 'stop', which can end the answer earlier. Omit one of "
            "them.",
        )


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the distinct stop sequences, without empty ones."""
    if not stop:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    return tuple(dict.fromkeys(text for text in stops if text))


def seeds_of(seed: int | None, count: int) -> tuple[int | None, ...]:
    """Return one seed per choice: the request's seed, plus the index of the choice."""
    if seed is None:
        return (None,) * count
    return tuple(range(seed, seed + count))


# What `has_notes` expects of the nested fields of a chat, and the fields of the sampling that
# engines approximate only if they are set.
_MESSAGES = frozenset({"messages"})
APPROXIMATED = {
    "presence_penalty", "frequency_penalty", "logit_bias", "repeat_penalty", "dynatemp_range",
    "mirostat", "top_n_sigma", "xtc_probability",
}  # fmt: skip


def has_notes(
    exchange: Exchange,
    request: Request,
    sampling: Sampling,
    capabilities: Capabilities,
    strict: bool,
    found: Iterable[Sequence[str]] = (),
    nested: Set[str] = _MESSAGES,
) -> bool:
    """Return False if `notes` finds nothing in a request.

    Most requests have the fields of OpenAI only, and nothing else to look into.

    Args:
        found: what the endpoint itself has found; see `notes`.
        nested: the fields with fields of their own that it may have, which have been looked into;
            by default the messages of a chat.
    """
    return bool(
        strict
        or any(found)
        or request.__pydantic_extra__
        or sampling.extras
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or exchange.draft is not None
        or request.__pydantic_fields_set__ & NESTED != nested
        or not capabilities.inexact <= APPROXIMATED
    )


async def notes(
    exchange: Exchange,
    request: Request,
    sampling: Sampling,
    capabilities: Capabilities,
    strict: bool,
    inexact: Iterable[str] = (),
    dropped: Sequence[str] = (),
    unserved: Sequence[str] = (),
    harmless: Sequence[str] = (),
    shown: Callable[[str], str] = str,
) -> None:
    """Name ignored and inexact fields in headers; under `strict`, reject the request.

    Args:
        inexact: fields that are inexact for another reason than the engine.
        dropped: fields that have no effect on this model.
        unserved: paths in the request that this server has no use for.
        harmless: fields that are never rejected, because they do not change the response.
        shown: returns a path as the errors of the request's API have it.

    Raises:
        InvalidRequest: a field is unknown, under `strict`.
        Unsupported: a field is inexact, or has no effect on this model, under `strict`.
    """
    size = exchange.size
    ignored = sorted(
        unknown_fields(request)
        if size <= offload.SMALL
        else await offload.run(size, unknown_fields, request)
    )
    approximated = set(inexact)
    for name in capabilities.inexact:
        if name == "usage" or getattr(sampling, name, None) or _has_effect(name, sampling):
            approximated.add(name)
    if strict and dropped:
        hint = "The model's chat template has no setting for it. Omit it."
        raise Unsupported(dropped[0], capabilities.engine, hint)
    if strict and unserved:
        hint = "Omit it, or start the server without --strict, which rejects what it ignores."
        raise Unsupported(unserved[0], capabilities.engine, hint)
    draft = exchange.draft
    if draft is not None:
        ignored = sorted((*ignored, *draft.unknown))
    if strict:
        _refuse_unknown(ignored or _foreign(request, draft))
    if draft is not None:
        dropped = [draft.names.get(name, name) for name in dropped]
        approximated = {draft.names.get(name, name) for name in approximated}
        ignored += draft.ignored
    if ignored or dropped or unserved or harmless:
        ignored = sorted(map(shown, (*ignored, *dropped, *unserved, *harmless)))
        exchange.response_headers.append((b"x-latimer-ignored", _listed(ignored)))
    if approximated:
        note_inexact(exchange, map(shown, approximated), capabilities, strict)


def note_unknown(exchange: Exchange, request: Request, strict: bool) -> None:
    """Name unknown fields in a header; under `strict`, reject the request."""
    ignored = sorted(unknown_fields(request))
    if strict:
        _refuse_unknown(ignored)
    if ignored:
        exchange.response_headers.append((b"x-latimer-ignored", _listed(ignored)))


def _foreign(request: Request, draft: dialects.Draft | None) -> list[str]:
    """Return the fields of a request, as the client sent them, that OpenAI's endpoint lacks."""
    found = sorted(request.__pydantic_fields_set__ & request.foreign)
    if draft is None:
        return found
    # Fields that another one has set have its name; defaults that belong to it have none.
    names = [draft.names.get(name, name) for name in found]
    return [name for name in names if name.partition(".")[0] in draft.given]


def _refuse_unknown(names: Sequence[str]) -> None:
    if names:
        name = shortened(names[0])
        raise InvalidRequest(f"Unknown parameter: '{name}'.", name, "unknown_parameter")


def _has_effect(name: str, sampling: Sampling) -> bool:
    """Return True if an approximated extra can change the answer."""
    extras, temperature = sampling.extras, sampling.temperature
    if name == "repeat_penalty":
        return extras.get(name, 1) != 1 and extras.get("repeat_last_n") != 0
    if name == "xtc_probability":
        # A temperature of 1 changes nothing, so its place in the order of samplers does not matter.
        return bool(extras.get(name)) and (temperature != 1 or bool(extras.get("dynatemp_range")))
    if name == "top_n_sigma" or name == "mirostat":
        # Both keep the most likely token.
        return extras.get(name, 0) > 0 and temperature > 0
    return bool(extras.get(name))


def note_inexact(
    exchange: Exchange, names: Iterable[str], capabilities: Capabilities, strict: bool
) -> None:
    """Name inexact fields in a header; under `strict`, raise `Unsupported`."""
    listed = sorted(names)
    if strict:
        raise Unsupported(
            listed[0],
            capabilities.engine,
            "This engine only approximates it, and --strict rejects approximations.",
        )
    exchange.response_headers.append((b"x-latimer-inexact", _listed(listed)))


def _listed(names: list[str]) -> bytes:
    """Return names for a header, percent-encoded, so that no name can end the header."""
    value = ""
    for name in names[:MAX_LISTED]:
        longer = f"{value}, {quote(name, safe='[].')}" if value else quote(name, safe="[].")
        if len(longer) > MAX_HEADER:
            break
        value = longer
    return value.encode()


def check_stream_options(request: CompletionRequest | ChatRequest | ResponseRequest) -> bool:
    """Return True if the stream is to end with its usage (contract 2.1).

    Raises:
        InvalidRequest: `stream_options` is set without `stream`.
    """
    if request.stream_options is None:
        return False
    if not request.stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )
    options = request.stream_options
    return isinstance(options, StreamOptions) and bool(options.include_usage)


_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a decimal number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def from_validation(error: ValidationError, body: Any, schema: Any) -> InvalidRequest:
    """Return OpenAI's error for a body: a missing field first, then the first other error.

    Args:
        schema: pydantic's core schema of the body.
    """
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "missing"), details[0])
    kind, value = first["type"], first["input"]
    context: dict[str, Any] = first.get("ctx") or {}
    path = path_of(first["loc"], body, schema, kind == "missing")
    if kind == "openai":
        path = shortened(path + context["path"])
        path = path.replace("[", ".[") if context["dotted"] else path
        return InvalidRequest(
            context["text"].replace("{param}", path), path or None, context["code"] or None
        )
    if kind == "missing":
        return missing(path)
    if kind in _TYPES:
        return _wrong_type(path, _TYPES[kind], value)
    is_key = first["loc"][-1] == "[key]"
    if is_key:
        path = path_of(first["loc"][:-2], body, schema, False)
    return _bounds(kind, path, value, context, is_key) or _choices(kind, path, value, context)


def parse(
    adapter: TypeAdapter[T],
    limits: Sequence[HostedLimit],
    body: Mapping[str, Any],
    translate: Callable[[ValidationError, Any, Any], InvalidRequest] = from_validation,
) -> T:
    """Validate a body.

    Args:
        limits: OpenAI's limits to apply as well.
        translate: makes the API's error of pydantic's, the body and the schema.

    Raises:
        InvalidRequest: the body is invalid; with the API's message.
    """
    error: InvalidRequest | None
    try:
        # The validator itself: its wrapper in `TypeAdapter` is a call that each request would pay.
        request: T = adapter.validator.validate_python(body)
    except ValidationError as invalid:
        error = translate(invalid, body, adapter.core_schema)
        if limits:
            error = _first(error, limits, body)
    else:
        error = refused(limits, body) if limits else None
        if error is None:
            return request
    try:
        # Raised here, it does not refer to pydantic's error, which has the body.
        raise error
    finally:
        # Its traceback refers to this frame: without this, the two would be a reference cycle.
        del error


def _first(
    error: InvalidRequest, limits: Sequence[HostedLimit], body: Mapping[str, Any]
) -> InvalidRequest:
    # OpenAI reports a missing model first, and its bounds are tighter than an engine's.
    closer = refused(limits, body, error.param)
    if closer is not None and closer.code == error.code:
        error = closer
    return refused(limits, body, "model") or error


def _wrong_type(path: str, expected: str, value: Any) -> InvalidRequest:
    if expected == "an integer" and is_huge(value):
        side, word = ("below", "minimum") if value < 0 else ("above", "maximum")
        bound = ">= -9223372036854775808" if value < 0 else "<= 9223372036854775807"
        return wrong_value(
            path,
            f"integer {side} {word} value. Expected a value {bound}.",
            f"integer_{side}_{word[:3]}_value",
        )
    return wrong_type(path, expected, value)


def _bounds(
    kind: str, path: str, value: Any, context: dict[str, Any], is_key: bool
) -> InvalidRequest | None:
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        bound = next(iter(context.values()))
        # pydantic turns the bound of a decimal field into a float, and keeps that of an integer.
        number = "decimal" if isinstance(bound, float) else "integer"
        relation = (">" if kind.startswith("greater") else "<") + "=" * kind.endswith("equal")
        bound = int(bound) if float(bound).is_integer() else bound
        return about(path, range_error(number, relation, bound, value))
    if kind in ("too_long", "string_too_long"):
        noun = "string" if kind == "string_too_long" else "array"
        if isinstance(value, dict):
            noun = "object"
        elif is_key and noun == "string":
            noun = "property name"
        return about(path, length_error(noun, context["max_length"], len(value)))
    if kind in ("too_short", "string_too_short"):
        noun, article = ("array", "an") if kind == "too_short" else ("string", "a")
        return wrong_value(
            path,
            f"empty {noun}. Expected {article} {noun} with minimum length "
            f"{context['min_length']}, but got an empty {noun} instead.",
            f"empty_{noun}",
        )
    return None


def _choices(kind: str, path: str, value: Any, context: dict[str, Any]) -> InvalidRequest:
    if kind in ("literal_error", "union_tag_invalid"):
        if kind == "union_tag_invalid":
            field = context["discriminator"].strip("'")
            path = f"{path}.{field}" if path else field
            value, listed = value[field], context["expected_tags"]
            if not isinstance(value, str):
                return _wrong_type(path, "a string", value)
        else:
            listed = context["expected"].replace(" or ", ", ")
        words = re.findall(r"'[^']*'", listed)
        if not isinstance(value, str):
            one_of = "one of " if len(words) > 1 else ""
            return _wrong_type(path, one_of + joined(words, "or"), value)
        return InvalidRequest(
            f"Invalid value: '{shortened(value)}'. Supported values are: {joined(words, 'and')}.",
            path,
            "invalid_value",
        )
    if kind == "union_tag_not_found":
        field = context["discriminator"].strip("'")
        if isinstance(value, dict):
            return missing(f"{path}.{field}")
        return _wrong_type(path, "an object", value)
    if kind == "string_pattern_mismatch":
        return wrong_value(
            path,
            "string does not match pattern. Expected a string that matches the pattern "
            f"'{context['pattern']}'.",
        )
    return wrong_value(path, "the value is not allowed here.")


def path_of(loc: tuple[int | str, ...], body: Any, schema: Any, is_missing: bool) -> str:
    """Return a field's path in OpenAI's form: `messages[0].content[1].type`.

    pydantic's location also contains the tags of unions. The schema identifies them,
    because a call of type `function` also has a key of that name. In a union without tags, a step
    that is not a key of the value at its place is the name of a type. A missing
    field is not a key either.
    """
    path, here = "", body
    definitions: dict[str, Any] = {}
    for position, step in enumerate(loc):
        last = position == len(loc) - 1
        schema = _bare(schema, definitions)
        if schema is not None and schema["type"] == "tagged-union" and step in schema["choices"]:
            schema = schema["choices"][step]
            continue
        schema = _inner(schema, step)
        if isinstance(step, int) and isinstance(here, list) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
        elif isinstance(here, dict) and step in here:
            path, here = f"{path}.{step}" if path else str(step), here[step]
        elif isinstance(step, int) and isinstance(here, str) and here.lstrip().startswith("["):
            # An array as a JSON string.
            path = f"{path}[{step}]"
        elif last and is_missing:
            path = f"{path}.{step}" if path else str(step)
    return shortened(path)


def _bare(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema without its wrappers; None if it is unknown."""
    while schema is not None:
        kind = schema["type"]
        if kind == "definitions":
            definitions |= {one["ref"]: one for one in schema["definitions"]}
        elif kind == "definition-ref":
            schema = definitions.get(schema["schema_ref"])
            continue
        if "schema" not in schema:
            return schema
        schema = schema["schema"]
    return None


def _inner(schema: Any, step: int | str) -> Any:
    """Return the schema of a field or an element; None if it is unknown."""
    kind = None if schema is None else schema["type"]
    if kind == "model-fields":
        return schema["fields"].get(step)
    if kind == "list":
        return schema.get("items_schema")
    return schema.get("values_schema") if kind == "dict" else None


_FIELD, _FLAT = "response_format", "text.format"
# Anthropic's field, and its former name.
_OUTPUT, _FORMER = "output_config.format", "output_format"
# All fields that set a grammar.
OF_GRAMMARS = frozenset((*GRAMMAR_FIELDS, _FIELD, "text", "output_config", _FORMER))
_SCHEMA = f"{_FIELD}.json_schema.schema"
_OBJECT = '{"type":"object"}'


def grammar_of(request: TextRequest, capabilities: Capabilities) -> Grammar | None:
    """Return the grammar of the answer, or None if the request sets none.

    Raises:
        InvalidRequest: two fields set a grammar, or a schema is invalid.
        Unsupported: the engine does not support grammars of this kind.
    """
    if OF_GRAMMARS.isdisjoint(request.__pydantic_fields_set__):
        return None
    found = [_field(request, name) for name in GRAMMAR_FIELDS if _has(request, name)]
    form = _FORMATS[request.endpoint or "responses"](request)
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
        if grammar.kind == "lark" and "gbnf" in capabilities.grammars:
            instead = f"It is Lark, not GBNF ('root ::= …'). {instead}"
        hint = instead + "The in-process engine supports it."
        raise Unsupported(grammar.param, capabilities.engine, hint)
    return grammar


def _has(request: TextRequest, name: str) -> bool:
    return name in request.__pydantic_fields_set__ and getattr(request, name) is not None


def _field(request: TextRequest, name: str) -> Grammar:
    value = getattr(request, name)
    if isinstance(value, str):
        return Grammar(GRAMMAR_FIELDS[name], value, name)
    return Grammar(GRAMMAR_FIELDS[name], _schema_text(value, "", name), name)


def _response_format(request: CompletionRequest | ChatRequest) -> Grammar | None:
    """Return the grammar of `response_format` (contract 3.7)."""
    form = request.response_format
    if form is None:
        return None
    _check_known(form, _FIELD, _SCHEMA)
    if isinstance(form, TextFormat):
        return None
    if form.schema_ is not None:
        other = "json_schema" if isinstance(form, JsonSchemaFormat) else "value"
        if getattr(form, other) is not None:
            raise wrong_value(
                f"{_FIELD}.schema", f"'{_FIELD}.{other}' is set already. Omit one of them."
            )
        text = _schema_text(form.schema_, "", f"{_FIELD}.schema")
        return Grammar("json_schema", text, f"{_FIELD}.schema")
    if isinstance(form, JsonObjectFormat):
        if form.value is not None:
            text = _schema_text(form.value, "", f"{_FIELD}.value")
            return Grammar("json_schema", text, f"{_FIELD}.value")
        return Grammar("json_schema", _OBJECT, _FIELD)
    named: JsonSchema | None = form.json_schema
    if named is None:
        raise missing(f"{_FIELD}.json_schema")
    if named.schema_ is None:
        return Grammar("json_schema", _OBJECT, _FIELD)
    name = f" for response_format '{shortened(named.name)}'"
    return Grammar("json_schema", _schema_text(named.schema_, name, _FIELD), _SCHEMA)


def _text_format(request: ResponseRequest) -> Grammar | None:
    """Return the grammar of `text.format`, which is flat (contract of responses, 9.2)."""
    form = None if request.text is None else request.text.format
    if form is None:
        return None
    path = f"{_FLAT}.schema"
    _check_known(form, _FLAT, path)
    if isinstance(form, TextFormat):
        return None
    if form.type != "json_schema":
        return Grammar("json_schema", _OBJECT, _FLAT)
    name = f" for response_format '{shortened(form.name)}'"
    return Grammar("json_schema", _schema_text(form.schema_, name, path), path)


def _output_format(request: CountTokensRequest) -> Grammar | None:
    """Return the grammar of `output_config.format` (contract of messages, 2.1)."""
    config = request.output_config
    form, path = None if config is None else config.format, _OUTPUT
    if request.output_format is not None:
        if form is not None:
            raise wrong_value(_FORMER, f"'{_OUTPUT}' is set already. Omit one of them.")
        form, path = request.output_format, _FORMER
    if form is None:
        return None
    path = f"{path}.schema"
    return Grammar("json_schema", _schema_text(form.schema_, "", path), path)


_FORMATS: Mapping[str, Callable[[Any], Grammar | None]] = {
    "chat": _response_format,
    "completions": _response_format,
    "messages": _output_format,
    "responses": _text_format,
}


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


def _schema_text(schema: object, name: str, param: str) -> str:
    """Return a schema of any dialect as JSON of the latest one.

    Args:
        name: the words of the error that name the schema.
        param: the field to name in the error.
    """
    try:
        check_schema(schema)
    except UnsupportedSchema as error:
        where = f"In context={error.context}, " if error.path else ""
        raise InvalidRequest(f"Invalid schema{name}: {where}{error.reason}.", param) from None
    return orjson.dumps(modern(schema)).decode()
