"""Tests that a request's objects are freed when it ends, without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.errors import StoreUnavailable
from latimer.adapter.observers import Observer
from latimer.adapter.record import Record
from latimer.adapter.request import PUSH, WATCH_AFTER
from support.clients import client_of
from support.engines.echo import Echo, Slow

USER = [{"role": "user", "content": "What is the capital of France?"}]
LONG = [{"role": "user", "content": "word " * 4_000}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "One day", "stop": ["zzz"]}),
    "a stream": ("/v1/completions", {"prompt": "One day", "stream": True, "n": 2}),
    "tokens": ("/v1/completions", {"prompt": ["One day", "a"], "logprobs": 2, "n": 2}),
    "chat": ("/v1/chat/completions", {"messages": USER, "stream": True}),
    "calls": ("/v1/chat/completions", {"messages": USER, "tools": [FUNCTION]}),
    "a long chat": ("/v1/chat/completions", {"messages": LONG}),
    "a long streamed chat": ("/v1/chat/completions", {"messages": LONG, "stream": True}),
    "a long prompt": ("/v1/completions", {"prompt": "word " * 4_000}),
    "too many tokens": ("/v1/chat/completions", {"messages": USER, "max_tokens": 90_000}),
    "a wrong request": ("/v1/completions", {"prompt": "One day", "temperature": 9}),
    "a long wrong request": ("/v1/chat/completions", {"messages": LONG, "temperature": 9}),
    "a prompt that is too long": ("/v1/completions", {"prompt": "word " * 90_000}),
    "a chat that is too long": ("/v1/chat/completions", {"messages": USER * 4_000}),
    "a message that is too long": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "word " * 90_000}]},
    ),
    "a huge wrong request": ("/v1/responses", {"input": "a", "include": [1] * 200_000}),
}


def is_latimers(one: object) -> bool:
    """Return True for an object of one of Latimer's classes, except those of the store.

    No request here stores anything, and the store of an earlier test may end in its thread.
    """
    # For some types the attribute is a descriptor.
    module = str(type(one).__module__)
    return module.startswith("latimer.") and not (
        module.startswith("latimer.adapter.store.") or type(one) is StoreUnavailable
    )


@contextmanager
def garbage() -> Iterator[list[str]]:
    """Collect the types of Latimer's new objects that only the garbage collector can free."""
    found: list[str] = []
    gc.collect()
    # An app of an earlier test can be released late. What is held here is not garbage.
    held = [one for one in gc.get_objects() if is_latimers(one)]
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [repr(type(one)) for one in gc.garbage if is_latimers(one)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        held.clear()


async def ask(app: Any, path: str, body: Any, pushes: bool = False) -> bytes:
    """Return a response's body; `receive` then waits forever, as for a connected client.

    Args:
        pushes: True for a server that can send at once.
    """
    sent = bytearray()
    parts = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))
        message[PUSH] = push

    def push(data: bytes) -> bool:
        sent.extend(data)
        return True

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "scheme": "http",
             "query_string": b"", "raw_path": path.encode(),
             "extensions": {PUSH: {}} if pushes else {}}  # fmt: skip
    await app(scope, receive, send)
    return bytes(sent)


@pytest.mark.parametrize(
    ("name", "pushes"), [*((name, False) for name in BODIES), ("chat", True), ("a stream", True)]
)
@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_request_leaves_nothing_behind(
    apps: Any, engine: str, name: str, pushes: bool
) -> None:
    """A request leaves no reference cycles of Latimer's objects, which would grow the memory."""
    app = apps(engine)
    path, body = BODIES[name]
    body = {"model": "m", "max_tokens": 20, **body}
    await ask(app, path, body)
    with garbage() as found:
        for _ in range(3):
            assert await ask(app, path, body, pushes)
        # Wait until connections are closed and cancelled tasks have ended.
        await asyncio.sleep(0.05)
    assert found == []


def test_a_closed_event_loop_is_not_kept() -> None:
    """A loop that ends soon after a request is freed when another one has its first request."""

    async def ask() -> weakref.ref[asyncio.AbstractEventLoop]:
        async with client_of(OpenAIAdapter(Echo(), any_model=True)) as client:
            reply = await client.post("/v1/chat/completions", json={"model": "m", "messages": USER})
            assert reply.status_code == 200
        return weakref.ref(asyncio.get_running_loop())

    first, _ = asyncio.run(ask()), asyncio.run(ask())
    until = time.monotonic() + 5
    # A collection that another thread runs makes this one do nothing.
    while first() is not None and time.monotonic() < until:
        gc.collect()
    assert first() is None


def test_a_request_that_ends_as_garbage_raises_nothing() -> None:
    """A request of a closed event loop ends without one, and its record goes to the observers."""
    ended: list[Record] = []

    class Noted(Observer):
        def take(self, records: Sequence[Record]) -> None:
            ended.extend(records)

    app = OpenAIAdapter(Slow(), any_model=True, observers=[Noted()])
    loop = asyncio.new_event_loop()
    task = loop.create_task(ask(app, *BODIES["a stream"]))
    # Until a task waits for the disconnect.
    loop.run_until_complete(asyncio.sleep(2 * WATCH_AFTER))
    for one in asyncio.all_tasks(loop):
        # asyncio logs that it was not cancelled.
        one._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    task.get_coro().close()
    assert not ended
    app.service.observers.flush()
    assert [one.path for one in ended] == ["/v1/completions"]
