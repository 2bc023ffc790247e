"""The way to an engine over HTTP: the interface, and the implementation on a user's own client.

The default implementation is in `http.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from .errors import EngineError, EngineUnavailable


class Reply(Protocol):
    """An answer whose headers have arrived."""

    status: int
    content_type: str

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; what was waiting together comes in one piece."""
        ...

    async def read(self) -> bytes:
        """The whole body."""
        ...


class Upstream(Protocol):
    """An engine's address, and the way to it."""

    address: str

    def send(
        self, method: str, path: str, body: bytes | None = None
    ) -> AbstractAsyncContextManager[Reply]:
        """Send a request; leaving the context early closes the connection at once.

        Raises:
            EngineUnavailable: the engine cannot be reached.
            EngineError: it was silent for too long, or the connection broke.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


# Bytes of an error's body that are read, and of any other body that is read whole: the largest
# vocabularies come to 60 MB.
MOST_ERROR, MOST_BODY = 2**16, 2**28


async def whole(status: int, chunks: AsyncIterator[bytes]) -> bytes:
    """Put a body together; of an error's only as much as a message needs.

    Raises:
        EngineError: there is no end to it.
    """
    parts, size = [], 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if status >= 400 and size > MOST_ERROR:
            break
        if size > MOST_BODY:
            raise EngineError(f"The engine's answer is larger than {MOST_BODY} bytes.")
    return b"".join(parts)


class HttpxUpstream:
    """An upstream through a client of httpx's kind that the user made.

    For own TLS and proxies, for an engine in the same process (`ASGITransport`), for mocks.

    Args:
        client: an `httpx2.AsyncClient` or `httpx.AsyncClient`; it stays the user's to close.
        address: `http://host:port`; by default the client's own `base_url`.
    """

    def __init__(self, client: Any, address: str | None = None) -> None:
        self._client = client
        self.address = (address if address is not None else str(client.base_url)).rstrip("/")

    @asynccontextmanager
    async def send(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Reply]:
        """See `Upstream.send`."""
        request = self._client.build_request(
            method, self.address + path, content=body, headers={"Content-Type": "application/json"}
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
        """Leave the client alone: it is the user's."""


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
            message = f"The connection to the engine at {self._address} broke: {error!r}."
            raise EngineError(message) from error

    async def read(self) -> bytes:
        return await whole(self.status, self.chunks())


def _is_transport_error(error: Exception) -> bool:
    # httpx and httpx2 have separate error trees; neither is a dependency.
    return isinstance(error, OSError) or any(
        base.__name__ == "TransportError" for base in type(error).__mro__
    )
