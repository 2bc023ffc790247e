"""Decide on requests from browsers: CORS headers, preflights, and rejected origins and hosts.

Sans-I/O: `Access.judge` reads the method and the headers of a request, before its body is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .errors import Header, InvalidRequest
from .origins import ANY, LocalRules, host_name, is_origin

METHODS = (b"GET", b"HEAD", b"POST", b"DELETE")
EXPOSED = (
    b"x-request-id, openai-processing-ms, x-latimer-ignored, x-latimer-inexact, retry-after-ms"
)
# Seconds that a browser may cache the answer to a preflight.
MAX_AGE = b"600"
# The headers with which a public page asks for access to a local server. The specification has used
# both names. Current browsers (Local Network Access) ask the user and send neither.
_NETWORKS = {
    b"access-control-request-private-network": b"access-control-allow-private-network",
    b"access-control-request-local-network": b"access-control-allow-local-network",
}
_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, \t-]*")
_VARY = (b"vary", b"Origin")
_VARY_OF_PREFLIGHTS = (
    b"vary",
    b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    b"Access-Control-Request-Private-Network, Access-Control-Request-Local-Network",
)
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


class Access:
    """The rules for web pages that call the API.

    Args:
        origins: the origins of pages that may read responses; `*` for all. Requests of other
            origins get responses too, but the browser withholds these from the page.
        rules: the rules of a server without a key, instead of `origins`; requests that they do
            not allow are rejected.
    """

    def __init__(self, origins: Iterable[str], rules: LocalRules | None = None) -> None:
        self._origins = frozenset(origins)
        self._rules = rules
        self._answers_all = rules.any_origin if rules is not None else ANY in self._origins
        self._known: set[bytes] = set()

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
        is_allowed = origin is not None and self._allows(origin, scheme, host)
        granted = self._granted(origins[0]) if is_allowed else [_VARY]
        if self._rules is not None and host is not None:
            if not self._rules.allows_host(host):
                return Verdict(granted, _host_error(host))
            self._remember(hosts[0])
        if origin is None:
            return None
        is_preflight = method == "OPTIONS" and any(name == _REQUEST_METHOD for name, _ in headers)
        if not is_allowed and (is_preflight or self._rules is not None):
            return Verdict(granted, _origin_error(origin, self._rules is not None))
        return _preflight(headers, granted) if is_preflight else Verdict(granted)

    def _allows(self, origin: str, scheme: str, host: str | None) -> bool:
        if self._rules is not None:
            return self._rules.allows_origin(origin, scheme, host)
        return self._answers_all or origin in self._origins

    def _granted(self, origin: bytes) -> list[Header]:
        """Return the headers that allow a page to read the response."""
        exposed = (b"access-control-expose-headers", EXPOSED)
        if not self._answers_all:
            return [(b"access-control-allow-origin", origin), exposed, _VARY]
        granted = [(b"access-control-allow-origin", b"*"), exposed]
        # The rules still reject the origin `null`.
        return granted if self._rules is None else [*granted, _VARY]

    def _remember(self, host: bytes) -> None:
        if len(self._known) < _MOST_KNOWN and len(host) <= _LONGEST_KNOWN:
            self._known.add(host)


def _preflight(headers: Sequence[Header], granted: Sequence[Header]) -> Verdict:
    """Return the verdict on a preflight."""
    asked = dict(headers)
    method = asked[_REQUEST_METHOD]
    if method not in METHODS:
        allowed = b", ".join(METHODS).decode()
        error = InvalidRequest(
            f"The method '{_shown(method.decode('latin-1'))}' is not allowed for cross-origin "
            f"requests. Allowed methods are {allowed}.",
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
    found = [header for header in granted if header[0] != b"vary"]
    found += [
        (b"access-control-allow-methods", b", ".join(METHODS)),
        (b"access-control-max-age", MAX_AGE),
        _VARY_OF_PREFLIGHTS,
    ]
    if names is not None:
        # A `*` would not cover `authorization`.
        found.append((b"access-control-allow-headers", names))
    found += [(allow, b"true") for request, allow in _NETWORKS.items() if request in asked]
    return Verdict(found, is_preflight=True)


def _origin_error(origin: str, is_keyless: bool) -> InvalidRequest:
    if is_keyless:
        name = origin if is_origin(origin) else "ORIGIN"
        message = (
            f"The origin '{_shown(origin)}' is not allowed. Without an API key, this server allows "
            "local pages and apps only. To allow it, start the server with --cors-origin "
            f"{_shown(name)}, or with --api-key."
        )
    else:
        message = (
            f"The origin '{_shown(origin)}' is not allowed. To allow it, add it to cors_origins "
            "(--cors-origin)."
        )
    return InvalidRequest(message, code="origin_not_allowed", status=403)


def _host_error(host: str) -> InvalidRequest:
    name = host_name(host) or "NAME"
    return InvalidRequest(
        f"The host '{_shown(host)}' is not allowed. Without an API key, this server allows IP "
        "addresses, localhost, names without a dot and the name of its machine. To allow it, "
        f"start the server with --allowed-host {_shown(name)}, or with --api-key.",
        code="host_not_allowed",
        status=403,
    )


def _shown(text: str) -> str:
    """Return a header's value for a message, as ASCII and shortened."""
    return text.encode("ascii", "backslashreplace").decode()[:100]
