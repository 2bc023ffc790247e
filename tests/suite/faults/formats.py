"""Faults in response formats, and in the constraints of other servers."""

from __future__ import annotations

import json
from typing import Any

from suite.faults.edits import (
    Edit,
    chunks,
    given,
    has,
    ignores,
    put,
    refuses,
    reply,
    saying,
    takes,
    turn,
    valid,
)
from suite.server import COMPLETIONS
from suite.work import CHAT

TEXT = {"type": "text"}
AS_OBJECT = put("response_format", {"type": "json_object"})
AS_TEXT = put("response_format", None)
SCHEMA = has("response_format.type", "json_schema")
FORM = "response_format.json_schema"


def _json(change: Edit) -> Edit:
    """Return an edit of texts that are JSON objects."""
    return lambda text: change(text) if str(text).startswith("{") else text


def _without(key: str) -> Edit:
    """Return an edit of a JSON object's text that removes a key."""

    def change(text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            return text
        return json.dumps({k: v for k, v in value.items() if k != key}, ensure_ascii=False)

    return change


def _written(change: Edit) -> Any:
    return reply(turn("choices.*.message.content", _json(change)), at=CHAT)


FAULTS = {
    "forms-ignored": ignores("response_format"),
    "older-items-ignored": valid(put(f"{FORM}.schema.properties.pair.items", {"type": "string"}),
                                 at=CHAT),
    "text-refused": refuses(has("response_format", TEXT), CHAT),
    "text-is-json": valid(AS_OBJECT, when=has("response_format", TEXT)),
    "object-in-a-fence": _written(lambda text: f"```json\n{text}\n```"),
    "object-in-a-fence-streamed": chunks(turn("*.choices.*.delta.content", _json(lambda text: (
        "```" + text))), at=CHAT),
    "schema-ignored": valid(AS_OBJECT, when=SCHEMA),
    "schema-only-cold": valid(AS_OBJECT, when=lambda body: (
        SCHEMA(body) and body.get("temperature") == 1)),
    "schema-only-strict": valid(AS_OBJECT, when=lambda body: (
        SCHEMA(body) and not has(FORM, given("strict"))(body))),
    "schema-one-choice": valid(AS_OBJECT, when=lambda body: (
        SCHEMA(body) and (body.get("n") or 1) > 1)),
    **{f"schema-without-{key}": _written(_without(key)) for key in ("sky", "list", "one", "first")},
    "schema-ascii-only": _written(lambda text: text.encode("ascii", "replace").decode()),
    "schema-never-stops": reply(put("choices.*.finish_reason", "length"), when=SCHEMA),
    "schema-no-logprobs": valid(put("logprobs", None), when=SCHEMA),
    **{f"{name}-taken": takes(when, CHAT, response_format=TEXT) for name, when in {
        "bad-schema": has(FORM, saying("no_type")),
        "schema-list": has(f"{FORM}.schema", []),
        "no-schema": has("response_format", {"type": "json_schema"}),
        "form-type": has("response_format.type", "no_type"),
        "empty-form": has("response_format", {}),
        "no-form-name": has(FORM, lambda form: "name" not in form),
        "any-form-name": has(f"{FORM}.name", "no name!"),
        "form-string": has("response_format", str),
    }.items()},
    **{f"drops-{name.replace('_', '-')}": ignores(name) for name in (
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "grammar", "json_schema", "format", "min_tokens", "ignore_eos",
        "include_stop_str_in_output")},
    "drops-schema-of-object": valid(AS_OBJECT, when=has("response_format.type", "json_object")),
    "drops-direct-schema": valid(AS_TEXT, when=has("response_format[type=json_schema].schema")),
    "drops-other-formats": valid(AS_TEXT, when=has("response_format.type", lambda kind: (
        kind in ("regex", "grammar")))),
    "drops-completion-format": valid(AS_TEXT, at=COMPLETIONS),
    "drops-in-streams": valid(put("guided_regex", None), when=given("stream")),
}  # fmt: skip
