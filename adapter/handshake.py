"""Handshakes of WebSockets, and what the requests of their frames share (contract, 1 and 3).

A frame that asks for a response is a POST without a connection of its own: it passes through the
same middlewares, keys, limits and records, and its events are the frames of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from starlette.types import Scope, Send

from ..backends.errors import LatimerError
from .errors import Header, render
from .request import JSON

# The app that serves the requests of frames, in the scope of a handshake.
APP = "latimer.app"
# The parts of a large text in the message that brings it, instead of the text.
PARTS = "latimer.parts"
# The frames of several texts in one message that sends them; and the extension of a server that
# takes such messages, which it can write in one system call.
FRAMES = "latimer.frames"
# In that extension, from the app: the `Arrivals` that the server adds an incomplete message to, and
# the key that it is counted for.
ARRIVALS = "latimer.arrivals"
# Before the key in the subprotocol of a browser, which cannot set headers; OpenAI's Realtime API
# has introduced it.
_KEY = "openai-insecure-api-key."
# What belongs to the handshake alone.
_OF_HANDSHAKE = frozenset(
    (APP, "endpoint", "extensions", "path_params", "route", "router", "subprotocols")
)
_HEADERS = frozenset(
    (
        b"connection", b"content-encoding", b"content-length", b"content-type", b"expect",
        b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
_SCHEMES = {"ws": "http", "wss": "https"}


def scheme_of(scope: Scope) -> str:
    """Return the scheme of the HTTP request that a handshake is."""
    scheme: str = scope.get("scheme", "ws")
    return _SCHEMES.get(scheme, scheme)


def read_key(scope: Scope) -> None:
    """Let a key that a browser has sent as a subprotocol be the key of the handshake."""
    if any(name == b"authorization" for name, _ in scope["headers"]):
        return
    for one in scope.get("subprotocols") or ():
        if one.startswith(_KEY):
            value = b"Bearer " + one.removeprefix(_KEY).encode("latin-1", "replace")
            scope["headers"] = [*scope["headers"], (b"authorization", value)]
            return


def subprotocol_of(scope: Scope) -> str | None:
    """Return the subprotocol to accept: a browser that offers some needs one of them."""
    offered: Sequence[str] = scope.get("subprotocols") or ()
    return next((one for one in offered if not one.startswith(_KEY)), next(iter(offered), None))


async def refuse(scope: Scope, send: Send, error: LatimerError) -> None:
    """Answer a handshake with an error, or close it if the server cannot send one."""
    if "websocket.http.response" not in (scope.get("extensions") or ()):
        await send({"type": "websocket.close", "code": 1008})
        return
    status, body, headers = render(error)
    head = [(b"content-type", JSON), *headers]
    await send({"type": "websocket.http.response.start", "status": status, "headers": head})
    await send({"type": "websocket.http.response.body", "body": orjson.dumps(body)})


def shared_scope(scope: Scope) -> Scope:
    """Return what the requests of all frames have in common.

    Args:
        scope: that of the handshake.
    """
    found = {name: value for name, value in scope.items() if name not in _OF_HANDSHAKE}
    headers: list[Header] = [
        one
        for one in scope["headers"]
        if one[0] not in _HEADERS and not one[0].startswith(b"sec-websocket-")
    ]
    found |= {"type": "http", "method": "POST", "scheme": scheme_of(scope), "headers": headers}
    found["state"] = scope.get("state") or {}
    return found
