"""Stored chat completions, by id, oldest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from suite.rules import Refused, check_metadata

Query = Mapping[str, str]


class Store:
    """Stored completions with their requests."""

    def __init__(self) -> None:
        self.items: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def keep(self, body: dict[str, Any], sent: dict[str, Any]) -> None:
        """Store a completion with its request."""
        self.items[body["id"]] = (body, sent)

    def one(self, name: str) -> dict[str, Any]:
        """Return a completion with parameters and metadata of its request."""
        body, sent = self.get(name)
        told = {key: sent.get(key) for key in ("temperature", "top_p", "seed")}
        return {**body, **told, "metadata": sent.get("metadata") or {}}

    def get(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a completion and its request."""
        if name not in self.items:
            raise Refused(f"No completion found with id '{name}'.", status=404)
        return self.items[name]

    def update(self, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the metadata of a completion, and return the completion."""
        body, sent = self.get(name)
        if "metadata" not in change:
            missing = "missing_required_parameter"
            raise Refused("Missing required parameter: 'metadata'.", "metadata", missing)
        check_metadata(change["metadata"])
        self.items[name] = (body, {**sent, "metadata": change["metadata"]})
        return self.one(name)

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a completion, and return the confirmation."""
        self.get(name)
        del self.items[name]
        return {"object": "chat.completion.deleted", "id": name, "deleted": True}

    def list(self, query: Query) -> dict[str, Any]:
        """Return a page of completions."""

        def wanted(name: str) -> bool:
            body, sent = self.items[name]
            metadata = sent.get("metadata") or {}
            pairs = {
                key[9:-1]: value for key, value in query.items() if key.startswith("metadata[")
            }
            model = query.get("model", body["model"])
            return model == body["model"] and pairs.items() <= metadata.items()

        return page([self.one(name) for name in self.items if wanted(name)], query)

    def messages(self, name: str, query: Query) -> dict[str, Any]:
        """Return a page of the messages of a completion's request."""
        _body, sent = self.get(name)
        items = [
            {"id": f"{name}-{at}", "role": one["role"], "content": one.get("content"),
             "name": one.get("name"), "content_parts": None, "refusal": None}
            for at, one in enumerate(sent["messages"])
        ]  # fmt: skip
        return page(items, query)


def page(items: Sequence[Any], query: Query) -> dict[str, Any]:
    """Return a page of items as a list that can be continued."""
    number: Callable[[str], bool] = str.isdigit
    limit = query.get("limit", "20")
    if not number(limit) or not 1 <= int(limit) <= 100:
        raise Refused("Invalid 'limit'.", "limit", "invalid_value")
    if query.get("order", "asc") not in ("asc", "desc"):
        raise Refused("Invalid 'order'.", "order", "invalid_value")
    ordered = [*items] if query.get("order", "asc") == "asc" else [*reversed(items)]
    ids = [item["id"] for item in ordered]
    start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    page = ordered[start : start + int(limit)]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1],
            "has_more": start + len(page) < len(ordered)}  # fmt: skip
