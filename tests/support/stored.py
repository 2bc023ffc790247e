"""Records of objects for tests of the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latimer.adapter.store.ids import new_id
from latimer.adapter.store.record import Record, Stored

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


def same(stored: Stored) -> Stored:
    """Return an object for a page that has its objects unchanged."""
    return stored
