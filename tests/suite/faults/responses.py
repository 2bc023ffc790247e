"""Faults in responses."""

from __future__ import annotations

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


def _has(key: str, value: Any) -> Any:
    return lambda body: body.get(key) == value


def each(edit: Any) -> Any:
    """Return an events hook that replaces each event."""
    return lambda found: [edit(event) for event in found]


broken("response-no-instructions-key", reply=only(RESPONSES, lambda body: _pop(body, "error")))
broken("response-object", reply=change(object="responses"))
broken("response-id", reply=change(id="1"))
broken("response-tools-null", reply=change(tools=None))
broken("response-role", reply=items("message", role="user"))
broken("response-message-id", reply=items("message", id="1"))
broken("response-part-type", reply=parts(type="text"))
broken("response-other-answer", reply=parts(text="Other."))
broken("response-no-details", reply=only(RESPONSES, lambda body: {
    **body, "usage": _pop(body["usage"], "input_tokens_details")}))  # fmt: skip
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
    request=take(lambda body: body.get("max_output_tokens") == 1, RESPONSES, max_output_tokens=16),
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
broken("response-events-unnamed", event=lambda data: (
    data.partition(b"\n")[2] if data.startswith(b"event: ") else data))  # fmt: skip
broken("response-events-unnumbered", events=each(lambda event: {**event, "sequence_number": 0}))
broken("response-events-swapped", events=(lambda found: [found[1], found[0], *found[2:]]))
broken("response-no-part-event", events=(lambda found: [
    event for event in found if event["type"] != "response.content_part.added"]))  # fmt: skip
broken("response-no-end", events=(lambda found: found[:-1]))
broken("response-delta-lost", events=(lambda found: _lost(found, "output_text")))
broken("response-done-empty", events=each(lambda event: (
    {**event, "text": ""} if event["type"] == "response.output_text.done" else event)))  # fmt: skip
broken("response-delta-no-item", events=each(lambda event: (
    _pop(event, "item_id") if event["type"].endswith("text.delta") else event)))  # fmt: skip
broken("response-stream-no-usage", events=each(lambda event: (
    {**event, "response": {**event["response"], "usage": None}}
    if "response" in event else event)))  # fmt: skip
broken("response-stream-no-output", events=each(lambda event: (
    {**event, "response": {**event["response"], "output": []}}
    if "response" in event else event)))  # fmt: skip
broken("response-event-type", events=each(lambda event: (
    {**event, "logprobs": 0} if "logprobs" in event else event)))  # fmt: skip
broken("response-arguments-lost", events=(lambda found: _lost(found, "function_call")))
broken("response-not-stored", reply=lambda path, body, sent: (
    {"id": "x", "output": []} if path == "response GET" else body))  # fmt: skip
broken("response-delete-false", reply=only("response DELETE", lambda body: {
    **body, "deleted": False}))  # fmt: skip
broken("response-always-stored", valid=lambda path, body: (
    {**body, "store": True} if path == RESPONSES else body))  # fmt: skip
broken("response-says-not-stored", reply=lambda path, body, sent: (
    {**body, "store": False} if path == RESPONSES and "store" not in sent else body))  # fmt: skip
broken("response-previous-ignored", valid=lambda path, body: (
    {**body, "previous_response_id": None} if path == RESPONSES else body))  # fmt: skip
broken("response-no-items", reply=only("response input_items", lambda body: {**body, "data": []}))
broken("response-item-text", reply=only("response input_items", lambda body: {
    **body, "data": [{**one, "content": [{"text": ""}]} for one in body["data"]]}))  # fmt: skip
broken("response-tokens-zero", reply=only(f"{RESPONSES}/input_tokens", lambda body: {
    **body, "input_tokens": 0}))  # fmt: skip
for _name, _key, _value, _good in (
    ("temperature", "temperature", 3, 1),
    ("input", "input", 5, "Hello"),
    ("limit", "max_output_tokens", "many", 16),
    ("model", "model", "no-such-model-anywhere", "org/toy"),
    ("previous", "previous_response_id", "resp_none", None),
):
    broken(
        f"response-any-{_name}",
        request=take(_has(_key, _value), RESPONSES, **{_key: _good}),
    )
broken("response-unknown-400", error=lambda status, error, sent: (
    400 if "id 'resp_none'" in error["message"] else status, {"error": error}))  # fmt: skip


def _pop(body: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != key}


def _first_part(body: dict[str, Any]) -> dict[str, Any]:
    for item in body["input"] if isinstance(body.get("input"), list) else ():
        if isinstance(item, dict) and isinstance(item.get("content"), list):
            item["content"] = item["content"][:1]
    return body


def _lost(found: list[Any], kind: str) -> list[Any]:
    at = [n for n, event in enumerate(found) if kind in event["type"] and "delta" in event]
    kept = [event for n, event in enumerate(found) if n not in at[1:2]]
    return [{**event, "sequence_number": n} for n, event in enumerate(kept)]
