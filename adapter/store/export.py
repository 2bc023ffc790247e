"""Stored chat completions as lines of a file for fine-tuning (no I/O).

A line is an example in OpenAI's chat format, which TRL, axolotl and LLaMA-Factory read as well: the
messages of the request, then the assistant's message of one choice.

Objects are read some at a time, in the order of creation, each part in a transaction of its own. So
memory is bounded, and a server that uses the same database is not delayed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Row, select

from .blobs import Files
from .database import Database
from .objects import Selection, request_of, some_after, stored_of
from .records import Stored
from .schema import objects

# OpenAI's `object` of chat completions.
KIND = "chat.completion"
# The keys of an assistant's message that fine-tuning accepts, and those that must not be null.
_KEYS = ("role", "content")
_OPTIONAL = ("name", "refusal", "tool_calls", "function_call")
# The names of the field for reasoning.
_REASONING = ("reasoning_content", "reasoning")
# The fields of a request that belong to an example.
_FIELDS = ("tools", "parallel_tool_calls", "functions")


def lines(stored: Stored, reasoning: bool = False) -> list[bytes]:
    """Return the lines of a chat completion, without line ends: one for each choice.

    A choice without content, refusal and calls, such as one that was cut off while the model was
    reasoning, has no line.

    Args:
        reasoning: keep the reasoning of assistants, as `reasoning_content`.
    """
    request = stored.request
    messages = [_message(one, reasoning) for one in request["messages"]]
    fields = {name: request[name] for name in _FIELDS if request.get(name) is not None}
    continued = messages.pop() if messages and _is_continued(request, messages[-1]) else None
    found = []
    for choice in stored.reply["choices"]:
        answer = _message(choice["message"], reasoning)
        if any(answer.get(name) for name in ("content", "refusal", "tool_calls", "function_call")):
            if continued is not None:
                answer = _joined(continued, answer)
            found.append(orjson.dumps({"messages": [*messages, answer], **fields}))
    return found


def _message(message: Mapping[str, Any], reasoning: bool) -> dict[str, Any]:
    if message.get("role") != "assistant":
        return dict(message)
    kept = {name: message.get(name) for name in _KEYS}
    if message.get("audio") and not kept["content"]:
        kept["content"] = message["audio"].get("transcript")
    kept |= {name: message[name] for name in _OPTIONAL if message.get(name) not in (None, [])}
    text = next((message[name] for name in _REASONING if message.get(name)), None)
    if reasoning and text is not None:
        kept["reasoning_content"] = text
    return kept


def _is_continued(request: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Return True if the answer continues the last message of a request."""
    if last["role"] != "assistant" or last.get("tool_calls"):
        return False
    begins, continues = (
        request.get(name) for name in ("add_generation_prompt", "continue_final_message")
    )
    return bool(continues) or (begins is None and continues is None)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of an assistant and its continuation as one message."""
    content = _text(first["content"]) + (second["content"] or "")
    return {**first, **second, "content": content}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


# Objects whose sizes are read at once, and the bytes of their JSON that are read at once.
SIZES, BYTES = 1_000, 4 << 20


class Read(NamedTuple):
    """An object with its media, and the number of media that are missing or damaged."""

    stored: Stored
    missing: int


async def read(database: Database, selection: Selection) -> AsyncIterator[Sequence[Read]]:
    """Yield the objects of a selection, some at a time, the oldest first.

    Raises:
        StoreUnavailable: the database cannot answer.
    """
    after: tuple[int, str] | None = None
    while rows := await database.read(some_after, after, SIZES, selection):
        for some in _parts(rows):
            yield await database.read(_whole, database.files, [row.id for row in some])
        after = rows[-1].created_at, rows[-1].id


def _parts(rows: Sequence[Row[Any]]) -> list[list[Row[Any]]]:
    """Return rows in parts of few bytes; an object with media is a part of its own."""
    parts: list[list[Row[Any]]] = []
    free = 0
    for row in rows:
        if row.media is not None or row.size > free:
            parts.append([])
            free = 0 if row.media is not None else BYTES
        parts[-1].append(row)
        free -= row.size
    return parts


def _whole(connection: Connection, files: Files, ids: Sequence[str]) -> list[Read]:
    columns = objects.c.created_at, objects.c.id
    rows = connection.execute(select(objects).where(objects.c.id.in_(ids)).order_by(*columns))
    found = []
    for row in rows.all():
        request, missing = files.restored(connection, request_of(row), row.media)
        found.append(Read(stored_of(row, request), len(missing)))
    return found
