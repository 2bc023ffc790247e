"""Tests of the client's address behind trusted proxies."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

import httpx2
import pytest
from latimer.adapter.proxies import ForwardedFor
from latimer.adapter.settings import Settings
from latimer.adapter.settings_file import WrongSettings
from support.servers import begun

NEAR = "127.0.0.1"


async def seen(peer: Any, *values: bytes, trusted: tuple[str, ...] = (NEAR, "10.0.0.0/8")) -> Any:
    """Return the client that an app sees behind a peer with these headers."""
    found = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        found.append(scope["client"])

    headers = [(b"x-forwarded-for", value) for value in values]
    scope = {"type": "http", "client": peer, "headers": headers}
    await ForwardedFor(app, trusted)(scope, None, None)  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize(
    ("values", "client"),
    [
        ([b"203.0.113.9"], "203.0.113.9"),
        ([b"198.51.100.1, 203.0.113.9"], "203.0.113.9"),
        ([b"198.51.100.1, 203.0.113.9, 10.1.2.3"], "203.0.113.9"),
        ([b"203.0.113.9", b"10.1.2.3"], "203.0.113.9"),
        ([b"10.1.2.3,10.1.2.4"], "10.1.2.3"),
        ([b"203.0.113.9:4711"], "203.0.113.9"),
        ([b"[2001:db8::1]:4711"], "2001:db8::1"),
        ([b"2001:DB8::1"], "2001:db8::1"),
        ([b"203.0.113.9, ::ffff:10.1.2.3"], "203.0.113.9"),
        ([b"203.0.113.9, unknown, 10.1.2.3"], "10.1.2.3"),
        ([b"\x1b[31m"], NEAR),
        ([b"fe80::1%eth0"], NEAR),
        ([b"203.0.113.9, fe80::1%eth0, 10.1.2.3"], "10.1.2.3"),
        ([b"fe80::1%\x1b[31m"], NEAR),
        ([b""], NEAR),
    ],
)
async def test_the_last_address_that_is_not_a_proxy(values: list[bytes], client: str) -> None:
    """The client is the last address in the header apart from trusted proxies, and a text that is
    not an address ends the search."""
    assert await seen((NEAR, 5), *values) == (client, 0)


async def test_only_trusted_proxies_are_believed() -> None:
    """A peer that is not trusted, or that sends no header, is the client itself."""
    assert await seen(("192.0.2.1", 5), b"203.0.113.9") == ("192.0.2.1", 5)
    assert await seen(None, b"203.0.113.9") is None
    assert await seen((NEAR, 5)) == (NEAR, 5)


@pytest.mark.parametrize(
    ("peer", "trusted"),
    [
        ("::ffff:10.0.0.5", "10.0.0.0/8"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("10.0.0.5", "::ffff:10.0.0.5"),
        ("::ffff:10.0.0.5", "::ffff:10.0.0.5"),
        ("10.0.0.5", "::ffff:10.0.0.0/104"),
        ("fe80::1%eth0", "fe80::1"),
        ("fe80::1", "fe80::/10"),
    ],
)
async def test_a_proxy_has_one_address_in_all_spellings(peer: str, trusted: str) -> None:
    """An IPv4 address is the same as an IPv6 address, and a peer is one on every interface."""
    assert await seen((peer, 5), b"203.0.113.9", trusted=(trusted,)) == ("203.0.113.9", 0)


@pytest.mark.parametrize(
    ("peer", "trusted"),
    [
        ("::ffff:11.0.0.5", "10.0.0.0/8"),
        ("11.0.0.5", "::ffff:10.0.0.0/104"),
        ("10.0.0.5", "::/0"),
        ("fe80::2%eth0", "fe80::1"),
        ("::ffff:10.0.0.5%eth0:1", "10.0.0.6"),
    ],
)
async def test_another_address_is_no_proxy(peer: str, trusted: str) -> None:
    """A peer outside of the network is the client, in all spellings."""
    assert await seen((peer, 5), b"203.0.113.9", trusted=(trusted,)) == (peer, 5)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("10.0.0.5/8", "Write 10.0.0.5 for a proxy, or 10.0.0.0/8 for all of its network"),
        ("192.168.1.7/24", "Write 192.168.1.7 for a proxy, or 192.168.1.0/24 for all of its"),
        ("2001:db8::1/32", "Write 2001:db8::1 for a proxy, or 2001:db8::/32 for all of its"),
        ("::ffff:10.0.0.5/104", f"or {ipaddress.ip_address('::ffff:a00:0')}/104 for all of its"),
        ("fe80::1%eth0", "names a network interface. Write fe80::1, which is trusted on all"),
        ("10.0.0.5,10.0.0.6", "is a list. Repeat the option for each of them; a file has an array"),
        ("fe80::%eth0/10", "names a network interface. Write fe80::/10, which is trusted on all"),
    ],
)
def test_a_wrong_proxy_shows_what_to_write(value: str, advice: str) -> None:
    """A network with bits of a host, or an address with an interface, shows the right one."""
    with pytest.raises(WrongSettings, match=re.escape(advice)):
        Settings.load(None, trusted_proxies=(value,))


@pytest.mark.parametrize("value", ["nginx", "10.0.0.0/33", "10.0.0.5/8", "*"])
def test_a_proxy_is_an_address_or_a_network(value: str) -> None:
    """A name, or a network with bits of a host, is an error that shows what to write."""
    with pytest.raises(WrongSettings, match=r"trusted.proxies.*Write 10\.0\.0\.5"):
        Settings.load(None, trusted_proxies=(value,))


@pytest.mark.parametrize(
    ("options", "client"), [((), NEAR), (("--trusted-proxies", NEAR), "203.0.113.9")]
)
def test_the_log_has_the_client(options: tuple[str, ...], client: str) -> None:
    """The log has the client behind a trusted proxy, whose headers open
    nothing to pages; without the setting, it has the proxy."""
    environment = {"LATIMER_LOG_REQUESTS": "true", "LATIMER_LOG_FORMAT": "json"}
    with begun(*options, **environment) as (process, address, _):
        for host in ("llm.example", "llm"):
            headers = {
                "x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https", "host": host,
                "origin": "https://llm",
            }  # fmt: skip
            assert httpx2.get(f"{address}/v1/models", headers=headers).status_code == 403
        process.terminate()
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr if line.startswith("{")]
    assert [one["client"] for one in lines if one["event"] == "request"] == [client] * 2
