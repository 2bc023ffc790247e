"""Types that several endpoints share, and the validation that they have in common.

Values are not coerced: an integer in quotes is an error. An explicit null means the default
wherever the contract says so, so nullable fields are `None` when absent as well. Unknown fields
are kept in `model_extra`. Engine extras that llama.cpp and its clients spell in more than one way
have one type each: it accepts the spellings and has one value for each meaning, llama.cpp's own.
Objects of Responses are distinguished by their `type`, with OpenAI's errors for a wrong one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticKnownError
from typing_extensions import NotRequired, TypedDict

from .. import limits

T = TypeVar("T")
# An array of a request that may be long. Its validation ends at the first invalid item: two million
# descriptions of errors take a gigabyte, and hold the interpreter's lock for 17 seconds.
Array: TypeAlias = Annotated[list[T], Field(fail_fast=True)]

_MOST = 2**31 - 1
# The beginning of a JSON array of strings.
_ARRAY = re.compile(r'\s*\[\s*["\]]')


def whole(value: object) -> object:
    """Return a whole number such as 20.0 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_schema(text: str) -> object:
    """Return the schema that a text contains as JSON; None for an empty text.

    Raises:
        ValueError: it is too long, or not JSON.
    """
    if not text:
        return None
    if len(text) > limits.SCHEMA.maximum:
        raise ValueError(f"it has {len(text)} characters; {limits.SCHEMA.maximum} are allowed")
    try:
        found: object = orjson.loads(text)
    except ValueError:
        raise ValueError("it is not valid JSON") from None
    return found


def _listed(value: object) -> object:
    """Return the list in a string: a JSON array, or one sequence breaker."""
    if not isinstance(value, str):
        return value
    if _ARRAY.match(value):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            # A string is not a list: the error names the field.
            return value
    return [value] if value else None


Whole = BeforeValidator(whole)
# Zero and below switch it off.
TopK = Annotated[
    int, Field(ge=-_MOST, le=_MOST), Whole, AfterValidator(lambda value: max(value, 0))
]
# A number of tokens; -1 is the context length.
Window = Annotated[int, Field(ge=-1, le=_MOST), Whole]
# 0 switches it off, like 1.
RepeatPenalty = Annotated[float, Field(ge=0), AfterValidator(lambda value: value or 1.0)]
# An empty grammar means no grammar.
Gbnf = Annotated[str | None, AfterValidator(lambda value: value or None)]
Breakers = Annotated[
    Annotated[
        list[Annotated[str, Field(max_length=limits.BREAKER.maximum)]],
        Field(max_length=limits.BREAKERS.maximum),
    ]
    | None,
    BeforeValidator(_listed),
]


# OpenAI's limits are 2 and -2 to 2; the engines have none.
Temperature = Annotated[float, Field(ge=0, le=limits.STRENGTH.maximum)]
Penalty = Annotated[float, Field(ge=-limits.STRENGTH.maximum, le=limits.STRENGTH.maximum)]
Count = Annotated[int, Field(ge=1, le=128)]
TokenIds = Annotated[
    Array[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=limits.IDS.maximum)
]
# OpenAI documents int64; JSON parsers of other languages do not read larger values as integers.
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def is_huge(value: object) -> bool:
    """Return True for an integer of more than 64 bits, which is parsed as a decimal number."""
    return isinstance(value, float) and abs(value) >= 2**63


def kind_of(value: object) -> str:
    """Return the type of a JSON value with its article, as OpenAI's errors name it."""
    return _KINDS.get(type(value), "an object")


def invalid(
    message: str, code: str | None, path: str = "", dotted: bool = False
) -> PydanticCustomError:
    """Return an error with a final message; `{param}` is replaced by the field and `path`.

    Args:
        dotted: True for OpenAI's older form of a path, `messages.[0].content`.
    """
    context = {"text": message, "code": code or "", "path": path, "dotted": dotted}
    return PydanticCustomError("openai", "{text}", context)


def range_error(number: str, relation: str, bound: float, value: object) -> tuple[str, str]:
    """Return OpenAI's message and code for a number out of range; see `invalid`.

    Args:
        number: `integer` or `decimal`.
        relation: `>`, `>=`, `<` or `<=`, which the number should be.
    """
    side, word = ("below", "minimum") if relation.startswith(">") else ("above", "maximum")
    message = (
        f"Invalid '{{param}}': {number} {side} {word} value. Expected a value {relation} {bound}, "
        f"but got {value} instead."
    )
    code = f"{number}_{side}_{word[:3]}_value"
    return message, code


