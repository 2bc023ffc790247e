"""The limits of OpenAI's hosted service that local engines do not have, in one table.

The schemas hold what an engine can do. These limits apply after the schema, with
`limits="openai"` only. `docs/fidelity.md` shows this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ..schemas import limits
from ..schemas.openai.common import length_error, range_error
from .errors import InvalidRequest, about, wrong_value

Limits: TypeAlias = Literal["engine", "openai"]

Body: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[str, Body], InvalidRequest | None]


class HostedLimit(NamedTuple):
    """A limit of OpenAI's service on one field.

    Args:
        rule: returns OpenAI's error if a body exceeds the limit.
        engine: the values that are accepted by default.
        openai: the values that OpenAI accepts.
    """

    field: str
    rule: Rule
    engine: str
    openai: str


def lacking(field: str, other: str) -> InvalidRequest:
    """Return the error for a field that needs tools or functions, which the request lacks."""
    return InvalidRequest(
        f"Invalid value for '{field}': '{field}' is only allowed when '{other}' are specified.",
        field,
    )


def no_logprobs() -> InvalidRequest:
    """Return the error for alternatives in a chat request without log-probabilities."""
    return InvalidRequest(
        "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", "top_logprobs"
    )


def _between(number: str, low: int | None, high: int | None) -> Rule:
    """Return a rule for a range; a decimal number can also be sent as an integer."""
    kinds = (int,) if number == "integer" else (int, float)

    def rule(field: str, body: Body) -> InvalidRequest | None:
        value = body.get(field)
        if type(value) not in kinds:
            return None
        assert isinstance(value, int | float)
        if low is not None and value < low:
            return about(field, range_error(number, ">=", low, value))
        if high is not None and value > high:
            return about(field, range_error(number, "<=", high, value))
        return None

    return rule


def _no_longer_than(bound: int) -> Rule:
    def rule(field: str, body: Body) -> InvalidRequest | None:
        value = body.get(field)
        if not isinstance(value, list) or len(value) <= bound:
            return None
        return about(field, length_error("array", bound, len(value)))

    return rule


def _with(other: str) -> Rule:
    """Return a rule for a field that needs tools or functions."""

    def rule(field: str, body: Body) -> InvalidRequest | None:
        if body.get(field) is None or body.get(other):
            return None
        return lacking(field, other)

    return rule


def _stored(field: str, body: Body) -> InvalidRequest | None:
    if body.get(field) is None or body.get("store"):
        return None
    return InvalidRequest(
        f"The '{field}' parameter is only allowed when 'store' is enabled.", field
    )


def _with_logprobs(field: str, body: Body) -> InvalidRequest | None:
    return None if body.get(field) is None or body.get("logprobs") else no_logprobs()


def _named(field: str, body: Body) -> InvalidRequest | None:
    absent = body.get(field) in (None, "")
    return InvalidRequest("you must provide a model parameter") if absent else None


def _biases(field: str, body: Body) -> InvalidRequest | None:
    if body.get(field) != "":
        return None
    return InvalidRequest(
        f"Invalid type for '{field}': expected an object, but got a string instead.",
        field,
        "invalid_type",
    )


def _with_calls(field: str, body: Body) -> InvalidRequest | None:
    """Reject an empty list of calls in a message."""
    messages = body.get(field)
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("tool_calls") == []:
            path = f"{field}[{index}].tool_calls"
            return wrong_value(
                path,
                "empty array. Expected an array with minimum length 1, but got an empty array "
                "instead.",
                "empty_array",
            )
    return None


_MOST = limits.STRENGTH.maximum
_SERVED = "may be missing, null or empty if one model is served"
_MODEL = HostedLimit("model", _named, _SERVED, "required")
# The limits of embeddings, which all endpoints have.
EMBEDDING_LIMITS: tuple[HostedLimit, ...] = (_MODEL,)
_SHARED: tuple[HostedLimit, ...] = (
    _MODEL,
    HostedLimit(
        "stop",
        _no_longer_than(4),
        f"{limits.STOPS.maximum} sequences of {limits.STOP_TEXT.maximum:,} characters in all",
        "4 sequences",
    ),
    HostedLimit("temperature", _between("decimal", 0, 2), f"0 to {_MOST}", "0 to 2"),
    *(
        HostedLimit(field, _between("decimal", -2, 2), f"-{_MOST} to {_MOST}", "-2 to 2")
        for field in ("presence_penalty", "frequency_penalty")
    ),
    HostedLimit("logit_bias", _biases, 'an object; `""` means none', "an object"),
)
COMPLETION_LIMITS: tuple[HostedLimit, ...] = (
    *_SHARED,
    HostedLimit(
        "max_tokens",
        _between("integer", 0, None),
        "at least 0; -1 and -2 mean no limit",
        "at least 0",
    ),
    HostedLimit("logprobs", _between("integer", None, 5), "at most 20", "at most 5"),
)
_UNLIMITED = "at least 1; -1 and -2 mean no limit"
_HARMLESS = '`"none"` and `"auto"` are allowed without'
CHAT_LIMITS: tuple[HostedLimit, ...] = (
    *_SHARED,
    HostedLimit("messages", _with_calls, "`tool_calls` may be empty",
                "`tool_calls` have at least one call"),
    HostedLimit("max_tokens", _between("integer", 1, None), _UNLIMITED, "at least 1"),
    HostedLimit("max_completion_tokens", _between("integer", 1, None), _UNLIMITED, "at least 1"),
    *(
        HostedLimit(field, _no_longer_than(128), f"at most {limits.TOOLS.maximum:,}", "at most 128")
        for field in ("tools", "functions")
    ),
    HostedLimit("tool_choice", _with("tools"), f"{_HARMLESS} `tools`", "only with `tools`"),
    HostedLimit("parallel_tool_calls", _with("tools"), "allowed without `tools`",
                "only with `tools`"),
    HostedLimit("function_call", _with("functions"), f"{_HARMLESS} `functions`",
                "only with `functions`"),
    HostedLimit("top_logprobs", _with_logprobs, "may be 0 without `logprobs`",
                "only with `logprobs`"),
    HostedLimit("metadata", _stored, "may be empty without `store`", "only with `store`"),
)  # fmt: skip
RESPONSE_LIMITS: tuple[HostedLimit, ...] = (
    HostedLimit("max_output_tokens", _between("integer", 16, None), _UNLIMITED, "at least 16"),
)


def refused(
    hosted: Sequence[HostedLimit], body: Body, field: str | None = ""
) -> InvalidRequest | None:
    """Return the error for the first limit that a body exceeds, or None.

    Args:
        field: the field to check; by default all.
    """
    for limit in hosted:
        if field in ("", limit.field):
            error = limit.rule(limit.field, body)
            if error is not None:
                return error
    return None


def table() -> str:
    """Return the limits as a table in Markdown."""
    rows = ["| endpoint | field | by default | with `--limits openai` |", "|---|---|---|---|"]
    both = set(_SHARED)
    for name, hosted in (
        ("all", EMBEDDING_LIMITS),
        ("both", _SHARED[len(EMBEDDING_LIMITS) :]),
        ("completions", [one for one in COMPLETION_LIMITS if one not in both]),
        ("chat", [one for one in CHAT_LIMITS if one not in both]),
        ("responses", RESPONSE_LIMITS),
    ):
        rows += [f"| {name} | `{one.field}` | {one.engine} | {one.openai} |" for one in hosted]
    return "\n".join(rows) + "\n"
