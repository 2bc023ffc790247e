"""Faults in stored completions."""

from __future__ import annotations

from typing import Any

from suite.faults.base import broken, only, take, without
from suite.rules import Refused
from suite.work import CHAT


def change(kind: str, **values: Any) -> Any:
    """Return a reply hook that replaces values of a reply about stored completions."""
    return only(f"stored {kind}", lambda body: {**body, **values})


broken("store-ignored", valid=without("store"))
broken("store-unlisted", reply=lambda path, body, sent: _not_there(path, body))
broken("store-other-answer", reply=only("stored one", lambda body: _reworded(body)))
broken("store-no-model", reply=only("stored one", lambda body: _pop(body, "model")))
broken("store-created-string", reply=change("one", created="now"))
broken("store-no-metadata", reply=change("one", metadata=None))
broken(
    "store-always",
    valid=lambda path, body: {**body, "store": True} if path == CHAT else body,
)
broken(
    "store-no-streams",
    valid=lambda path, body: {**body, "store": False} if body.get("stream") else body,
)
broken(
    "store-stream-chunk",
    reply=change("stream", object="chat.completion.chunk"),
)
broken("store-stream-empty", reply=only("stored stream", lambda body: _reworded(body)))
broken("store-unknown-400", error=lambda status, error, sent: (
    400 if "No completion" in error["message"] else status, {"error": error}))  # fmt: skip
broken("store-list-object", reply=change("list", object="page"))
broken("store-list-no-ids", reply=change("list", first_id=None, last_id=None))
broken("store-list-no-more", reply=only("stored list", lambda body: _pop(body, "has_more")))
broken("store-list-always-more", reply=change("list", has_more=True))
broken("store-filter-ignored", reply=only("stored list", lambda body: {
    **body, "data": [*body["data"], {"id": "chatcmpl-of-another"}]}))  # fmt: skip
broken("store-model-ignored", query=lambda query: _less(query, "model"))
broken("store-order-ignored", query=lambda query: _less(query, "order"))
broken("store-newest-first", query=lambda query: {"order": "desc", **query})
broken("store-limit-ignored", query=lambda query: _less(query, "limit"))
broken("store-after-ignored", query=lambda query: _less(query, "after"))
broken("store-limit-refused", query=lambda query: _no_limit(query))
broken(
    "store-messages-last",
    reply=only("stored messages", lambda body: {**body, "data": body["data"][-1:]}),
)
broken(
    "store-messages-same-id",
    reply=only("stored messages", lambda body: _items(body, id="message")),
)
broken(
    "store-messages-no-id",
    reply=only("stored messages", lambda body: {
        **body, "data": [{k: v for k, v in one.items() if k != "id"} for one in body["data"]]}),
)  # fmt: skip
broken("store-messages-no-ends", reply=change("messages", first_id=None))
broken("store-messages-type", reply=only("stored messages", lambda body: _items(body, refusal=0)))
broken("store-update-ignored", reply=change("updated", metadata={}))
broken("store-update-anything", error=lambda status, error, sent: (
    (200, {}) if not sent and error["param"] in ("metadata", "metadata.a")
    else (status, {"error": error})))  # fmt: skip
broken("store-deleted-false", reply=change("deleted", deleted=False))
broken("store-deleted-object", reply=change("deleted", object="chat.completion"))
broken(
    "store-any-metadata",
    request=take(lambda body: _too_much(body.get("metadata")), CHAT, metadata={}),
)
broken("store-little-metadata", request=lambda path, body: _little(body))
broken("store-any-query", query=lambda query: _known(query))
broken("store-wrong-request", reply=change("one", temperature=1.0, seed=8))
broken("store-untold-request", reply=change("one", temperature=None, top_p=None, seed=None))


def _pop(body: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != key}


def _less(query: dict[str, str], key: str) -> dict[str, str]:
    return {name: value for name, value in query.items() if name != key}


def _items(body: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**body, "data": [{**one, **values} for one in body["data"]]}


def _reworded(body: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {**choice, "message": {**choice["message"], "content": "Other."}}
        for choice in body["choices"]
    ]
    return {**body, "choices": choices}


def _not_there(path: str, body: Any) -> Any:
    return {**body, "data": []} if path == "stored list" else body


def _no_limit(query: dict[str, str]) -> dict[str, str]:
    if query.get("limit", "1") not in ("1", "0", "none"):
        raise Refused("Not taken.", "limit", status=500)
    return query


def _too_much(metadata: Any) -> bool:
    return isinstance(metadata, dict) and (
        len(metadata) > 16
        or any(
            len(key) > 64 or not isinstance(value, str) or len(value) > 512
            for key, value in metadata.items()
        )
    )


def _little(body: dict[str, Any]) -> dict[str, Any]:
    if len(body.get("metadata") or ()) == 16:
        raise Refused("Too much.", status=500)
    return body


def _known(query: dict[str, str]) -> dict[str, str]:
    if query.get("limit") in ("none", "0") or query.get("order") == "up":
        return {}
    return query
