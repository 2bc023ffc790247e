"""Faults in answers with a response format."""

from __future__ import annotations

import json
from typing import Any

from suite.faults.base import broken, deltas, messages, refuse, take, without
from suite.work import CHAT

TEXT = {"type": "text"}


def _dropping(key: str) -> Any:
    return messages(lambda m: _change(m, lambda text: _drop(text, key)))


def _form(when: Any) -> Any:
    def wanted(body: Any) -> Any:
        form = body.get("response_format")
        return isinstance(form, dict) and when(form)

    return wanted


broken("forms-ignored", valid=without("response_format"))
broken(
    "text-refused",
    request=refuse(lambda body: body.get("response_format") == TEXT, CHAT),
)
broken(
    "text-is-json",
    valid=lambda path, body: (
        {**body, "response_format": {"type": "json_object"}}
        if body.get("response_format") == TEXT
        else body
    ),
)
broken(
    "object-in-a-fence",
    reply=messages(lambda m: _change(m, lambda text: f"```json\n{text}\n```")),
)
broken(
    "object-in-a-fence-streamed",
    chunks=deltas(lambda d: d.update(content="```" + d["content"])
                  if str(d.get("content")).startswith("{") else None),
)  # fmt: skip
broken(
    "schema-ignored",
    valid=lambda path, body: (
        {**body, "response_format": {"type": "json_object"}} if _schema(body) else body
    ),
)
broken(
    "schema-only-cold",
    valid=lambda path, body: (
        {**body, "response_format": {"type": "json_object"}}
        if _schema(body) and body.get("temperature") == 1
        else body
    ),
)
broken(
    "schema-only-strict",
    valid=lambda path, body: (
        {**body, "response_format": {"type": "json_object"}}
        if _schema(body) and not body["response_format"]["json_schema"].get("strict")
        else body
    ),
)
broken(
    "schema-one-choice",
    valid=lambda path, body: (
        {**body, "response_format": {"type": "json_object"}}
        if _schema(body) and (body.get("n") or 1) > 1
        else body
    ),
)
for _key in ("sky", "list", "one", "first"):
    broken(
        f"schema-without-{_key}",
        reply=_dropping(_key),
    )
broken(
    "schema-ascii-only",
    reply=messages(lambda m: _change(m, lambda text: text.encode("ascii", "replace").decode())),
)
broken(
    "schema-never-stops",
    reply=lambda path, body, sent: _always(body, sent, "length"),
)
broken(
    "schema-no-logprobs",
    valid=lambda path, body: {**body, "logprobs": None} if _schema(body) else body,
)
for _name, _when in (
    ("bad-schema", lambda form: "no_type" in str(form.get("json_schema"))),
    ("schema-list", lambda form: (form.get("json_schema") or {}).get("schema") == []),
    ("no-schema", lambda form: form == {"type": "json_schema"}),
    ("form-type", lambda form: form.get("type") == "no_type"),
    ("empty-form", lambda form: form == {}),
    ("no-form-name", lambda form: "name" not in form.get("json_schema", {"name": 0})),
    ("any-form-name", lambda form: (form.get("json_schema") or {}).get("name") == "no name!"),
):
    broken(
        f"{_name}-taken",
        request=take(_form(_when), CHAT, response_format=TEXT),
    )
broken(
    "form-string-taken",
    request=take(lambda body: isinstance(body.get("response_format"), str), CHAT,
                 response_format=TEXT),
)  # fmt: skip


def _schema(body: Any) -> bool:
    return (body.get("response_format") or {}).get("type") == "json_schema"


def _change(message: dict[str, Any], change: Any) -> None:
    if str(message["content"]).startswith("{"):
        message["content"] = change(message["content"])


def _drop(text: str, key: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return json.dumps({k: v for k, v in value.items() if k != key}, ensure_ascii=False)


def _always(body: Any, sent: Any, reason: str) -> Any:
    for choice in body.get("choices", ()) if _schema(sent) else ():
        choice["finish_reason"] = reason
    return body
