"""Fetching what a request names by its address, from where that can do no harm.

An address that a client chooses must not reach what only this machine can: so names are resolved
here, every address that is not public is refused, and the connection goes to the one that was
looked at. Redirects are followed by the same rule.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TypeAlias
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

from ..backends.errors import RequestError

Fetch: TypeAlias = Callable[[str, str], Awaitable[bytes]]

MOST_BYTES = 20 * 1024 * 1024
MOST_REDIRECTS = 3
SECONDS = 15
_REDIRECTS = (301, 302, 303, 307, 308)


class _Refused(Exception):
    """Why something is not fetched."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's."""
    ip = ipaddress.ip_address(address.split("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    return ip.is_global and not ip.is_multicast


class _Resolver(AbstractResolver):
    """Resolves names to addresses that are allowed."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows
        self._inner = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        allowed = [one for one in found if self._allows(one["host"])]
        if not allowed:
            raise _Refused(f"'{host}' is no public address")
        return allowed

    async def close(self) -> None:
        await self._inner.close()


class Fetcher:
    """Fetches pictures by http and https.

    Args:
        allows: says whether an IP address may be connected to.
        most_bytes: the largest body taken.
    """

    def __init__(
        self, allows: Callable[[str], bool] = is_public, most_bytes: int = MOST_BYTES
    ) -> None:
        self._allows = allows
        self._most_bytes = most_bytes

    async def __call__(self, url: str, param: str) -> bytes:
        """The body at an address.

        Raises:
            RequestError: it is not public, too large, no picture, or does not answer.
        """
        try:
            async with asyncio.timeout(SECONDS), self._session() as session:
                return await self._followed(session, url)
        except _Refused as error:
            reason = str(error)
        except TimeoutError:
            reason = f"there was no answer within {SECONDS} seconds"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = f"it cannot be fetched ({error})"
        raise RequestError(f"Invalid '{param}': {reason}.", param, "invalid_image_url")

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(resolver=_Resolver(self._allows), use_dns_cache=False)
        jar = aiohttp.DummyCookieJar()
        return aiohttp.ClientSession(connector=connector, cookie_jar=jar, trust_env=False)

    async def _followed(self, session: aiohttp.ClientSession, url: str) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            self._check(url)
            async with session.get(url, allow_redirects=False) as reply:
                if reply.status in _REDIRECTS and "location" in reply.headers:
                    url = urljoin(url, reply.headers["location"])
                    continue
                if reply.status != 200:
                    raise _Refused(f"it answers with status {reply.status}")
                if not reply.content_type.startswith("image/"):
                    raise _Refused(f"what is there is '{reply.content_type}', no image")
                return await self._body(reply)
        raise _Refused(f"it redirects more than {MOST_REDIRECTS} times")

    def _check(self, url: str) -> None:
        """Addresses that are written as numbers are not resolved: they are looked at here."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _Refused("only http and https are fetched")
        try:
            public = self._allows(parts.hostname)
        except ValueError:
            return
        if not public:
            raise _Refused(f"'{parts.hostname}' is no public address")

    async def _body(self, reply: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in reply.content.iter_chunked(65_536):
            body += chunk
            if len(body) > self._most_bytes:
                raise _Refused(f"it is larger than {self._most_bytes} bytes")
        return bytes(body)
