"""Tests for fetching images by URL, from a real server."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest
from latimer.adapter.chat.fetch import Fetcher, is_public
from latimer.adapter.errors import InvalidRequest
from support.servers import serving

BODY = b"\x89PNG" + bytes(1000)


async def pages(scope: Any, _receive: Any, send: Any) -> None:
    """Serve an image, a text, redirects and errors."""
    if scope["type"] != "http":
        return
    path, _, rest = scope["path"].strip("/").partition("/")
    status, headers, body = 200, [(b"content-type", b"image/png")], BODY
    if path == "text":
        headers = [(b"content-type", b"text/html")]
    elif path == "redirect":
        target = scope["query_string"] or b"/picture" if rest in ("", "1") else b""
        target = target or f"/redirect/{int(rest) - 1}".encode()
        status, headers = 302, [(b"location", target)]
    elif path == "packed":
        headers += [(b"content-encoding", b"gzip")]
    elif path == "missing":
        status = 404
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the server's URL."""
    with serving(lambda: pages) as url:
        yield url


async def refused(fetcher: Fetcher, url: str) -> str:
    """Return the error message for a URL that is not fetched."""
    with pytest.raises(InvalidRequest) as caught:
        await fetcher(url, "messages[0]")
    assert (caught.value.param, caught.value.code) == ("messages[0]", "invalid_image_url")
    return caught.value.message


ANYWHERE = Fetcher(lambda address: address.startswith("127."))


async def test_a_picture_is_fetched(address: str) -> None:
    """The fetcher returns an image's bytes, directly and through redirects."""
    assert await ANYWHERE(f"{address}/picture", "p") == BODY
    assert await ANYWHERE(f"{address}/redirect/2", "p") == BODY


async def test_what_is_no_picture_is_refused(address: str) -> None:
    """Other content types, error statuses, redirect loops and large bodies are rejected."""
    assert "'text/html'" in await refused(ANYWHERE, f"{address}/text")
    assert "status 404" in await refused(ANYWHERE, f"{address}/missing")
    assert "redirects more than" in await refused(ANYWHERE, f"{address}/redirect/9")
    small = Fetcher(lambda _: True, most_bytes=100)
    assert "larger than 100 bytes" in await refused(small, f"{address}/picture")
    assert "cannot be fetched" in await refused(ANYWHERE, "http://127.0.0.1:1/x")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "2130706433", "127.1", "10.0.0.1",  # noqa: S104
     "169.254.169.254", "[::ffff:127.0.0.1]", "[fd00::1]"],
)  # fmt: skip
async def test_private_addresses_are_refused(address: str, host: str) -> None:
    """A private address is rejected in every notation, before any connection."""
    port = address.rpartition(":")[2]
    message = await refused(Fetcher(), f"http://{host}:{port}/picture")
    assert "is not a public address" in message


async def test_redirects_are_looked_at_too(address: str) -> None:
    """A redirect cannot lead to a private address or to another scheme."""
    message = await refused(ANYWHERE, f"{address}/redirect?http://10.0.0.1/x")
    assert "'10.0.0.1' is not a public address" in message
    assert "only http" in await refused(ANYWHERE, f"{address}/redirect?file:///etc/passwd")


async def test_only_checked_addresses_are_connected_to(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host name is resolved once, and only an allowed address of it is connected to."""
    asked: list[str] = []
    checked: list[str] = []

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", (ip, port)) for ip in ("10.0.0.1", "127.0.0.1")]

    def allows(ip: str) -> bool:
        checked.append(str(ipaddress.ip_address(ip)))
        return ip == "127.0.0.1"

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    port = address.rpartition(":")[2]
    assert await Fetcher(allows)(f"http://pictures.test:{port}/picture", "p") == BODY
    assert asked == ["pictures.test"]
    assert checked == ["10.0.0.1", "127.0.0.1"]


async def test_the_environment_names_no_proxy(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetcher ignores proxies in the environment, which would connect to unchecked hosts."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await ANYWHERE(f"{address}/picture", "p") == BODY


@pytest.mark.parametrize("port", ["0", "65536", "99999", "4294967376"])
async def test_a_port_that_is_none_is_refused(address: str, port: str) -> None:
    """An invalid port is rejected in an image's URL and in a redirect."""
    assert "port" in await refused(ANYWHERE, f"http://127.0.0.1:{port}/x")
    target = f"{address}/redirect?http://127.0.0.1:{port}/x"
    assert "port" in await refused(ANYWHERE, target)


async def test_compressed_bodies_are_refused(address: str) -> None:
    """A compressed body is rejected, since its size has no bound."""
    assert "compressed" in await refused(ANYWHERE, f"{address}/packed")


def test_what_is_public() -> None:
    """Only addresses of the public internet count as public."""
    assert is_public("93.184.216.34")
    assert is_public("2606:2800:220:1::1")
    assert is_public("::ffff:93.184.216.34")
    # NAT64, through which a network without IPv4 reaches it.
    assert is_public("64:ff9b::93.184.216.34")
    for private in (
        "192.168.1.1", "100.64.0.1", "224.0.0.1", "192.0.0.8", "192.88.99.1", "fe80::1%eth0",
        "ff02::1", "fec0::1", "3fff::1", "5f00::1", "2001:db8::1",
    ):  # fmt: skip
        assert not is_public(private), private


@pytest.mark.parametrize(
    "wrapped",
    [
        "::ffff:127.0.0.1", "::ffff:0:127.0.0.1", "::127.0.0.1", "64:ff9b::127.0.0.1",
        "64:ff9b::10.0.0.1", "64:ff9b:1::10.0.0.1", "2002:7f00:1::", "2002:a00:1::1",
        "2001:0:7f00:1::",
    ],
)  # fmt: skip
def test_a_private_address_in_another_is_private(wrapped: str) -> None:
    """No address of IPv6 leads to a private one of IPv4 that it contains."""
    assert not is_public(wrapped)
