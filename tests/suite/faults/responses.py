"""Faults in responses that are not streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suite.faults.base import broken, only, refuse, take, without
from suite.server import RESPONSES


def change(**values: Any) -> Any:
    """Return a reply hook that replaces values of a response."""
    return only(RESPONSES, lambda body: {**body, **values})


def parts(**values: Any) -> Any:
    """Return a reply hook that replaces values of a message's parts."""

    def hook(path: str, body: Any, sent: Any) -> Any:
        for item in body["output"] if path == RESPONSES else ():
            for part in item.get("content", ()):
                part |= values
        return body

    return hook


def items(kind: str, **values: Any) -> Any:
    """Return a reply hook that replaces values of output items of one type."""

    def hook(path: str, body: Any, sent: Any) -> Any:
        for item in body["output"] if path == RESPONSES else ():
            if item["type"] == kind:
                item |= values
        return body

    return hook


def valid_without(*names: str) -> Any:
    """Return a valid hook that drops fields of a request for a response."""
    drop = without(*names)
    return lambda path, body: drop(path, body) if path == RESPONSES else body


def pop(body: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object without a key."""
    return {name: value for name, value in body.items() if name != key}


broken("response-no-instructions-key", reply=only(RESPONSES, lambda body: pop(body, "error")))
broken("response-object", reply=change(object="responses"))
broken("response-id", reply=change(id="1"))
broken("response-tools-null", reply=change(tools=None))
broken("response-role", reply=items("message", role="user"))
broken("response-message-id", reply=items("message", id="1"))
broken("response-part-type", reply=parts(type="text"))
broken("response-other-answer", reply=parts(text="Other."))
broken("response-no-details", reply=only(RESPONSES, lambda body: {
    **body, "usage": pop(body["usage"], "input_tokens_details")}))  # fmt: skip
broken("response-usage-sum", reply=only(RESPONSES, lambda body: {
    **body, "usage": {**body["usage"], "total_tokens": 0}}))  # fmt: skip
broken("response-always-incomplete", reply=change(status="incomplete"))
broken("response-always-completed", reply=change(status="completed"))
broken("response-details-empty", reply=change(incomplete_details=None))
broken(
    "response-limit-ignored",
    valid=lambda path, body: (
        {**body, "max_output_tokens": 40} if body.get("max_output_tokens") == 16 else body
    ),
)
broken(
    "response-small-limit",
    request=take(lambda body: body.get("max_output_tokens") == 15, RESPONSES, max_output_tokens=16),
)
broken("response-instructions-ignored", valid=lambda path, body: (
    {**body, "instructions": None} if path == RESPONSES else body))  # fmt: skip
broken("response-instructions-untold", reply=change(instructions=None))
broken("response-items-refused", request=refuse(
    lambda body: isinstance(body.get("input"), list), RESPONSES))  # fmt: skip
broken("response-first-part", request=lambda path, body: _first_part(body))
broken("response-call-no-id", reply=items("function_call", id="call"))
broken("response-call-arguments", reply=items("function_call", arguments="{}"))
broken("response-call-as-text", valid=lambda path, body: (
    without("tools", "tool_choice")(path, body) if path == RESPONSES else body))  # fmt: skip
broken("response-calls-refused", request=refuse(
    lambda body: "function_call_output" in str(body.get("input")), RESPONSES))  # fmt: skip
broken("response-format-ignored", valid=lambda path, body: (
    {**body, "text": None} if path == RESPONSES else body))  # fmt: skip
broken("response-nulls-refused", request=refuse(
    lambda body: None in body.values(), RESPONSES))  # fmt: skip
broken("response-no-background", reply=only(RESPONSES, lambda body: pop(body, "background")))
broken("response-no-verbosity", reply=change(text={"format": {"type": "text"}}))
broken("response-temperature-null", reply=change(temperature=None))
broken("response-created-fraction", reply=only(RESPONSES, lambda body: {
    **body, "created_at": body["created_at"] + 0.5}))  # fmt: skip
broken("response-no-written-tokens", reply=only(RESPONSES, lambda body: {
    **body, "usage": {**body["usage"], "input_tokens_details": {"cached_tokens": 0}}}))  # fmt: skip
broken("response-item-completed", reply=items("message", status="completed"))
broken("response-metadata-untold", reply=change(metadata={}))
broken("response-logprobs-null", reply=parts(logprobs=None))
for _name in ("top_logprobs", "stop", "seed"):
    broken(f"response-{_name.replace('_', '-')}-ignored", valid=valid_without(_name))
broken("response-logprobs-ignored", valid=valid_without("include", "top_logprobs"))
broken("response-bytes-null", reply=lambda path, body, sent: _no_bytes(path, body))
broken("response-image-dropped", request=lambda path, body: _edited(
    body, lambda part: None if part.get("image_url") else part))  # fmt: skip
broken("response-file-ignored", request=lambda path, body: _edited(
    body, lambda part: None if part.get("file_id") else part))  # fmt: skip
broken("response-original-refused", request=refuse(
    lambda body: "'original'" in str(body.get("input")), RESPONSES))  # fmt: skip


def _first_part(body: dict[str, Any]) -> dict[str, Any]:
    for item in body["input"] if isinstance(body.get("input"), list) else ():
        if isinstance(item, dict) and isinstance(item.get("content"), list):
            item["content"] = item["content"][:1]
    return body


def _edited(body: dict[str, Any], edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Change the parts of each message in place; None removes a part."""
    for item in body["input"] if isinstance(body.get("input"), list) else ():
        if isinstance(item, dict) and isinstance(item.get("content"), list):
            item["content"] = [part for part in map(edit, item["content"]) if part is not None]
    return body


def _no_bytes(path: str, body: Any) -> Any:
    for item in body["output"] if path == RESPONSES else ():
        for part in item.get("content", ()):
            for entry in part.get("logprobs") or ():
                entry["bytes"] = None
    return body
