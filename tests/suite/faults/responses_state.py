"""Faults in stored responses and in conversations."""

from __future__ import annotations

from typing import Any

from suite.faults.base import broken, only, refuse, take
from suite.faults.responses import pop
from suite.faults.responses_tools import input_without
from suite.responses.routes import TOKENS
from suite.server import RESPONSES

R = RESPONSES


def listed(**values: Any) -> Any:
    """Return a reply hook that replaces values of listed input items."""
    return only("response input_items", lambda body: {
        **body, "data": [{**one, **values} for one in body["data"]]})  # fmt: skip


def counted_without(name: str) -> Any:
    """Return a valid hook that drops a field from requests for a number of tokens."""
    return lambda path, body: pop(body, name) if path == TOKENS else body


def _changed(kind: str, **values: Any) -> Any:
    return only(f"conversation {kind}", lambda body: {**body, **values})


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
broken("response-unknown-400", error=lambda status, error, sent: (
    400 if "id 'resp_none'" in error["message"] else status, {"error": error}))  # fmt: skip


broken("response-stored-other", reply=only("response GET", lambda body: {
    **body, "temperature": 0.5}))  # fmt: skip
broken("response-parent-no-code", error=lambda status, error, sent: (
    status, {"error": {**error, "code": None} if error["param"] == "previous_response_id"
             else error}))  # fmt: skip
broken("response-chain-no-output", chain=lambda found, parent: [
    item for item in found if item.get("role") != "assistant"])  # fmt: skip
broken("response-previous-untold", reply=only(R, lambda body: {
    **body, "previous_response_id": None}))  # fmt: skip
broken("response-tools-inherited", reply=lambda path, body, sent: _inherited(path, body, sent))
broken("response-instructions-inherited", chain=lambda found, parent: [
    *([{"role": "system", "content": parent["instructions"]}] if parent.get("instructions")
      else []), *found])  # fmt: skip
broken(
    "response-output-alone-refused",
    request=refuse(
        lambda body: body.get("previous_response_id") and "call_output" in str(body.get("input")), R
    ),
)
broken("response-tokens-no-tools", valid=counted_without("tools"))
broken("response-tokens-no-chain", valid=counted_without("previous_response_id"))
broken("response-items-short", reply=listed(content="Hello"))
broken("response-items-same-id", reply=listed(id="msg_0"))
broken("response-items-ascending", query=lambda query: {"order": "asc", **query})
broken("response-reference-dropped", request=input_without("item_reference"))
broken("response-reference-400", error=lambda status, error, sent: (
    400 if "Item with id" in error["message"] else status, {"error": error}))  # fmt: skip
broken("response-cancelled", refuses_cancel=False)
broken("response-replay-all", query=lambda query: pop(query, "starting_after"))
broken("response-socket-500", no_socket=500)
broken("response-compact-500", no_compact=500)
broken("conversation-no-metadata", reply=_changed("GET", metadata={}))
broken("conversation-metadata-kept", reply=_changed("POST", metadata={}))
broken("conversation-items-reversed", reply=only("conversation items", lambda body: {
    **body, "data": body["data"][::-1]}))  # fmt: skip
broken("conversation-not-read", valid=lambda path, body: pop(body, "conversation"))
broken("conversation-not-deleted", reply=_changed("DELETE", deleted=False))
broken("conversation-and-parent", request=take(
    lambda body: body.get("conversation") and body.get("previous_response_id"), R,
    conversation=None))  # fmt: skip


def _inherited(path: str, body: Any, sent: Any) -> Any:
    """Give a Response that continues another one a tool that its request does not have."""
    if path != R or not sent.get("previous_response_id") or sent.get("tools"):
        return body
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": ""}
    return {**body, "tools": [tool]}
