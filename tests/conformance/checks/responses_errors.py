"""Rejections of requests to `/responses`: what each error names (contract of responses 2.2)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..check import Body, Diverges, check, expect
from ..target import Api, expect_too_long
from .responses import ASK, WEATHER, R, respond

MISSING, VALUE, TYPE = "missing_required_parameter", "invalid_value", "invalid_type"
MODEL, ABSENT = "no-such-model-anywhere", "the field is absent"
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather"}}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
NAMED = {"type": "function", "name": "no_such_tool"}
USER = {"role": "user"}


class Wrong(NamedTuple):
    """A request that must be rejected.

    Args:
        name: the check's id in the group.
        changes: the invalid fields; `ABSENT` as a value removes the field.
        named: the `param` of the error, or a word in the error if `exact` is False.
        code: the `code` of the error; an empty string for any code.
    """

    name: str
    changes: Mapping[str, Any]
    named: str | None
    code: str = ""
    level: str = "must"
    source: str = "R2.2"
    statuses: Sequence[int] = (400,)
    exact: bool = True


def _said(*parts: Any) -> list[Any]:
    return [{**USER, "content": [*parts]}]


WRONG: Sequence[Wrong] = (
    Wrong("temperature-above", {"temperature": 2.1}, "temperature", source="7 1.2 R10.28"),
    Wrong("temperature-below", {"temperature": -1}, "temperature", source="R2.1 R10.28"),
    Wrong("top-p-above", {"top_p": 1.1}, "top_p", source="R2.1 R10.28"),
    Wrong("top-logprobs-above", {"top_logprobs": 21}, "top_logprobs", source="R2.1 R10.28"),
    Wrong("metadata-pairs", {"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata",
          source="R2.1 R10.28"),
    Wrong("include-unknown", {"include": ["no_such_thing"]}, "include[0]", VALUE,
          source="R2.1 R10.28"),
    Wrong("truncation-unknown", {"truncation": "no_such_word"}, "truncation", VALUE,
          source="R2.1 R10.28"),
    Wrong("limit-string", {"max_output_tokens": "many"}, "max_output_tokens", source="7 1.2"),
    Wrong("model-missing", {"model": ABSENT}, "model", MISSING, source="R2.2 R10.23"),
    Wrong("model-null", {"model": None}, "model", TYPE, source="R2.2 R10.23"),
    Wrong("input-missing", {"input": ABSENT}, "input", MISSING, source="R2.2 R10.23"),
    Wrong("input-null", {"input": None}, "input", TYPE, source="R2.2 R10.23"),
    Wrong("input-number", {"input": 5}, "input", TYPE, source="7 1.2 R10.23"),
    Wrong("input-empty", {"input": ""}, None, MISSING, source="R2.2 R10.23"),
    Wrong("input-empty-list", {"input": []}, None, MISSING, source="R2.2 R10.23"),
    Wrong("messages", {"messages": [{**USER, "content": "Hello"}], "input": ABSENT}, None,
          "unsupported_parameter", source="R2.2 R10.19 [lobehub#8163]"),
    Wrong("model-unknown", {"model": MODEL}, "model", "model_not_found", "must", "7 1.2 R10.24",
          (400, 404)),
    Wrong("previous-unknown", {"previous_response_id": "resp_none"}, "previous", "", "should",
          "7 1.2", (400, 404), False),
    Wrong("item-number", {"input": [5]}, "input[0]", TYPE),
    Wrong("item-unknown", {"input": [{"type": "no_such_item"}]}, "input[0]", VALUE,
          source="R2.2 R10.25"),
    Wrong("role-unknown", {"input": [{"role": "nobody", "content": "Hello"}]}, "input[0]", VALUE,
          source="R2.2 R10.25"),
    Wrong("content-missing", {"input": [USER]}, "input[0].content", MISSING),
    Wrong("part-unknown", {"input": _said({"type": "no_such_part"})}, "input[0].content[0].type",
          VALUE, source="R2.2 R10.25"),
    Wrong("part-of-assistant", {"input": _said({"type": "output_text", "text": "Hello"})},
          "input[0].content[0]", VALUE, source="R2.2 R10.25"),
    Wrong("tool-of-chat", {"tools": [CHAT_TOOL]}, "tools[0].name", MISSING,
          source="R2.2 R10.19"),
    Wrong("tool-unknown", {"tools": [{"type": "no_such_tool"}]}, "tools[0].type", VALUE,
          source="R2.6"),
    Wrong("choice-of-chat", {"tools": [WEATHER], "tool_choice": CHAT_TOOL}, "tool_choice.name",
          MISSING),
    Wrong("choice-alone", {"tool_choice": "required"}, "tool_choice", source="R2.2 R10.45"),
    Wrong("choice-absent", {"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice",
          source="R2.2 R10.45"),
    Wrong("format-of-chat", {"text": {"format": CHAT_FORMAT}}, "text.format.name", MISSING,
          source="R2.2 R9.2 R10.38"),
)  # fmt: skip


def _promise(wrong: Wrong) -> str:
    shown = json.dumps({name: value for name, value in wrong.changes.items() if value != ABSENT})
    if wrong.name.endswith("-missing") and ABSENT in wrong.changes.values():
        shown = f"no {wrong.named}"
    if wrong.name == "metadata-pairs":
        shown = "more than 16 pairs of metadata"
    elif len(shown) > 90:
        shown = f"{shown[:88]}…"
    codes = " or ".join(map(str, wrong.statuses))
    what = f"whose param is {wrong.named}" if wrong.exact else f"that names {wrong.named!r}"
    more = f" and whose code is {wrong.code}" if wrong.code else ""
    if wrong.named is None:
        what, more = f"whose code is {wrong.code}", ""
    return f"A request to /responses with {shown} is rejected with a {codes} error {what}{more}."


def _rejected(wrong: Wrong) -> Body:
    async def run(api: Api) -> None:
        await respond(api, "Hello", max_output_tokens=16)
        full = {"model": api.model, "input": "Hello", "max_output_tokens": 16, **wrong.changes}
        reply = await api.post(R, {name: one for name, one in full.items() if one != ABSENT})
        if reply.status == 200 and wrong.changes.get("model") == MODEL:
            raise Diverges("the server accepts every model name")
        error = reply.error(*wrong.statuses)
        if not wrong.exact:
            found = str(wrong.named) in str(error)
            expect(found, f"expected an error that names {wrong.named!r}, but got {error}")
            return
        param, code = error["param"], error["code"]
        expect(param == wrong.named, f"expected the param {wrong.named}, but got {error}")
        expect(wrong.code in ("", code), f"expected the code {wrong.code}, but got {error}")

    return run


for _wrong in WRONG:
    check(f"responses.{_wrong.name}", _promise(_wrong), _wrong.level, _wrong.source)(  # type: ignore[arg-type]
        _rejected(_wrong)
    )


@check("responses.minimum",
       "A max_output_tokens below 16 is rejected with a 400 error whose param is "
       "max_output_tokens, or the answer has no more tokens.",
       "must", "7 R10.27 [pi#6265]")  # fmt: skip
async def minimum(api: Api) -> None:
    await respond(api, max_output_tokens=16)
    body = {"model": api.model, "input": ASK, "max_output_tokens": 15}
    reply = await api.post(R, body)
    if reply.status == 200 and not api.hosted:
        count = reply.json()["usage"]["output_tokens"]
        expect(count <= 15, f"expected at most 15 tokens, but got {count}")
        return
    error = reply.error(400)
    expect(
        error["param"] == "max_output_tokens", f"expected param max_output_tokens, but got {error}"
    )


# Each row: the id, the item alone in the input, the beginning of the message.
ORPHANS: Sequence[tuple[str, Mapping[str, Any], str]] = (
    ("output-orphan", {"type": "function_call_output", "call_id": "call_7", "output": "warm"},
     "No tool call found for function call output with call_id call_7"),
    ("call-orphan", {"type": "function_call", "call_id": "call_7", "name": "get_weather",
                     "arguments": "{}"}, "No tool output found for function call call_7"),
)  # fmt: skip


def _orphan(item: Mapping[str, Any], text: str) -> Body:
    async def run(api: Api) -> None:
        await respond(api, "Hello", max_output_tokens=16)
        given = [{**USER, "content": "Hello"}, item]
        body = {"model": api.model, "input": given, "tools": [WEATHER], "max_output_tokens": 16}
        error = (await api.post(R, body)).error(400)
        expect(error["param"] == "input", f"expected the param input, but got {error}")
        expect(text in error["message"], f"expected {text!r}, but got {error}")

    return run


for _name, _item, _text in ORPHANS:
    _what = "output without its call" if _name == "output-orphan" else "call without its output"
    check(f"responses.{_name}",
          f"A function {_what} is rejected with a 400 error whose param is input, and that has "
          "the call_id.",
          "must", "R2.2 R10.17")(_orphan(_item, _text))  # fmt: skip


# Each row: the field, its value, and the key by which a served Response shows its effect.
UNSERVED: Sequence[tuple[str, Any, str | None]] = (
    ("background", True, "background"),
    ("moderation", {"model": "omni-moderation-latest"}, "moderation"),
    ("prompt", {"id": "pmpt_none"}, None),
)


def _unserved(field: str, value: Any, key: str | None) -> Body:
    async def run(api: Api) -> None:
        await respond(api, "Hello", max_output_tokens=16)
        body = {"model": api.model, "input": "Hello", "max_output_tokens": 16, field: value}
        await _named_or_served(api, body, field, key)

    return run


async def _named_or_served(
    api: Api, body: Mapping[str, Any], param: str, key: str | None = None
) -> None:
    """Require the effect of a field, or a rejection that names it.

    Args:
        key: the key of a Response that shows the effect; None if the request cannot succeed.
    """
    reply = await api.post(R, body)
    if reply.status == 200:
        found = reply.json().get(key) if key else None
        expect(found, f"expected the effect of {param} or a rejection, but got {reply.text[:200]}")
        return
    error = reply.error(400, 404)
    named = error["param"] == param and error["code"] == "unsupported_parameter"
    # A server that has prompts and files does not know these.
    known = key is None and "not found" in error["message"]
    expect(named or known, f"expected unsupported_parameter and the param {param}, but got {error}")


for _field, _value, _key in UNSERVED:
    check(f"responses.{_field}",
          f"A request to /responses with {_field} is served, or rejected with an error of the code "
          "unsupported_parameter that names it.",
          "must", "R2.1 R10.49")(_unserved(_field, _value, _key))  # fmt: skip


@check("responses.file-id",
       "An image by file_id is rejected with an error that names it, if there is no such file.",
       "must", "R2.4 R10.49")  # fmt: skip
async def file_id(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    given = _said({"type": "input_image", "file_id": "file-none"})
    body = {"model": api.model, "input": given, "max_output_tokens": 16}
    await _named_or_served(api, body, "input[0].content[0].file_id")


@check("responses.unknown-field",
       "An unknown field of a request to /responses is rejected with 400.",
       "may", "R2.2 R10.53")  # fmt: skip
async def unknown_field(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    body = {"model": api.model, "input": "Hello", "max_output_tokens": 16, "no_such_field": 1}
    reply = await api.post(R, body)
    if reply.status == 200:
        raise Diverges("the server accepts unknown fields")
    error = reply.error(400)
    expect(error["param"] == "no_such_field", f"expected param no_such_field, but got {error}")


@check("responses.context",
       "An input that exceeds the context length is rejected with 400, the code "
       "context_length_exceeded and both of OpenAI's texts.",
       "should", "R2.2 R10.58")  # fmt: skip
async def context(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    # Two million words: more than any context length, less than any limit on bodies.
    reply = await api.post(R, {"model": api.model, "input": "a b " * 1_000_000})
    expect_too_long(reply, "exceeds the context window", "maximum context length is")
