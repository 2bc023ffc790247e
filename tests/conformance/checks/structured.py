"""`response_format`: answers that match a format (contract 3.7)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from ..check import Body, Skip, check, expect
from ..target import Api
from .tools import one_of

H = "/chat/completions"
ASK = "Answer in JSON: which colour is the sky?"
LIMIT = 256
COLOUR = one_of(colour=("red", "blue"), sure=(True, False))


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    """Return a response_format with a schema."""
    inner = {"name": "answer", "strict": True, "schema": schema, **more}
    return {"type": "json_schema", "json_schema": inner}


async def _content(api: Api, form: Any, **body: Any) -> str:
    full = {"response_format": form, "temperature": 0, "max_tokens": LIMIT, **body}
    choice = (await api.chat(ASK, **full))["choices"][0]
    if choice["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the answer")
    return str(choice["message"]["content"])


def _valid(text: str, schema: Any) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        expect(False, f"expected JSON, but got {text!r}")
    error = next(Draft202012Validator(schema).iter_errors(value), None)
    expect(error is None, f"expected JSON that matches the schema, but got {text!r}")


@check("structured.text", "The response_format text returns the same answer as no response_format.",
       "must", "3.1 3.7")  # fmt: skip
async def text(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": 8}
    plain = await api.chat("Count to 7.", **full)
    formatted = await api.chat("Count to 7.", response_format={"type": "text"}, **full)
    found = [body["choices"][0]["message"]["content"] for body in (plain, formatted)]
    expect(found[0] == found[1], f"expected the same answer, but got {found}")


@check("structured.object", "With response_format json_object, the content is a JSON object.",
       "must", "3.7 10.72")  # fmt: skip
async def json_object(api: Api) -> None:
    found = await _content(api, {"type": "json_object"})
    _valid(found, {"type": "object"})


@check("structured.object-stream",
       "With response_format json_object, the streamed content is a JSON object.",
       "must", "3.7 10.72")  # fmt: skip
async def object_stream(api: Api) -> None:
    full = {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": LIMIT}
    choices = [c["choices"][0] for c in await api.chat_stream(ASK, **full) if c["choices"]]
    if choices[-1]["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the answer")
    _valid("".join(c["delta"].get("content") or "" for c in choices), {"type": "object"})


@check("structured.schema", "With response_format json_schema, the content matches the schema.",
       "must", "3.7 10.73")  # fmt: skip
async def schema(api: Api) -> None:
    _valid(await _content(api, schema_format(COLOUR)), COLOUR)


# A tuple as drafts 4 to 2019-09 have it, without naming one of them.
TUPLE = {"type": "array", "items": [{"type": "integer"}, {"type": "boolean"}],
         "additionalItems": False, "minItems": 2}  # fmt: skip
OLDER = {"type": "object", "properties": {"pair": TUPLE}, "required": ["pair"],
         "additionalProperties": False}  # fmt: skip


@check("structured.older",
       "A schema with a list of items, as in older drafts, is followed, or rejected with a 400 "
       "error.",
       "should", "3.7")  # fmt: skip
async def older(api: Api) -> None:
    form = schema_format(OLDER, strict=False)
    body = {"model": api.model, "messages": [{"role": "user", "content": ASK}],
            "response_format": form, "temperature": 0, "max_tokens": LIMIT}  # fmt: skip
    await _content(api, schema_format(COLOUR))
    reply = await api.post(H, body)
    if reply.status == 400:
        reply.error(400)
        return
    choice = reply.ok()["choices"][0]
    if choice["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the answer")
    found = choice["message"]["content"]
    try:
        one, two = json.loads(found)["pair"]
    except (ValueError, TypeError, LookupError):
        one = two = None
    is_pair = type(one) is int and type(two) is bool
    expect(is_pair, f"expected an integer and a boolean as the pair, but got {found!r}")


@check("structured.schema-stream",
       "With response_format json_schema, the streamed content is the same as without streaming.",
       "must", "10.29 10.73")  # fmt: skip
async def schema_stream(api: Api) -> None:
    form = schema_format(COLOUR)
    whole = await _content(api, form)
    full = {"response_format": form, "temperature": 0, "max_tokens": LIMIT}
    chunks = await api.chat_stream(ASK, **full)
    found = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    expect(found == whole, f"expected {whole!r}, but got {found!r}")


@check("structured.ten",
       "With response_format json_schema, ten of ten answers at temperature 1 match the schema.",
       "must", "10.73", seconds=60,
       chance="A server that enforces nothing passes with q¹⁰, where q is the probability that the "
              "model obeys by itself; a right one never fails.")  # fmt: skip
async def ten(api: Api) -> None:
    for seed in range(10):
        full = {"temperature": 1, "seed": seed}
        _valid(await _content(api, schema_format(COLOUR), **full), COLOUR)


# Schemas that leave little choice, by the feature that each one contains.
KINDS: Mapping[str, Any] = {
    "nested": {
        "type": "object",
        "properties": {"sky": COLOUR, "n": {"type": "integer", "enum": [1, 2, 3]}},
        "required": ["sky", "n"], "additionalProperties": False,
    },
    "array": {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}
        },
        "required": ["list"], "additionalProperties": False,
    },
    "any-of": {
        "type": "object",
        "properties": {"one": {"anyOf": [{"enum": ["a"]}, {"type": "null"}]}},
        "required": ["one"], "additionalProperties": False,
    },
    "ref": {
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/side"}, "second": {"$ref": "#/$defs/side"}},
        "required": ["first", "second"], "additionalProperties": False,
        "$defs": {"side": {"type": "string", "enum": ["left", "right"]}},
    },
}  # fmt: skip
FEATURES = {
    "nested": "nested objects", "array": "arrays", "any-of": "anyOf", "ref": "$ref",
}  # fmt: skip


def _matches(kind: Any) -> Body:
    async def run(api: Api) -> None:
        _valid(await _content(api, schema_format(kind)), kind)

    return run


for _name, _kind in KINDS.items():
    _promise = f"The content matches a JSON schema with {FEATURES[_name]}."
    check(f"structured.{_name}", _promise, "must", "10.73")(_matches(_kind))


@check("structured.unicode",
       "With response_format json_schema, the content can have quotes, backslashes and any "
       "Unicode character.",
       "must", "10.73")  # fmt: skip
async def unicode(api: Api) -> None:
    word = 'é "漢" \\ 🔥'
    found = await _content(api, schema_format(one_of(word=(word,))))
    expect(json.loads(found) == {"word": word}, f"expected {word!r} in it, but got {found!r}")


@check("structured.not-strict",
       "With response_format json_schema, the content matches the schema if strict is false or "
       "null.",
       "should", "3.7")  # fmt: skip
async def not_strict(api: Api) -> None:
    for strict in (False, None):
        _valid(await _content(api, schema_format(COLOUR, strict=strict)), COLOUR)


@check("structured.finish",
       "With response_format json_schema, the finish_reason is stop for a complete answer, and "
       "length for a truncated one.",
       "must", "3.7")  # fmt: skip
async def finish(api: Api) -> None:
    full = {"response_format": schema_format(COLOUR), "temperature": 0}
    for limit, expected in ((LIMIT, "stop"), (2, "length")):
        reason = (await api.chat(ASK, max_tokens=limit, **full))["choices"][0]["finish_reason"]
        expect(reason == expected, f"{limit} tokens: expected {expected}, but got {reason!r}")


@check("structured.choices",
       "With response_format json_schema and n 3, every choice matches the schema.",
       "should", "3.7")  # fmt: skip
async def choices(api: Api) -> None:
    full = {"response_format": schema_format(COLOUR), "max_tokens": LIMIT}
    for choice in (await api.chat(ASK, n=3, **full))["choices"]:
        _valid(choice["message"]["content"], COLOUR)


@check("structured.logprobs",
       "With response_format json_schema, the bytes in logprobs join to the content.",
       "should", "3.4 3.7")  # fmt: skip
async def logprobs(api: Api) -> None:
    full = {"response_format": schema_format(COLOUR), "temperature": 0, "max_tokens": LIMIT}
    choice = (await api.chat(ASK, logprobs=True, **full))["choices"][0]
    data = b"".join(bytes(entry["bytes"] or ()) for entry in choice["logprobs"]["content"])
    content = choice["message"]["content"]
    expect(data.decode() == content, f"expected the bytes of {content!r}, but got {data!r}")


# Each row: the id, an invalid response_format, level, source.
WRONG: Sequence[tuple[str, Any, str, str]] = (
    ("bad-schema", schema_format({"type": "no_type"}), "must", "3.7 10.74"),
    ("schema-list", schema_format([]), "must", "3.7 10.74"),
    ("no-schema", {"type": "json_schema"}, "must", "3.7 10.74"),
    ("string", "json_object", "must", "3.7 10.74"),
    ("type-unknown", {"type": "no_type"}, "must", "3.1 10.74"),
    ("type-missing", {}, "must", "3.1"),
    ("name-missing", {"type": "json_schema", "json_schema": {"schema": COLOUR}}, "should", "3.1"),
    ("name-invalid", schema_format(COLOUR, name="no name!"), "should", "3.1"),
)


# Descriptions of the formats that are too long to show.
LONG = {
    "name-missing": "json_schema without a name",
    "name-invalid": "json_schema with the name 'no name!'",
}


def _rejected(form: Any) -> Body:
    async def run(api: Api) -> None:
        await api.chat(ASK, response_format=schema_format(COLOUR), max_tokens=1)
        messages = [{"role": "user", "content": ASK}]
        body = {"model": api.model, "messages": messages, "response_format": form, "max_tokens": 1}
        error = (await api.post(H, body)).error(400)
        text = str(error["param"] or error["message"])
        named = "response_format" in text or "schema" in text
        expect(named, f"expected an error that names it or its schema, but got {error}")

    return run


for _name, _form, _level, _source in WRONG:
    _shown = LONG.get(_name, json.dumps(_form))
    _promise = (
        f"The response_format {_shown} is rejected with a 400 error that names it or its schema."
    )
    check(f"structured.{_name}", _promise, _level, _source)(_rejected(_form))  # type: ignore[arg-type]
