"""The address of a client behind trusted proxies, which `X-Forwarded-For` names."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Iterable
from typing import TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

_HEADER = b"x-forwarded-for"
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


# The bits of an IPv6 address in front of the IPv4 address that it maps.
_MAPPED = 96


def networks_of(texts: Iterable[str]) -> list[Network]:
    """Return addresses and networks that a user wrote, such as `10.0.0.5` or `10.0.0.0/8`.

    Raises:
        ValueError: a text is neither, has bits of a host, or names a network interface.
    """
    return [*map(_network, texts)]


def _network(text: str) -> Network:
    if "," in text:
        raise ValueError(
            f"{text!r} is a list. Repeat the option for each of them; a file has an array"
        )
    plain, scope, rest = text.partition("%")
    if scope:
        plain += "".join(rest.partition("/")[1:])
    try:
        found = ipaddress.ip_network(plain, strict=False)
    except ValueError:
        raise ValueError(
            f"{text!r} is not an address or a network. Write 10.0.0.5 for a proxy, or "
            "10.0.0.0/8 for all of a network"
        ) from None
    address = plain.partition("/")[0]
    is_one = found.prefixlen == found.max_prefixlen
    if scope:
        # Some event loops do not say from which interface a connection comes.
        wanted = address if is_one else found
        raise ValueError(
            f"{text!r} names a network interface. Write {wanted}, which is trusted on all of them"
        )
    if ipaddress.ip_address(address) != found.network_address:
        raise ValueError(
            f"{text!r} has bits of a host after the {found.prefixlen} of its network. "
            f"Write {address} for a proxy, or {found} for all of its network"
        )
    return _unmapped(found)


def _unmapped(network: Network) -> Network:
    """Return the network of IPv4 that a network of mapped addresses means; else the same one."""
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is None or network.prefixlen < _MAPPED:
        return network
    return ipaddress.IPv4Network((mapped, network.prefixlen - _MAPPED))


class ForwardedFor:
    """An ASGI app that gives another one the address of the client behind trusted proxies.

    Only the log names this address. The scheme and the `Host` stay those of the request.

    Args:
        app: the other app.
        trusted: the addresses and networks of proxies.

    Raises:
        ValueError: one of them is neither.
    """

    def __init__(self, app: ASGIApp, trusted: Iterable[str]) -> None:
        self._app = app
        self._trusted = networks_of(trusted)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on, without a coroutine more."""
        peer = scope.get("client")
        if peer is not None and self._trusts(_address(peer[0])):
            values = [value for name, value in scope["headers"] if name == _HEADER]
            if values:
                scope["client"] = (self._client(peer[0], b",".join(values).decode("latin-1")), 0)
        return self._app(scope, receive, send)

    def _client(self, peer: str, forwarded: str) -> str:
        """Return the last address that is not a trusted proxy's; else the first one.

        Each proxy adds the address of its peer at the end. A client can send anything before these.
        """
        found = peer
        for text in reversed(forwarded.split(",")):
            # The interface of an address is one of another machine, or any text of a client.
            address = None if "%" in text else _address(text.strip())
            if address is None:
                break
            found = str(address)
            if not self._trusts(address):
                break
        return found

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _address(text: str) -> Address | None:
    """Return an address, which some proxies write with its port; None for other texts."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
