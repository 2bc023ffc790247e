"""Constraints in the spellings of other servers: followed or rejected, never dropped.

OpenAI rejects a field that it does not know, and names it (contract 1.2). A server that ignores a
constraint returns text that its client cannot parse.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jsonschema import Draft202012Validator

from ..check import Body, Skip, Unsupported, check, expect
from ..target import Api
from .tools import one_of

Judge: TypeAlias = Callable[[str], bool]

ASK = "Say something about the colour of the sky."
LIMIT = 256
COLOUR = one_of(colour=("ochre", "violet"), sure=(True, False))
REGEX = "(ochre|violet)-[0-9]{3}"
GBNF = 'root ::= ("ochre" | "violet") "-" [0-9] [0-9] [0-9]'
CHOICE = ["ochre-17", "violet-23"]


def _schema(text: str) -> bool:
    try:
        return bool(Draft202012Validator(COLOUR).is_valid(json.loads(text)))
    except ValueError:
        return False


def _object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _regex(text: str) -> bool:
    return re.fullmatch(REGEX, text) is not None


def _choice(text: str) -> bool:
    return text in CHOICE


# Each row: the id, the fields of the request, and a test of a text against the constraint.
FORMATS: Sequence[tuple[str, Mapping[str, Any], Judge]] = (
    ("object-schema", {"response_format": {"type": "json_object", "schema": COLOUR}}, _schema),
    ("schema-direct", {"response_format": {"type": "json_schema", "schema": COLOUR}}, _schema),
    ("format-regex", {"response_format": {"type": "regex", "pattern": REGEX}}, _regex),
    ("format-grammar", {"response_format": {"type": "grammar", "grammar": GBNF}}, _regex),
)
FIELDS: Sequence[tuple[str, Mapping[str, Any], Judge]] = (
    ("structured-json", {"structured_outputs": {"json": COLOUR}}, _schema),
    ("structured-regex", {"structured_outputs": {"regex": REGEX}}, _regex),
    ("structured-choice", {"structured_outputs": {"choice": CHOICE}}, _choice),
    ("structured-grammar", {"structured_outputs": {"grammar": GBNF}}, _regex),
    ("structured-object", {"structured_outputs": {"json_object": True}}, _object),
    ("guided-json", {"guided_json": COLOUR}, _schema),
    ("guided-regex", {"guided_regex": REGEX}, _regex),
    ("guided-choice", {"guided_choice": CHOICE}, _choice),
    ("guided-grammar", {"guided_grammar": GBNF}, _regex),
    ("grammar", {"grammar": GBNF}, _regex),
    ("json-schema", {"json_schema": COLOUR}, _schema),
    ("format-json", {"format": "json"}, _object),
    ("format-schema", {"format": COLOUR}, _schema),
)
PLAIN: Sequence[tuple[str, Mapping[str, Any], Judge]] = (
    ("completion-format",
     {"response_format": {"type": "json_schema",
                          "json_schema": {"name": "answer", "schema": COLOUR}}}, _schema),
    ("completion-structured", {"structured_outputs": {"regex": REGEX}}, _regex),
    ("completion-guided", {"guided_choice": CHOICE}, _choice),
    ("completion-grammar", {"grammar": GBNF}, _regex),
    ("completion-json-schema", {"json_schema": COLOUR}, _schema),
)  # fmt: skip


def _or_rejected(run: Body) -> Body:
    """Return a check that also passes if the server rejects the constraint by name."""

    @functools.wraps(run)
    async def either(api: Api) -> None:
        with contextlib.suppress(Unsupported):
            await run(api)

    return either


def _follows(fields: Mapping[str, Any], judge: Judge, chat: bool) -> Body:
    async def run(api: Api) -> None:
        full = {"temperature": 0, "max_tokens": LIMIT, **fields}
        made = await (api.chat(ASK, **full) if chat else api.complete(ASK, **full))
        choice = made["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        if choice["finish_reason"] == "length" and not chat:
            raise Skip(f"the model needs more than {LIMIT} tokens for the text")
        expect(isinstance(text, str) and judge(text.strip()),
               f"expected text that follows the constraint, or a 400 error that names "
               f"{next(iter(fields))!r}, but got {text!r}")  # fmt: skip

    return _or_rejected(run)


def _shown(fields: Mapping[str, Any]) -> str:
    name, value = next(iter(fields.items()))
    if isinstance(value, dict) and "properties" not in value:
        return f"{name} with {' and '.join(value)}"
    return name


for _rows, _level, _chat in ((FORMATS, "must", True), (FIELDS, "should", True),
                             (PLAIN, "should", False)):  # fmt: skip
    for _name, _fields, _judge in _rows:
        _where = "a chat completion" if _chat else "a completion"
        check(f"constraints.{_name}",
              f"The constraint {_shown(_fields)} of {_where} is followed, or rejected by name.",
              _level, "1.2 3.7")(_follows(_fields, _judge, _chat))  # type: ignore[arg-type]  # fmt: skip


@check("constraints.stream",
       "A constraint of a streamed chat completion is followed, or rejected by name.",
       "should", "1.2 3.7 10.29")  # fmt: skip
@_or_rejected
async def stream(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": LIMIT}
    for fields in ({"guided_regex": REGEX}, {"grammar": GBNF}):
        chunks = await api.chat_stream(ASK, **full, **fields)
        texts = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
        text = "".join(texts)
        expect(_regex(text.strip()),
               f"expected text that follows {next(iter(fields))}, but got {text!r}")  # fmt: skip


QUESTION = "What is the capital of France?"


@check("constraints.min-tokens", "min_tokens is followed, or rejected by name.",
       "should", "1.2 3.1")  # fmt: skip
@_or_rejected
async def min_tokens(api: Api) -> None:
    body = await api.chat(QUESTION, temperature=0, min_tokens=40, max_tokens=44)
    count = body["usage"]["completion_tokens"]
    expect(count >= 40, f"expected at least 40 completion tokens, but got {count}")


@check("constraints.ignore-eos", "ignore_eos is followed, or rejected by name.",
       "should", "1.2 3.1")  # fmt: skip
@_or_rejected
async def ignore_eos(api: Api) -> None:
    body = await api.chat(QUESTION, temperature=0, ignore_eos=True, max_tokens=80)
    count, reason = body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]
    expect(count == 80 and reason == "length",
           f"expected 80 completion tokens and length, but got {count} and {reason!r}")  # fmt: skip


@check("constraints.include-stop", "include_stop_str_in_output is followed, or rejected by name.",
       "should", "1.2 2.5")  # fmt: skip
@_or_rejected
async def include_stop(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": 60, "stop": ["5"]}
    body = await api.chat("Count to 12.", include_stop_str_in_output=True, **full)
    choice = body["choices"][0]
    if choice["finish_reason"] != "stop":
        raise Skip("the model did not write the stop sequence")
    text = choice["message"]["content"]
    plain = (await api.chat("Count to 12.", **full))["choices"][0]["message"]["content"]
    if not plain.startswith("1, 2, 3, 4"):
        raise Skip("the model ended its answer before the stop sequence")
    expect(text.endswith("5"), f"expected the stop sequence at the end, but got {text!r}")
