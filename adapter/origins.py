"""Decide on requests from browsers: CORS headers, preflights, and rejected origins and hosts.

A browser sends the requests of every open page, so a local server without a key would serve any
website. Two headers identify such requests, and no page can forge them. `Origin` names the page.
`Host` is the name by which the browser reached the server: checking it stops DNS rebinding, where a
website's own name resolves to this machine.

`OriginMiddleware.judge` reads only the method and the headers of a request, and does no I/O.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from .errors import Header, InvalidRequest, as_ascii
from .handshake import scheme_of
from .request import EXCHANGE, Exchange

log = logging.getLogger("latimer")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# The scheme, the host in lower case, and the port (for http and https only).
Origin = tuple[str, str, int | None]

# The origin of a local file, or of a sandboxed frame, which any website can make.
NULL = "null"
ANY = "*"

_PORTS = {"http": 80, "https": 443}
_LABELS = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?"
_NAME = re.compile(_LABELS)
_AUTHORITY = re.compile(rf"(\[[0-9a-z:.%_-]+\]|{_LABELS})(?::([0-9]{{0,5}}))?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._~:\[\]-]*)")

# The names that Docker and Podman give to the machine that runs a container.
_CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
# RFC 1918, link-local, unique local. The shared addresses of carriers (100.64.0.0/10) are not
# included, since strangers use them.
_PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10",
    )
]  # fmt: skip


class LocalRules:
    """The origins and hosts that a server without an API key accepts.

    Args:
        origins: additional origins: `https://chat.example`, `null`, or `*` for all but `null`.
        hosts: additional host names: `llm.example`, `*.example`, or `*` for all.
        machine: this machine's own name, which is also accepted with `.local` appended.
        beyond_loopback: True if other machines can reach the server. Pages on private addresses
            may then call it.

    Raises:
        ValueError: an origin or a host is not in one of these forms.
    """

    def __init__(
        self,
        origins: Iterable[str] = (),
        hosts: Iterable[str] = (),
        machine: str = "",
        beyond_loopback: bool = False,
    ) -> None:
        origins, hosts = list(origins), [host.lower() for host in hosts]
        self.any_origin = ANY in origins
        self._null = NULL in origins
        self._origins = {checked_origin(one) for one in origins if one not in (ANY, NULL)}
        hosts = [checked_host(one) for one in hosts]
        machine = machine.lower().removesuffix(".")
        own = {machine, f"{machine}.local", f"{machine.partition('.')[0]}.local"} if machine else ()
        self._any_host = ANY in hosts
        self._hosts = _CONTAINER_HOSTS.union(own, hosts)
        self._suffixes = tuple(host[1:] for host in hosts if host.startswith("*."))
        self._beyond_loopback = beyond_loopback

    def allows_host(self, host: str) -> bool:
        """Return True if this `Host` cannot be a website's name that resolves to this machine.

        Addresses and names without a dot are not domains of websites.
        """
        if self._any_host:
            return True
        parts = _authority(host)
        if parts is None:
            return False
        name = parts[0]
        if _address(name) is not None or "." not in name:
            return True
        name = name.removesuffix(".")
        return _is_localhost(name) or name in self._hosts or name.endswith(self._suffixes)

    def allows_origin(self, text: str, scheme: str, host: str | None) -> bool:
        """Return True if a page of this `Origin` may call the server.

        Args:
            text: the header's value.
            scheme: the scheme of the request, `http` or `https`.
            host: the request's `Host`.
        """
        if text == NULL:
            return self._null
        if self.any_origin:
            return True
        origin = _origin(text)
        if origin is None:
            return False
        if origin[0] not in _PORTS or origin in self._origins:
            return True
        address = _address(origin[1])
        if address is None:
            is_near = _is_localhost(origin[1].removesuffix("."))
        else:
            is_near = address.is_loopback or (
                self._beyond_loopback and any(address in network for network in _PRIVATE)
            )
        return is_near or (host is not None and origin == _origin(f"{scheme}://{host}"))


def checked_origin(text: str) -> Origin:
    """Return the parts of an origin that a user wrote.

    Raises:
        ValueError: the origin is not in the form that browsers send.
    """
    origin = _origin(text)
    if origin is None:
        raise ValueError(
            f"{text!r} is not an origin. Write it as a browser sends it, without a path: "
            "https://chat.example, http://10.0.0.5:3000, null, or * for all"
        )
    return origin


def checked_host(text: str) -> str:
    """Return a host name that a user wrote, in lower case and without a final dot.

    Raises:
        ValueError: the host is not a name, `*.name` or `*`.
    """
    host = text.lower().removesuffix(".")
    if host != ANY and not _NAME.fullmatch(host.removeprefix("*.")):
        raise ValueError(
            f"{text!r} is not a host name. Write it without a scheme and a port: llm.example, "
            "*.llm.example for every name below it, or * for all"
        )
    return host


def is_origin(text: str) -> bool:
    """Return True if a text is an origin in the form that browsers send."""
    return text == NULL or _origin(text) is not None


def host_name(text: str) -> str | None:
    """Return the name or address in a `Host`, without its port; None if it is malformed."""
    parts = _authority(text)
    return parts[0] if parts else None


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address, such as `127.0.0.1` or `::1`."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _origin(text: str) -> Origin | None:
    """Return the parts of an origin, with its default port; None if it is malformed."""
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        return None
    scheme, rest = match.groups()
    if scheme not in _PORTS:
        return scheme, rest, None
    parts = _authority(rest)
    if parts is None:
        return None
    return scheme, parts[0], _PORTS[scheme] if parts[1] is None else parts[1]


def _is_of_host(origin: str, host: str) -> bool:
    """Return True if a page of this `Origin` comes from this `Host`.

    A proxy that ends TLS hides the scheme, so that of the origin counts.
    """
    parts = _origin(origin)
    return parts is not None and parts[0] in _PORTS and parts == _origin(f"{parts[0]}://{host}")


def _authority(text: str) -> tuple[str, int | None] | None:
    """Split `host`, `host:port` or `[::1]:port` into host, in lower case, and port.

    None if the text is in another form.
    """
    match = _AUTHORITY.fullmatch(text.lower())
    if match is None:
        return None
    host, port = match.groups()
    if host.startswith("[") and _address(host) is None:
        return None
    return host, int(port) if port else None


def _address(host: str) -> Address | None:
    """Return the address in a host, with IPv6 in brackets; None for a name."""
    try:
        if not host.startswith("["):
            return ipaddress.IPv4Address(host)
        address = ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return None
    return address.ipv4_mapped or address


def _is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


METHODS = ("GET", "HEAD", "POST", "DELETE")
EXPOSED = (
    "x-request-id", "request-id", "openai-processing-ms", "x-latimer-ignored", "x-latimer-inexact",
    "x-latimer-engine", "x-latimer-affinity", "x-latimer-model", "retry-after", "retry-after-ms",
    "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
)  # fmt: skip
# Seconds that a browser may cache the answer to a preflight.
MAX_AGE = 600
# The headers with which a public page asks for access to a local server. The specification has used
# both names. Current browsers (Local Network Access) ask the user and send neither.
_NETWORKS = {
    b"access-control-request-private-network": b"access-control-allow-private-network",
    b"access-control-request-local-network": b"access-control-allow-local-network",
}
_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, \t-]*")
_VARY = (b"vary", b"Origin")
_REQUEST_METHOD = b"access-control-request-method"
# The most `Host` values to remember as allowed, and the longest of them in bytes.
_MOST_KNOWN, _LONGEST_KNOWN = 64, 255


class Verdict(NamedTuple):
    """The decision on a request.

    Args:
        headers: the headers to add to every response to the request.
        error: the error that rejects the request; None to accept it.
        is_preflight: True if the request is a preflight, which the headers answer.
    """

    headers: Sequence[Header]
    error: InvalidRequest | None = None
    is_preflight: bool = False


class OriginMiddleware(CORSMiddleware):
    """Starlette's CORS, and the rules for a server without a key; all errors are OpenAI's.

    It decides before a body is read. It adds headers to the exchange instead of wrapping `send`,
    which would cost a call for each token.

    Args:
        origins: the origins of pages that may read responses; `*` for all. Requests of other
            origins get responses too, but the browser withholds these from the page. None adds no
            headers and passes preflights on: an app around this one has its own rules.
        rules: the rules of a server without a key, instead of `origins`; requests that they do
            not allow are rejected.
    """

    def __init__(
        self, app: ASGIApp, origins: Iterable[str] | None = (), rules: LocalRules | None = None
    ) -> None:
        self._is_silent = origins is None and rules is None
        if rules is not None:
            origins = [ANY] if rules.any_origin else []
        super().__init__(
            app,
            allow_origins=frozenset(origins or ()),
            allow_methods=METHODS,
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=EXPOSED,
            max_age=MAX_AGE,
        )
        self._rules = rules
        self._known: set[bytes] = set()
        self._logged: set[str] = set()
        self._exposed = _header("access-control-expose-headers", ", ".join(EXPOSED))
        preflight = self.preflight_headers
        self._preflight = [
            _header("access-control-allow-methods", preflight["Access-Control-Allow-Methods"]),
            _header("access-control-max-age", preflight["Access-Control-Max-Age"]),
            _header("vary", preflight["Vary"] + ", Access-Control-Request-Local-Network"),
        ]

    @override
    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]
        # Most clients of a server with a key, or inside another app, are not browsers.
        if scope["type"] == "http":
            if self._is_silent or (self._rules is None and b"origin" not in scope[EXCHANGE].named):
                return self.app(scope, receive, send)
            verdict = self.judge(scope["method"], scope.get("scheme", "http"), scope["headers"])
            if verdict is not None:
                exchange: Exchange = scope[EXCHANGE]
                exchange.response_headers += verdict.headers
                if verdict.error is not None:
                    self._refuse(verdict.error)
                if verdict.is_preflight:
                    return exchange.reply(200, b"OK", b"text/plain")
        elif scope["type"] == "websocket":
            self._check_handshake(scope)
        return self.app(scope, receive, send)

    def _check_handshake(self, scope: Scope) -> None:
        """Raise the error for a page that may not open a WebSocket.

        A browser lets every page do that, and shows it what arrives. So a page that may not read
        responses is rejected here. Without `rules`, pages of the same host may always read them.
        """
        verdict = self.judge("GET", scheme_of(scope), scope["headers"])
        if verdict is None:
            return
        if verdict.error is not None:
            self._refuse(verdict.error)
        if self._rules is not None:
            return
        found = dict(scope["headers"])
        origin = found.get(b"origin", b"").decode("latin-1")
        host = found.get(b"host", b"").decode("latin-1")
        if not self.is_allowed_origin(origin) and not _is_of_host(origin, host):
            self._refuse(_origin_error(origin, is_keyless=False))

    def _refuse(self, error: InvalidRequest) -> NoReturn:
        """Raise an error; log it once, since a browser hides it from the page and its user."""
        if error.message not in self._logged and len(self._logged) < _MOST_KNOWN:
            self._logged.add(error.message)
            log.warning("a request of a web page is refused: %s", error.message)
        raise error

    def judge(self, method: str, scheme: str, headers: Sequence[Header]) -> Verdict | None:
        """Return the verdict on a request, or None if it needs no check and no headers."""
        found = dict(headers)
        if b"origin" not in found and (
            self._rules is None
            or b"host" not in found
            or (found[b"host"] in self._known and len(found) == len(headers))
        ):
            # Every browser sends `Host`, so a request without it does not come from a website.
            return None
        origins = [value for name, value in headers if name == b"origin"]
        hosts = [value for name, value in headers if name == b"host"]
        # Repeated headers are joined into a value that is not a valid origin or host.
        host = b", ".join(hosts).decode("latin-1") if hosts else None
        origin = b", ".join(origins).decode("latin-1") if origins else None
        is_allowed = origin is not None and (
            self.is_allowed_origin(origin)
            if self._rules is None
            else self._rules.allows_origin(origin, scheme, host)
        )
        granted = self._granted(origins[0]) if is_allowed else [_VARY]
        if self._rules is not None and host is not None:
            if not self._rules.allows_host(host):
                return Verdict(granted, _host_error(host))
            if len(self._known) < _MOST_KNOWN and len(hosts[0]) <= _LONGEST_KNOWN:
                self._known.add(hosts[0])
        if origin is None:
            return None
        is_preflight = method == "OPTIONS" and _REQUEST_METHOD in found
        if not is_allowed and (is_preflight or self._rules is not None):
            return Verdict(granted, _origin_error(origin, self._rules is not None))
        return self._answer(found, granted) if is_preflight else Verdict(granted)

    def _granted(self, origin: bytes) -> list[Header]:
        if not self.allow_all_origins:
            return [(b"access-control-allow-origin", origin), self._exposed, _VARY]
        granted = [(b"access-control-allow-origin", b"*"), self._exposed]
        # The rules still reject the origin `null`.
        return granted if self._rules is None else [*granted, _VARY]

    def _answer(self, asked: Mapping[bytes, bytes], granted: Sequence[Header]) -> Verdict:
        method = asked[_REQUEST_METHOD].decode("latin-1")
        if method not in self.allow_methods:
            error = InvalidRequest(
                f"The method '{as_ascii(method)}' is not allowed for cross-origin requests. "
                f"Allowed methods are {', '.join(self.allow_methods)}.",
                code="method_not_allowed",
            )
            return Verdict(granted, error)
        names = asked.get(b"access-control-request-headers")
        if names is not None and not _NAMES.fullmatch(names):
            error = InvalidRequest(
                "The header 'Access-Control-Request-Headers' is malformed. Expected header names, "
                "separated by commas.",
                code="header_not_allowed",
            )
            return Verdict(granted, error)
        found = [header for header in granted if header[0] != b"vary"] + self._preflight
        if names is not None:
            # A `*` would not cover `authorization`.
            found.append((b"access-control-allow-headers", names))
        found += [(allow, b"true") for request, allow in _NETWORKS.items() if request in asked]
        return Verdict(found, is_preflight=True)


def _header(name: str, value: str) -> Header:
    return name.encode(), value.encode()


def _origin_error(origin: str, is_keyless: bool) -> InvalidRequest:
    if is_keyless:
        name = origin if is_origin(origin) else "ORIGIN"
        message = (
            f"The origin '{as_ascii(origin)}' is not allowed. Without an API key, this server "
            "allows local pages and apps only. To allow it, start the server with --cors-origin "
            f"{as_ascii(name)}, or with --api-key."
        )
    else:
        message = (
            f"The origin '{as_ascii(origin)}' is not allowed. To allow it, add it to --cors-origin."
        )
    return InvalidRequest(message, code="origin_not_allowed", status=403)


def _host_error(host: str) -> InvalidRequest:
    name = host_name(host) or "NAME"
    return InvalidRequest(
        f"The host '{as_ascii(host)}' is not allowed. Without an API key, this server allows IP "
        "addresses, localhost, names without a dot and the name of its machine. To allow it, "
        f"start the server with --allowed-host {as_ascii(name)}, or with --api-key.",
        code="host_not_allowed",
        status=403,
    )
