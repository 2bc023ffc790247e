"""The playground: a web page for chat, completions and token probabilities, from this folder.

The page and its modules use the same API as any other client, so they need no path of their own.
The files need no API key; the API behind them does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope
from typing_extensions import override

FOLDER = Path(__file__).parent
# The page refers to its files below this path.
PREFIX = "/playground"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing is loaded from elsewhere, no text can become a script, and no other page can frame it.
POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'",
        "img-src 'self' data: blob:", "connect-src 'self'", "base-uri 'none'",
        "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)  # fmt: skip
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class File(NamedTuple):
    """A file of the page: its content and the headers of its response."""

    data: bytes
    headers: dict[str, str]


@cache
def files() -> dict[str, File]:
    """Return the files of the page by name, read once; 250 kB at most."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in _TYPES:
            data = path.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            headers = {**_HEADERS, "content-type": _TYPES[path.suffix], "etag": etag}
            found[path.name] = File(data, headers)
    return found


class PageRoute(Route):
    """A file of the page. A request with another method gets OpenAI's 404, with its advice."""

    @override
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return (Match.NONE if match is Match.PARTIAL else match), found


def playground_routes() -> Sequence[BaseRoute]:
    """Return a route for each file, and `/` for the page itself."""
    return [
        PageRoute("/" if name == "index.html" else f"{PREFIX}/{name}", _endpoint(file))
        for name, file in files().items()
    ]


def _endpoint(file: File) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        if file.headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=file.headers)
        return Response(file.data, headers=file.headers)

    return send