def length_error(noun: str, bound: int, size: int) -> tuple[str, str]:
    """Return OpenAI's message and code for a value that is too long; see `invalid`.

    Args:
        noun: `array`, `object`, `property name` or `string`.
    """
    one = f"{'an' if noun[0] in 'ao' else 'a'} {noun}"
    message = (
        f"Invalid '{{param}}': {noun} too long. Expected {one} with maximum length {bound}, but "
        f"got {one} with length {size} instead."
    )
    limit = "properties" if noun == "object" else "length"
    is_name = noun == "property name"
    code = "property_name_above_max_length" if is_name else f"{noun}_above_max_{limit}"
    return message, code


def unexpected(value: object, expected: str, path: str = "", hint: str = "") -> PydanticCustomError:
    """Return OpenAI's error for a value of another JSON type."""
    kind = kind_of(value)
    return invalid(
        f"Invalid type for '{{param}}': expected {expected}, but got {kind} instead.{hint}",
        "invalid_type",
        path,
    )


def too_long(noun: str, most: int, size: int, path: str = "") -> PydanticCustomError:
    """Return OpenAI's error for a value that is longer than its limit (`length_error`)."""
    return invalid(*length_error(noun, most, size), path=path)


def empty_string(path: str = "") -> PydanticCustomError:
    """Return OpenAI's error for an empty string at a path in the field."""
    return invalid(
        "Invalid '{param}': empty string. Expected a string with minimum length 1, but got an "
        "empty string instead.",
        "empty_string",
        path,
    )


# Fields of chat that have another name in Responses.
MOVED = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "functions": "tools",
    "function_call": "tool_choice",
    "verbosity": "text.verbosity",
}


class Request(BaseModel):
    """Base class of requests and their parts."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    # Fields that OpenAI's endpoint does not have: a strict server rejects them.
    foreign: ClassVar[frozenset[str]] = frozenset()
    # The endpoint whose fields of other servers apply (`adapter/dialects`).
    endpoint: ClassVar[Literal["chat", "completions", "responses"] | None] = None
    # True where OpenAI's endpoint keeps what it answers unless `store` is false.
    is_stored_by_default: ClassVar[bool] = False


MOST_STOP = limits.STOP.maximum


def _check_stop(value: object) -> object:
    if isinstance(value, str):
        _check_stop_length(value, "")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise unexpected(value, "one of a string or array of strings")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise unexpected(item, "a string", f"[{index}]")
        _check_stop_length(item, f"[{index}]")
    if len(value) > limits.STOPS.maximum:
        raise too_long("array", limits.STOPS.maximum, len(value))
    size = sum(map(len, value))
    if size > limits.STOP_TEXT.maximum:
        raise invalid(
            f"Invalid '{{param}}': too long. Expected at most {limits.STOP_TEXT.maximum} "
            f"characters in all, but got {size} instead.",
            "array_above_max_length",
        )
    return value


def _check_stop_length(stop: str, path: str) -> None:
    if len(stop) > MOST_STOP:
        raise too_long("string", MOST_STOP, len(stop), path)


Stop = Annotated[str | Array[str] | None, BeforeValidator(_check_stop)]


def read_limit(value: object) -> object:
    """Return None for -1 and -2, with which llama.cpp's clients ask for tokens without a limit."""
    return None if type(value) is int and -2 <= value <= -1 else value


MaxTokens = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(read_limit)]


def _check_logit_bias(value: object) -> object:
    if value == "":
        # Clients of other servers send an empty string for no biases.
        return None
    if not isinstance(value, dict):
        return value
    if len(value) > limits.BIASES.maximum:
        raise too_long("object", limits.BIASES.maximum, len(value))
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise invalid(
                f"Invalid key in '{{param}}': {key:.60}. Keys are token ids, as strings of up to "
                "ten digits.",
                "invalid_value",
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise unexpected(bias, "a number", f".{key}")
        if not -100 <= bias <= 100:
            relation, bound = ("<=", 100) if bias > 100 else (">=", -100)
            raise invalid(*range_error("decimal", relation, bound, bias), path=f".{key}")
    return value


LogitBias = Annotated[dict[str, float] | None, BeforeValidator(_check_logit_bias)]


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if "\0" in key or "\0" in text:
            raise invalid(
                "Invalid '{param}': null characters (U+0000) are not allowed in keys and values.",
                "invalid_value",
            )
    return value


_PAIRS = 16


def _count_metadata(value: object) -> object:
    # Pydantic would first validate each pair: two million errors take a gigabyte (`Array`).
    if isinstance(value, dict) and len(value) > _PAIRS:
        sizes = {"field_type": "Dictionary", "max_length": _PAIRS, "actual_length": len(value)}
        raise PydanticKnownError("too_long", sizes)
    return value


# PostgreSQL does not store null characters.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=_PAIRS),
    BeforeValidator(_count_metadata),
    AfterValidator(_check_metadata),
]


