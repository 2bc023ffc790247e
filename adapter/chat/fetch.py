"""Image fetching without access to private networks.

Host names are resolved here, addresses that are not public are rejected, and the connection goes to
the address that was checked. The same rule applies to redirects. This module is imported only if
fetching is enabled.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

import httpcore2
import httpx2

from ...backends.errors import shortened
from ..errors import wrong_value

MOST_BYTES = 20 * 1024 * 1024
MOST_REDIRECTS = 3
SECONDS = 15
# For each address of a host except the last: a dead address must not use up all of the time.
CONNECT_SECONDS = 2.0
# The addresses that a network without IPv4 has for those of IPv4.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# The public addresses of IPv6: others lead to hosts nearby, or contain an address of IPv4.
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Networks for protocols and documentation that Python takes for public ones, or took.
_SPECIAL = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2002::/16", "3fff::/20"))
)
_REDIRECTS = (301, 302, 303, 307, 308)
# Images gain nothing from compression, and a compressed response can expand without bound.
_HEADERS = (("accept", "image/*"), ("accept-encoding", "identity"), ("user-agent", "latimer"))
_ERRORS = (
    httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException,
    httpcore2.UnsupportedProtocol, httpx2.InvalidURL, OSError, ValueError, OverflowError,
    ExceptionGroup,
)  # fmt: skip


class _Refused(Exception):
    """The reason not to fetch a URL."""


def is_public(address: str) -> bool:
    """Return True if an IP address is public."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped or ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        elif ip not in _UNICAST:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in each for each in _SPECIAL)


class _Network(httpcore2.AnyIOBackend):
    """A network backend that connects only to the allowed addresses of a host."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Open a connection to the first allowed address of a host that answers."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
        allowed = [address for address in addresses if self._allows(address)]
        if not allowed:
            raise _Refused(f"'{shortened(host)}' is not a public address")
        for address in allowed[:-1]:
            try:
                return await super().connect_tcp(
                    address, port, CONNECT_SECONDS, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await super().connect_tcp(allowed[-1], port, timeout, local_address, socket_options)


class Fetcher:
    """A client that fetches images over HTTP and HTTPS.

    Proxies from the environment are not used: they would connect to unchecked addresses.

    Args:
        allows: returns True if a connection to an IP address is allowed.
        most_bytes: the size limit of an image in bytes.
    """

    def __init__(
        self, allows: Callable[[str], bool] = is_public, most_bytes: int = MOST_BYTES
    ) -> None:
        self._allows = allows
        self._most_bytes = most_bytes

    async def __call__(self, url: str, param: str) -> bytes:
        """Return the image at a URL.

        Raises:
            InvalidRequest: the URL is not public or does not answer, or the body is too large or
                not an image.
        """
        try:
            async with asyncio.timeout(SECONDS):
                return await self._followed(url)
        except _Refused as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the server did not respond within {SECONDS} seconds"
        except _ERRORS as error:
            reason = f"the image cannot be fetched ({shortened(str(error))})"
        raise wrong_value(param, f"{reason}.", "invalid_image_url")

    async def _followed(self, url: str) -> bytes:
        # Loading the certificates takes 20 ms.
        tls = await asyncio.to_thread(_tls)
        here = httpx2.URL(url.strip())
        for _ in range(MOST_REDIRECTS + 1):
            self._check(here)
            # A new pool each time, so that no connection outlives the check of its address.
            pool = httpcore2.AsyncConnectionPool(tls, network_backend=_Network(self._allows))
            target = httpcore2.URL(
                scheme=here.raw_scheme, host=here.raw_host, port=here.port, target=here.raw_path
            )
            async with pool, pool.stream("GET", target, headers=_HEADERS) as reply:
                headers = httpx2.Headers(reply.headers)
                if reply.status in _REDIRECTS and "location" in headers:
                    here = here.join(headers["location"])
                    continue
                if reply.status != 200:
                    raise _Refused(f"the server responded with status {reply.status}")
                content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
                if not content_type.startswith("image/"):
                    raise _Refused(f"the content type is '{shortened(content_type)}', not an image")
                if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
                    raise _Refused(
                        "the server compressed the response, although the request does not accept "
                        "compression"
                    )
                return await self._body(reply)
        raise _Refused(f"the URL redirects more than {MOST_REDIRECTS} times")

    def _check(self, url: httpx2.URL) -> None:
        """Reject other schemes, invalid ports, and IP addresses that are not allowed."""
        if url.scheme not in ("http", "https") or not url.host:
            raise _Refused("only http and https URLs are supported")
        if url.port is not None and not 0 < url.port < 65_536:
            raise _Refused(f"{url.port} is not a valid port")
        try:
            public = self._allows(url.host)
        except ValueError:
            return
        if not public:
            raise _Refused(f"'{shortened(url.host)}' is not a public address")

    async def _body(self, reply: httpcore2.Response) -> bytes:
        body = bytearray()
        async for chunk in reply.aiter_stream():
            body += chunk
            if len(body) > self._most_bytes:
                raise _Refused(f"the image is larger than {self._most_bytes} bytes")
        return bytes(body)


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()
