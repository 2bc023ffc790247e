"""The answer of Ray Serve's proxy to a request whose replica ended before it had answered.

Ray Serve's proxy, a process of Ray, sends nothing then, so its HTTP server answers with a 500 of
plain text. The proxy calls `middlewares` at its start if the environment of the nodes names the
function (docs/ray.md).
"""

from __future__ import annotations

from contextlib import suppress

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The variable with which Ray Serve's proxies find `middlewares`.
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PLACE = f"{__name__}:middlewares"


class EndedReplicas:
    """Middleware: a request without an answer gets a 503 with `retry-after`.

    The proxy does not tell its HTTP server why there is no answer; its log has the reason. A client
    that has disconnected gets none, either, and the server drops what is sent to it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        await self._app(scope, receive, begin)
        if has_begun:
            return
        if scope["type"] == "http":
            await _reply(scope, send)
            return
        await _refuse(scope, send)


# A proxy has a limit of time for its start, and imports the rest of the adapter with its router.


async def _refuse(scope: Scope, send: Send) -> None:
    from .errors import ReplicaEnded
    from .handshake import refuse

    # A server raises it for a client that has left the handshake.
    with suppress(OSError):
        await refuse(scope, send, ReplicaEnded())


async def _reply(scope: Scope, send: Send) -> None:
    import orjson

    from .errors import ReplicaEnded
    from .messages.errors import render_as
    from .request import JSON

    # The proxy has given an id to a request without one.
    name = dict(scope["headers"]).get(b"x-request-id", b"")
    status, reply, headers = render_as(scope, ReplicaEnded(), name.decode("latin-1"))
    body = orjson.dumps(reply)
    length = str(len(body)).encode()
    head = [(b"content-type", JSON), (b"content-length", length), (b"x-request-id", name)]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *headers]})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def middlewares() -> list[Middleware]:
    """Return what Ray Serve's proxy wraps around itself."""
    return [Middleware(EndedReplicas)]