def _read_schema(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return read_schema(value)
    except ValueError as error:
        raise invalid(
            f"Invalid '{{param}}': {error}. Send a JSON schema.", "invalid_value"
        ) from None


class StreamOptions(Request):
    """Options of a stream; without `include_obfuscation: true` no chunk is padded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class EngineExtras(Request, defer_build=True):
    """Fields of the engines that OpenAI does not have; passed on if a request names them.

    `Capabilities.extras` has the fields that each engine accepts; others are rejected. One of
    `grammar` (GBNF), `regex`, `lark` and `json_schema` constrains the completion.
    `oai_compat: false` asks for the engine's own response. `logit_bias_vocabulary` names the OpenAI
    vocabulary of the request's token ids.
    """

    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_n_sigma: float | None = None
    top_a: Annotated[float, Field(ge=0)] | None = None
    tfs: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    dynatemp_range: Annotated[float, Field(ge=0)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0)] | None = None
    smoothing_factor: Annotated[float, Field(ge=0, le=100)] | None = None
    smoothing_curve: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat: Annotated[int, Field(ge=0, le=2), Whole] | None = None
    mirostat_tau: Annotated[float, Field(ge=0)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0)] | None = None
    dry_base: Annotated[float, Field(ge=0)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, le=2**31 - 1), Whole] | None = None
    dry_penalty_last_n: Window | None = None
    dry_sequence_breakers: Breakers = None
    adaptive_target: Annotated[float, Field(le=1)] | None = None
    adaptive_decay: Annotated[float, Field(ge=0, le=0.99)] | None = None
    repeat_penalty: RepeatPenalty | None = None
    repeat_last_n: Window | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), Whole] | None = None
    grammar: Gbnf = None
    regex: str | None = None
    lark: str | None = None
    json_schema: Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)] = None
    oai_compat: bool | None = None
    logit_bias_vocabulary: str | None = None


GRAMMAR_FIELDS: dict[str, Literal["gbnf", "regex", "lark", "json_schema"]] = {
    "grammar": "gbnf",
    "regex": "regex",
    "lark": "lark",
    "json_schema": "json_schema",
}
SAMPLING_EXTRAS = (
    frozenset(EngineExtras.model_fields)
    - {"oai_compat", "logit_bias_vocabulary"}
    - GRAMMAR_FIELDS.keys()
)


class VoiceId(Request):
    """A voice as an object."""

    id: str


def _check_voice(value: object) -> object:
    if not isinstance(value, str | dict):
        raise unexpected(value, "one of a string or object with 'id'")
    if isinstance(value, dict) and not isinstance(value.get("id", ""), str):
        raise unexpected(value["id"], "a string", ".id")
    return value


VoiceName = Annotated[str | VoiceId, BeforeValidator(_check_voice)]


class PromptTokensDetails(TypedDict):
    """A breakdown of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int
    audio_tokens: int


class CompletionTokensDetails(TypedDict):
    """A breakdown of the completion's tokens."""

    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Token counts of a whole request; each prompt counts once, for any number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class ReplyHead(TypedDict):
    """The keys that completions, chat completions and their chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ErrorBody(TypedDict):
    """The four keys of an error, all of which are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """An error, as a response body or as an event of a stream."""

    error: ErrorBody


JsonObject = dict[str, Any]


def type_of(value: object) -> tuple[dict[str, Any], Any]:
    """Return an object and its type, which may be any value but null.

    Raises:
        PydanticCustomError: it is not an object, or has no type.
    """
    if not isinstance(value, dict):
        raise wrong_type(value, "an object")
    kind = value.get("type")
    if kind is None:
        raise invalid(
            "Missing required parameter: '{param}'.", "missing_required_parameter", ".type"
        )
    return value, kind


def wrong_type(value: object, expected: str) -> Exception:
    """Return OpenAI's error for a value of another JSON type; it calls null an object here."""
    found = "an object" if value is None else kind_of(value)
    return invalid(
        f"Invalid type for '{{param}}': expected {expected}, but got {found} instead.",
        "invalid_type",
    )


def joined(words: Sequence[str], conjunction: str) -> str:
    """Return words as a list with a conjunction before the last one."""
    if len(words) == 1:
        return words[0]
    return ", ".join(words[:-1]) + f"{',' * (len(words) > 2)} {conjunction} {words[-1]}"


def wrong_value(value: object, words: Sequence[str], path: str = "") -> Exception:
    """Return OpenAI's error for a word that is not one of several."""
    listed = joined([f"'{word}'" for word in words], "and")
    # The text is a template in which `{param}` is replaced.
    shown = str(value)[:200].replace("{param}", "{ param }")
    message = f"Invalid value: '{shown}'. Supported values are: {listed}."
    return invalid(message, "invalid_value", path)


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its null members."""
    return {name: one for name, one in value.items() if one is not None}
