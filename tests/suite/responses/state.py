"""Stored responses and conversations, with their items."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.responses.items import check_items, items_of, listed
from suite.responses.objects import conversation_of
from suite.rules import Refused, check_metadata

_numbers = itertools.count(1)


@dataclass(slots=True)
class Kept:
    """A stored response.

    Args:
        sent: its request.
        given: the items of its own input, as lists show them.
        chain: the ids of the responses that it continues, from the oldest.
    """

    whole: dict[str, Any]
    sent: Mapping[str, Any]
    given: Sequence[dict[str, Any]]
    chain: Sequence[str]


class Conversation:
    """A conversation and its items."""

    def __init__(self, metadata: Any, now: int) -> None:
        check_metadata(metadata)
        self.id = f"conv_{next(_numbers):048x}"
        self.created, self.metadata = now, metadata or {}
        self.items: list[dict[str, Any]] = []

    def told(self) -> dict[str, Any]:
        """Return the conversation as clients get it."""
        return {"id": self.id, "object": "conversation", "created_at": self.created,
                "metadata": self.metadata}  # fmt: skip

    def add(self, items: Any) -> list[dict[str, Any]]:
        """Append items and return them as lists show them."""
        check_items(items or [])
        added = [listed(item) for item in items or ()]
        self.items += added
        return added


class State:
    """Stored responses and conversations, by id."""

    def __init__(self) -> None:
        self.responses: dict[str, Kept] = {}
        self.conversations: dict[str, Conversation] = {}

    def response(self, name: str) -> Kept:
        """Return a stored response."""
        if name not in self.responses:
            raise Refused(f"Response with id '{name}' not found.", status=404)
        return self.responses[name]

    def conversation(self, name: str) -> Conversation:
        """Return a conversation."""
        if name not in self.conversations:
            raise Refused(f"Conversation with id '{name}' not found.", status=404)
        return self.conversations[name]

    def chain(self, name: str) -> list[Kept]:
        """Return a response and those that it continues, from the oldest."""
        known = self.responses.get(name)
        names = [*known.chain, name] if known else [name]
        if any(one not in self.responses for one in names):
            code = "previous_response_not_found"
            text = f"Previous response with id '{name}' not found."
            raise Refused(text, "previous_response_id", code)
        return [self.responses[one] for one in names]

    def item(self, name: str) -> dict[str, Any] | None:
        """Return a stored item, or None."""
        kept = self.responses.values()
        items = (item for one in kept for item in (*one.given, *one.whole["output"]))
        return next((item for item in items if item["id"] == name), None)

    def keep(self, whole: dict[str, Any], sent: Mapping[str, Any], given: Sequence[Any]) -> None:
        """Store a response, and append its items to its conversation."""
        before = sent.get("previous_response_id")
        chain = [*self.responses[before].chain, before] if before in self.responses else []
        items = [listed(item) for item in given]
        self.responses[whole["id"]] = Kept(whole, sent, items, chain)
        if sent.get("conversation"):
            self.conversation(conversation_of(sent)).items += [*items, *whole["output"]]

    def before(self, sent: Mapping[str, Any]) -> list[Any]:
        """Return the items of the conversation that a request continues."""
        if sent.get("previous_response_id"):
            chain = self.chain(sent["previous_response_id"])
            return [item for one in chain for item in (*one.given, *one.whole["output"])]
        if sent.get("conversation"):
            return [*self.conversation(conversation_of(sent)).items]
        return []


def given_in(sent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a request's own input."""
    return items_of(sent.get("input") or "")
