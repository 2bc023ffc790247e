"""The paths of responses and conversations."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from suite.responses.objects import answer, conversation_of, events, failure
from suite.responses.rules import check, check_calls, check_items, items_of, listed, replaced
from suite.responses.turns import as_chat, without_first
from suite.rules import Refused, check_metadata, parse
from suite.stored import Query, page

if TYPE_CHECKING:
    from suite.server import Send, Server

R, TOKENS, CONVERSATIONS = "/responses", "/responses/input_tokens", "/conversations"
# The tokens of a stream that takes time.
LONG = 1000


class Routes:
    """The paths of responses and conversations, of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._fault = server.fault
        self.state = State()
        # The items of responses that all connections continue, of a server that mixes them up.
        self.shared: dict[str, list[Any]] = {}

    async def create(self, path: str, sent: dict[str, Any], send: Send, receive: Any) -> None:
        """Answer a request for a response, or for the number of its input tokens."""
        check({"model": "org/toy", **sent} if path == TOKENS else sent)
        sent = self._fault.valid(path, sent)
        parent = self.state.responses.get(sent.get("previous_response_id") or "")
        before = self._fault.chain(self.state.before(sent), dict(parent.sent) if parent else {})
        given = replaced(given_in(sent), self.state.item, sent.get("store"))
        check_calls([*before, *given])
        await self._server.ready()
        whole = self._answer(sent, [*before, *given])
        if path == TOKENS:
            count = {"object": "response.input_tokens",
                     "input_tokens": whole["usage"]["input_tokens"]}  # fmt: skip
            await self._server.reply(send, 200, self._fault.reply(path, count, sent))
            return
        if sent.get("stream"):
            await self._stream(whole, sent, given, send, receive)
            return
        self.state.keep(whole, sent, given)
        await self._server.reply(send, 200, self._fault.reply(R, whole, sent))

    def _answer(self, sent: dict[str, Any], items: Sequence[Any]) -> dict[str, Any]:
        """Return the response to items, or to the last of them that fit."""
        turn = self._server.turn(sent)
        while True:
            try:
                return answer({"model": "org/toy", **sent}, as_chat(sent, items),
                              self._server.clock(), turn)  # fmt: skip
            except Refused as refused:
                too_long = refused.code == "context_length_exceeded"
                if sent.get("truncation") != "auto" or not too_long or len(items) < 2:
                    raise
                items = without_first(items)

    async def _stream(
        self, whole: dict[str, Any], sent: Mapping[str, Any], given: Any, send: Send, receive: Any
    ) -> None:
        await self._server.begin_stream(send)
        padded = bool((sent.get("stream_options") or {}).get("include_obfuscation"))
        found = self._fault.events(events(whole, padded))
        slow = (sent.get("max_output_tokens") or 0) >= LONG
        number = 0
        if self._fault.keeps_aborted:
            self.state.keep(whole, sent, given)
        async for event, died in self._server.paced(found, slow, receive):
            if died:
                for last in self._fault.on_failure(failure(whole, number)):
                    await self._event(send, last)
                break
            number += 1
            if event is found[-1] and not self._fault.late:
                self.state.keep(whole, sent, given)
            await self._event(send, event)
        await asyncio.sleep(self._fault.late)
        if self._fault.late:
            self.state.keep(whole, sent, given)
        await send({"type": "http.response.body", "body": b""})

    async def _event(self, send: Send, event: Mapping[str, Any]) -> None:
        data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
        await send({"type": "http.response.body", "body": self._fault.event(data),
                    "more_body": True})  # fmt: skip

    async def responses(self, method: str, path: str, query: dict[str, str], send: Send) -> None:
        """Answer a request for a stored response."""
        name, _, what = path.removeprefix(R).removeprefix("/").partition("/")
        if not name:
            raise Refused(f"Not allowed to {method} on {path}.", status=405)
        if name == "compact":
            text = f"This server does not serve {method} {path}."
            raise Refused(text, code="unsupported_endpoint", status=self._fault.no_compact)
        kept = self.state.response(name)
        found: Any = kept.whole
        if what == "input_items":
            query = self._fault.query(query)
            found = page(kept.given, {"order": "desc", **query})
        elif what == "cancel":
            if self._fault.refuses_cancel:
                raise Refused("Cannot cancel a synchronous response.")
        elif method == "DELETE":
            del self.state.responses[name]
            found = {"id": name, "object": "response.deleted", "deleted": True}
        elif query.get("stream") == "true":
            await self._replay(kept.whole, self._fault.query(query), send)
            return
        found = self._fault.reply(f"response {what or method}", found, {})
        await self._server.reply(send, 200, found)

    async def _replay(self, whole: dict[str, Any], query: Query, send: Send) -> None:
        await self._server.begin_stream(send)
        after = int(query.get("starting_after", -1))
        for event in self._fault.replay(events(whole, False)):
            if event["sequence_number"] > after:
                await self._event(send, event)
        await send({"type": "http.response.body", "body": b""})

    async def conversations(
        self, method: str, path: str, query: dict[str, str], body: bytes, send: Send
    ) -> None:
        """Answer a request for conversations."""
        names = path.removeprefix(CONVERSATIONS).strip("/").split("/")
        sent = parse(body) if body else {}
        if names == [""]:
            made = Conversation(sent.get("metadata"), int(self._server.clock()))
            made.add(sent.get("items"))
            self.state.conversations[made.id] = made
            found, kind = made.told(), "created"
        elif len(names) == 1:
            found, kind = self._one(method, names[0], sent), method
        else:
            found, kind = self._items(method, names, self._fault.query(query), sent)
        reply = self._fault.reply(f"conversation {kind}", found, sent)
        await self._server.reply(send, 200, reply)

    def _one(self, method: str, name: str, sent: Mapping[str, Any]) -> dict[str, Any]:
        one = self.state.conversation(name)
        if method == "DELETE":
            del self.state.conversations[name]
            return {"id": name, "object": "conversation.deleted", "deleted": True}
        if method == "POST":
            check_metadata(sent.get("metadata"))
            one.metadata = sent.get("metadata") or {}
        return one.told()

    def _items(
        self, method: str, names: list[str], query: Query, sent: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str]:
        one = self.state.conversation(names[0])
        if method == "POST":
            return page(one.add(sent.get("items")), {}), "added"
        if len(names) == 2:
            return page(one.items, {"order": "desc", **query}), "items"
        found = next((item for item in one.items if item["id"] == names[2]), None)
        if found is None:
            raise Refused(f"Item with id '{names[2]}' not found.", status=404)
        if method == "DELETE":
            one.items.remove(found)
            return one.told(), "item deleted"
        return found, "item"


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
        """Store a response if it asks for that, and append its items to its conversation."""
        before = sent.get("previous_response_id")
        chain = [*self.responses[before].chain, before] if before in self.responses else []
        items = [listed(item) for item in given]
        if whole["store"]:
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
