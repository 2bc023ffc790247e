"""Records, stores, and clients of servers with a store, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from latimer.adapter.arguments import Options
from latimer.adapter.store.config import store_config_of
from latimer.adapter.store.records import Record, Stored, new_id
from latimer.adapter.store.store import Store
from typing_extensions import Unpack

from support.clients import adapting
from support.engines.echo import Echo

KIND = "chat.completion"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


def record(
    text: str = "Hello",
    owner: str = "",
    model: str = "demo",
    metadata: Mapping[str, str] | None = None,
    kind: str = KIND,
    image: str | None = None,
) -> Record:
    """Return the record of a chat completion whose request and answer have this text."""
    name, created_at = new_id("chatcmpl-")
    content: Any = text
    if image is not None:
        content = [{"type": "image_url", "image_url": {"url": image}}]
    metadata = metadata or {}
    reply = {"id": name, "choices": [{"message": {"content": text}}], "metadata": metadata}
    request = {"messages": [{"role": "user", "content": content}], "store": True}
    return Record(
        name, kind, owner, created_at, model, "req_0", request, reply, metadata, 100 + len(text)
    )


def item(name: str, text: str = "Hello", image: str | None = None) -> dict[str, Any]:
    """Return a message as an item with an id."""
    parts: list[dict[str, Any]] = [{"type": "input_text", "text": text}]
    if image is not None:
        parts.append({"type": "input_image", "image_url": image, "detail": "auto"})
    return {"id": name, "type": "message", "role": "user", "status": "completed", "content": parts}


def response(conversation: str, items: Sequence[Mapping[str, Any]], **more: Any) -> Record:
    """Return the record of a response in a conversation."""
    one = record(kind="response", **more)
    one.conversation, one.items = conversation, items
    return one


def same(stored: Stored) -> Stored:
    """Return an object for a page that has its objects unchanged."""
    return stored


def store_at(target: str | Path, **options: Any) -> Store:
    """Return the store of a setting."""
    place = store_config_of(str(target), **options)
    assert place is not None
    return Store(place)


@asynccontextmanager
async def opened(target: str | Path, **options: Any) -> AsyncIterator[Store]:
    """Yield the store of a setting, and close it."""
    store = store_at(target, **options)
    try:
        yield store
    finally:
        await store.aclose()


def client_of(**options: Unpack[Options]) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
    """Return a client of an adapter without a model, with its own store."""
    return adapting(Echo(context=256), **options)


def error_of(reply: httpx2.Response) -> tuple[int, str, str | None, str | None]:
    """Return the status, message, param and code of an error."""
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    return reply.status_code, error["message"], error["param"], error["code"]


class Keyed:
    """A client of an adapter, with a key of its own.

    Attributes:
        root: the path of the operations.
    """

    root = ""

    def __init__(self, client: httpx2.AsyncClient, key: str = "") -> None:
        self.client = client
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    async def send(self, method: str, path: str = "", body: Any = None) -> httpx2.Response:
        """Send a request below the path of the operations."""
        return await self.client.request(method, self.root + path, json=body, headers=self.headers)
