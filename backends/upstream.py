"""HTTP to an engine: one pool per upstream, connections reused only while they are surely alive.

llama-server closes a connection after 100 answers or 5 idle seconds, so idle ones are dropped after
4 s, and a request whose reused connection dies before the first byte of the answer is sent once
more on a fresh one. Only the headers given here are ever sent: nothing of a client's request
reaches an engine (`X-Conversation-Id` would keep llama-server generating after a disconnect).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
from yarl import URL

from .errors import EngineError, EngineUnavailable

if TYPE_CHECKING:
    from types import TracebackType

IDLE_SECONDS = 4.0
CONNECT_SECONDS = 5.0


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


class AiohttpUpstream:
    """The default upstream, on aiohttp's client.

    Args:
        address: `http://host:port`, with a path where the engine is served under a prefix.
        headers: sent with every request (an engine's own API key, for example).
        silence: seconds without a byte after which an answer counts as lost.
    """

    def __init__(
        self, address: str, headers: Mapping[str, str] | None = None, silence: float = 600.0
    ) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._silence = silence
        self._urls: dict[str, URL] = {}
        self._pool: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    def send(self, method: str, path: str, body: bytes | None = None) -> _Exchange:
        """See `Upstream.send`."""
        if self._pool is None:
            self._pool, self._fresh = self._session(False), self._session(True)
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.address + path)
        return _Exchange(self, method, url, body)

    async def aclose(self) -> None:
        """Close every connection; a later request opens new ones."""
        sessions, self._pool, self._fresh = (self._pool, self._fresh), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    def _session(self, force_close: bool) -> aiohttp.ClientSession:
        idle = {} if force_close else {"keepalive_timeout": IDLE_SECONDS}
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=force_close, **idle),  # type: ignore[arg-type]
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers=self._headers,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=self._silence
            ),
            read_bufsize=2**18,
            trace_configs=[trace],
        )

    async def _request(self, method: str, url: URL, body: bytes | None) -> aiohttp.ClientResponse:
        assert self._pool is not None
        assert self._fresh is not None
        context = SimpleNamespace(reused=False)
        try:
            return await self._pool.request(method, url, data=body, trace_request_ctx=context)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) or not context.reused:
                raise
        return await self._fresh.request(method, url, data=body)


async def _note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


class _Exchange:
    """One request and its answer."""

    __slots__ = ("_body", "_method", "_response", "_upstream", "_url", "content_type", "status")

    def __init__(
        self, upstream: AiohttpUpstream, method: str, url: URL, body: bytes | None
    ) -> None:
        self._upstream = upstream
        self._method = method
        self._url = url
        self._body = body

    async def __aenter__(self) -> _Exchange:
        try:
            response = await self._upstream._request(self._method, self._url, self._body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._translated(error) from error
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

    async def chunks(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._translated(error) from error

    async def read(self) -> bytes:
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> EngineError:
        address = self._upstream.address
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return EngineUnavailable(
                f"The engine at {address} cannot be reached: {error}. Is it running?"
            )
        if isinstance(error, TimeoutError):
            return EngineError(
                f"The engine at {address} was silent for {self._upstream._silence} s."
            )
        return EngineError(f"The connection to the engine at {address} broke: {error!r}.")


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
            async for chunk in self._response.aiter_raw():
                yield chunk
        except Exception as error:
            if not _is_transport_error(error):
                raise
            message = f"The connection to the engine at {self._address} broke: {error!r}."
            raise EngineError(message) from error

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])


def _is_transport_error(error: Exception) -> bool:
    # httpx and httpx2 have separate error trees; neither is a dependency.
    return isinstance(error, OSError) or any(
        base.__name__ == "TransportError" for base in type(error).__mro__
    )
