"""Tests of request bodies that arrive in parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.arrivals import AT_ONCE, TOGETHER
from latimer.adapter.limits.config import KeyConfig, digest_of
from support.engines.echo import Echo

BODY = json.dumps({"model": "m", "prompt": "Hi"}).encode()
# The largest body, all of which have arrived except for the last byte.
MOST = 1_000
LARGE = BODY + b" " * (MOST - 1 - len(BODY))


class Upload:
    """A request whose body arrives in parts.

    Args:
        key: the name of its API key; empty for none.
        length: the length that it declares; 0 for none.
    """

    def __init__(self, app: OpenAIAdapter, key: str = "", length: int = 0) -> None:
        headers = [(b"host", b"a"), (b"content-type", b"application/json")]
        if key:
            headers.append((b"authorization", b"Bearer sk-" + key.encode()))
        if length:
            headers.append((b"content-length", b"%d" % length))
        self._scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": headers,
            "query_string": b"", "root_path": "", "scheme": "http", "client": None, "server": None,
        }  # fmt: skip
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.body = b""
        self.task = asyncio.ensure_future(app(self._scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        self.body += message.get("body", b"")

    def leave(self) -> None:
        """Disconnect."""
        self._messages.put_nowait({"type": "http.disconnect"})

    async def send(self, body: bytes = LARGE, more: bool = True) -> int:
        """Send a part; return the status of the response, or 0 if the server waits for the rest."""
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more})
        if not more:
            await self.task
        while not (self._messages.empty() or self.task.done()):
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0)
        return self.status


def app_of(names: str = "", most: int = MOST, **limits: Any) -> OpenAIAdapter:
    """Return an app with keys of these names."""
    tables = {name: KeyConfig(digest=digest_of(f"sk-{name}"), **limits) for name in names.split()}
    return OpenAIAdapter(Echo(), any_model=True, max_body=most, keys=tables)


@pytest.mark.parametrize("leaves", [False, True], ids=["complete", "disconnected"])
async def test_incomplete_bodies_have_a_limit_together(leaves: bool) -> None:
    """A part that is too much gets a 503, small bodies do not, and an end makes room."""
    app = app_of()
    uploads = [Upload(app) for _ in range(TOGETHER)]
    assert [await one.send() for one in uploads] == [0] * TOGETHER
    refused = Upload(app)
    assert await refused.send(b" " * (TOGETHER + 1)) == 503
    assert refused.headers[b"retry-after"] == b"1"
    assert json.loads(refused.body)["error"]["code"] == "server_overloaded"
    assert await Upload(app).send(BODY, more=False) == 200
    if leaves:
        uploads[0].leave()
        await uploads[0].task
    else:
        assert await uploads[0].send(b" ", more=False) == 200
    another = Upload(app)
    assert await another.send() == 0
    for one in (*uploads[1:], another):
        assert await one.send(b" ", more=False) == 200
    assert not app.service.arrivals._of
    assert not app.service.arrivals._size
    await app.aclose()


async def test_one_key_leaves_room_for_others() -> None:
    """The incomplete bodies of one key take at most half of the limit."""
    app = app_of("a b")
    uploads = [Upload(app, "a") for _ in range(TOGETHER // 2)]
    assert [await one.send() for one in uploads] == [0] * (TOGETHER // 2)
    assert await Upload(app, "a").send() == 503
    assert await Upload(app, "a").send(BODY, more=False) == 200
    other = Upload(app, "b")
    assert await other.send() == 0
    for one in (*uploads, other):
        one.leave()
        await one.task
    await app.aclose()


@pytest.mark.parametrize("names", ["", "a b"], ids=["all", "a key"])
async def test_a_large_body_without_room_is_refused_before_it_is_sent(names: str) -> None:
    """The declared length of a body that has no room is a 503 at once, and takes no room itself."""
    most = 2 * AT_ONCE
    app, key = app_of(names, most), "a" if names else ""
    declared = [Upload(app, key, most) for _ in range(TOGETHER + 1)]
    assert [await one.send(b"") for one in declared] == [0] * (TOGETHER + 1)
    uploads = [Upload(app, key) for _ in range(TOGETHER // 2 if key else TOGETHER)]
    assert [await one.send(b" " * (most - 1)) for one in uploads] == [0] * len(uploads)
    refused = Upload(app, key, most)
    await asyncio.wait_for(refused.task, 5)
    assert refused.status == 503
    waiting = [Upload(app, key, AT_ONCE), *([Upload(app, "b", most)] if key else [])]
    assert [await one.send(b"") for one in waiting] == [0] * len(waiting)
    for one in (*declared, *uploads, *waiting):
        one.leave()
        await one.task
    await app.aclose()


async def test_a_message_of_a_websocket_takes_no_place_of_a_body() -> None:
    """An incomplete message takes room from bodies, but none of the places of its key."""
    app = app_of("a", concurrent=1)
    arrivals, key = app.service.arrivals, digest_of("sk-a")
    arrivals.add(key, None, 1, is_first=False)
    upload = Upload(app, "a")
    assert await upload.send() == 0
    arrivals.remove(key, 1, bodies=0)
    assert await Upload(app, "a").send() == 429
    assert await upload.send(b" ", more=False) == 200
    assert not arrivals._of
    assert not arrivals._size
    await app.aclose()


async def test_a_key_sends_as_many_bodies_as_it_may_run_requests() -> None:
    """A key with `concurrent` gets a 429 for a body beyond it, before the body is read."""
    app = app_of("a", concurrent=2)
    uploads = [Upload(app, "a") for _ in range(2)]
    assert [await one.send() for one in uploads] == [0, 0]
    refused = Upload(app, "a")
    assert await refused.send(b"{") == 429
    assert b"on concurrent requests: Limit 2, Used 2" in refused.body
    assert await uploads[0].send(b" ", more=False) == 200
    another = Upload(app, "a")
    assert await another.send(b"{") == 0
    for one in (uploads[1], another):
        one.leave()
        await one.task
    await app.aclose()
