"""The interface of an HTTP connection to an engine, and its implementation for httpx clients.

The default implementation is in `http.py`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from .errors import EngineError, EngineUnavailable


class Reply(Protocol):
    """A response whose headers have arrived."""

    status: int
    content_type: str

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the body as it arrives; data that waits together is one chunk."""
        ...

    async def read(self) -> bytes:
        """Return the whole body."""
        ...


class Upstream(Protocol):
    """The HTTP server of an engine."""

    address: str

    def send(
        self, method: str, path: str, body: bytes | None = None
    ) -> AbstractAsyncContextManager[Reply]:
        """Send a request; leaving the context early closes the connection immediately.

        Raises:
            EngineUnavailable: the engine cannot be reached.
            EngineError: the engine was silent for too long, or the connection broke.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Encode headers as lines of an HTTP/1.1 head, in UTF-8.

    Raises:
        ValueError: a name is not a token, or a value has a control character or cannot be encoded.
            The message omits values, since they are often keys.
    """
    lines = []
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an HTTP header")
        if _CONTROL.search(value):
            raise ValueError(
                f"the value of the header {name} contains a line break or control character"
            )
        try:
            lines.append(f"{name}: {value}\r\n".encode())
        except UnicodeEncodeError:
            # The error itself contains the value, so it must not be the context of another one.
            pass
        else:
            continue
        raise ValueError(f"the value of the header {name} is not valid UTF-8")
    return b"".join(lines)


def shown_address(address: str) -> str:
    """Return an address for messages: without user, password, query and fragment."""
    scheme = re.match("[a-zA-Z][a-zA-Z0-9+.-]*://", address)
    start = scheme.group() if scheme else ""
    rest = address.removeprefix(start).rpartition("@")[2]
    return start + re.split("[?#]", rest, maxsplit=1)[0].rstrip("/")


# The largest number of bytes to read of an error's body, and of any other body: the largest
# vocabularies take 60 MB.
MOST_ERROR, MOST_BODY = 2**16, 2**28


async def whole(status: int, chunks: AsyncIterator[bytes]) -> bytes:
    """Read a whole body; for an error, only as much as a message needs.

    Raises:
        EngineError: the body is larger than `MOST_BODY`.
    """
    parts, size = [], 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if status >= 400 and size > MOST_ERROR:
            break
        if size > MOST_BODY:
            raise EngineError(f"The engine's response is larger than {MOST_BODY} bytes.")
    return b"".join(parts)


class HttpxUpstream:
    """An upstream on the user's own httpx client.

    Use it for custom TLS or proxies, for an engine in the same process (`ASGITransport`), or for
    mocks.

    Args:
        client: an `httpx2.AsyncClient` or `httpx.AsyncClient`; the user closes it.
        address: `http://host:port`; by default the client's own `base_url`.
    """

    def __init__(self, client: Any, address: str | None = None) -> None:
        self._client = client
        self._base = (address if address is not None else str(client.base_url)).rstrip("/")
        self.address = shown_address(self._base)

    @asynccontextmanager
    async def send(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Reply]:
        """See `Upstream.send`."""
        request = self._client.build_request(
            method, self._base + path, content=body, headers={"Content-Type": "application/json"}
        )
        try:
            response = await self._client.send(request, stream=True)
        except Exception as error:
            if not _is_transport_error(error):
                raise
            message = f"The engine at {self.address} cannot be reached: {error!r}"
            raise EngineUnavailable(message) from error
        try:
            yield _HttpxReply(response, self.address)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Do nothing, since the user closes the client."""


class _HttpxReply:
    def __init__(self, response: Any, address: str) -> None:
        self._response = response
        self._address = address
        self.status: int = response.status_code
        self.content_type: str = response.headers.get("content-type", "")

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_bytes():
                yield chunk
        except Exception as error:
            if not _is_transport_error(error):
                raise
            message = f"The connection to the engine at {self._address} was lost: {error!r}."
            raise EngineError(message) from error

    async def read(self) -> bytes:
        return await whole(self.status, self.chunks())


def _is_transport_error(error: Exception) -> bool:
    # httpx and httpx2 have separate error trees; neither is a dependency.
    return isinstance(error, OSError) or any(
        base.__name__ == "TransportError" for base in type(error).__mro__
    )
