"""Faults in stored completions."""

from __future__ import annotations

from typing import Any

from suite.faults.edits import (
    drop,
    error,
    has,
    ignores,
    longer,
    put,
    query,
    refuses,
    reply,
    says,
    takes,
    turn,
    valid,
)
from suite.rules import Refused
from suite.server import Fault
from suite.work import CHAT

# The places of replies.
ONE, STREAM, LIST = "stored one", "stored stream", "stored list"
MESSAGES, UPDATED, DELETED = "stored messages", "stored updated", "stored deleted"
OTHER = put("choices.*.message.content", "Other.")


def _no_limit(query: dict[str, str]) -> dict[str, str]:
    if query.get("limit", "1") not in ("1", "0", "none"):
        raise Refused("Not taken.", "limit", status=500)
    return query


def _known(query: dict[str, str]) -> dict[str, str]:
    wrong = query.get("limit") in ("none", "0") or query.get("order") == "up"
    return {} if wrong else query


def _update_anything(status: int, error: dict[str, Any], sent: Any) -> tuple[int, Any]:
    if not sent and error["param"] in ("metadata", "metadata.a"):
        return 200, {}
    return status, {"error": error}


def _too_much(metadata: Any) -> bool:
    return isinstance(metadata, dict) and (
        len(metadata) > 16
        or any(
            len(key) > 64 or not isinstance(value, str) or len(value) > 512
            for key, value in metadata.items()
        )
    )


FAULTS = {
    "store-ignored": ignores("store"),
    "store-unlisted": reply(put("data", []), at=LIST),
    "store-other-answer": reply(OTHER, at=ONE),
    "store-no-model": reply(drop("model"), at=ONE),
    "store-created-string": reply(put("created", "now"), at=ONE),
    "store-no-metadata": reply(put("metadata", None), at=ONE),
    "store-always": valid(put("store", True), at=CHAT),
    "store-no-streams": valid(put("store", False), when=lambda body: body.get("stream")),
    "store-stream-chunk": reply(put("object", "chat.completion.chunk"), at=STREAM),
    "store-stream-empty": reply(OTHER, at=STREAM),
    "store-unknown-400": error(status=400, when=says("No completion")),
    "store-list-object": reply(put("object", "page"), at=LIST),
    "store-list-no-ids": reply(put("first_id", None), put("last_id", None), at=LIST),
    "store-list-empty-ids": reply(turn("first_id", lambda name: name or "chatcmpl-none"), at=LIST),
    "store-list-no-more": reply(drop("has_more"), at=LIST),
    "store-list-always-more": reply(put("has_more", True), at=LIST),
    "store-filter-ignored": reply(turn("data", lambda data: [
        *data, {"id": "chatcmpl-of-another"}]), at=LIST),
    **{f"store-{name}-ignored": query(drop(name)) for name in (
        "model", "order", "limit", "after")},
    "store-newest-first": query(lambda found: {"order": "desc", **found}),
    "store-limit-refused": query(_no_limit),
    "store-messages-last": reply(turn("data", lambda data: data[-1:]), at=MESSAGES),
    "store-messages-same-id": reply(put("data.*.id", "message"), at=MESSAGES),
    "store-messages-no-id": reply(drop("data.*.id"), at=MESSAGES),
    "store-messages-no-ends": reply(put("first_id", None), at=MESSAGES),
    "store-messages-type": reply(put("data.*.refusal", 0), at=MESSAGES),
    "store-update-ignored": reply(put("metadata", {}), at=UPDATED),
    "store-update-anything": Fault(error=_update_anything),
    "store-deleted-false": reply(put("deleted", False), at=DELETED),
    "store-deleted-object": reply(put("object", "chat.completion"), at=DELETED),
    "store-any-metadata": takes(has("metadata", _too_much), CHAT, metadata={}),
    "store-little-metadata": refuses(has("metadata", longer(15, 17))),
    "store-any-query": query(_known),
    "store-wrong-request": reply(put("temperature", 1.0), put("seed", 8), at=ONE),
    "store-untold-request": reply(put("temperature", None), put("top_p", None), put("seed", None),
                                  at=ONE),
}  # fmt: skip
