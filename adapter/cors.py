"""What a browser's request is answered with: CORS headers, preflights, and who is refused.

Sans-I/O: `Access.judge` looks at a request's method and headers, before its body is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .errors import Header, InvalidRequest
from .origins import ANY, LocalRules, host_name, is_origin

METHODS = (b"GET", b"POST", b"DELETE")
EXPOSED = (
    b"x-request-id, openai-processing-ms, x-latimer-ignored, x-latimer-inexact, retry-after-ms"
)
# Seconds for which a browser need not ask again.
MAX_AGE = b"600"
# What a page on the internet asks before it calls a local server. The specification has had both
# names; today's browsers (Local Network Access) ask the user instead, and no header.
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
# Values of `Host` that are known to be allowed, and the longest of them in bytes.
_MOST_KNOWN, _LONGEST_KNOWN = 64, 255


class Verdict(NamedTuple):
    """What becomes of a request.

    Args:
        headers: to be added to the reply, whatever it is.
        error: why the request is refused; None if it is not.
        is_preflight: it asks for permission only, and the headers are the answer.
    """

    headers: Sequence[Header]
    error: InvalidRequest | None = None
    is_preflight: bool = False


class Access:
    """Which web pages may call the API.

    Args:
        origins: pages that may read replies; `*` for all. Requests of others are answered, too:
            their browsers keep the replies from them.
        rules: the rules of a server without a key, in place of `origins`; what they do not allow
            is refused.
    """

    def __init__(self, origins: Iterable[str], rules: LocalRules | None = None) -> None:
        self._origins = frozenset(origins)
        self._rules = rules
        self._answers_all = rules.any_origin if rules is not None else ANY in self._origins
        self._known: set[bytes] = set()

    def judge(self, method: str, scheme: str, headers: Sequence[Header]) -> Verdict | None:
        """Look at a request; None if nothing is to be done about it."""
        found = dict(headers)
        if b"origin" not in found and (
            self._rules is None
            or b"host" not in found
            or (found[b"host"] in self._known and len(found) == len(headers))
        ):
            # No browser leaves out the Host: without one, no website's name led here.
            return None
        origins = [value for name, value in headers if name == b"origin"]
        hosts = [value for name, value in headers if name == b"host"]
        # Several in one request become one that is nobody's.
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
        """The headers with which a page may read a reply."""
        exposed = (b"access-control-expose-headers", EXPOSED)
        if not self._answers_all:
            return [(b"access-control-allow-origin", origin), exposed, _VARY]
        granted = [(b"access-control-allow-origin", b"*"), exposed]
        # The rules refuse one origin still, which is null.
        return granted if self._rules is None else [*granted, _VARY]

    def _remember(self, host: bytes) -> None:
        if len(self._known) < _MOST_KNOWN and len(host) <= _LONGEST_KNOWN:
            self._known.add(host)


def _preflight(headers: Sequence[Header], granted: Sequence[Header]) -> Verdict:
    """The answer to a page that asks what it may send."""
    asked = dict(headers)
    method = asked[_REQUEST_METHOD]
    if method not in METHODS:
        allowed = b", ".join(METHODS).decode()
        error = InvalidRequest(
            f"The method '{_shown(method.decode('latin-1'))}' is not allowed for requests of web "
            f"pages. Allowed are {allowed}.",
            code="method_not_allowed",
        )
        return Verdict(granted, error)
    names = asked.get(b"access-control-request-headers")
    if names is not None and not _NAMES.fullmatch(names):
        error = InvalidRequest(
            "The header 'Access-Control-Request-Headers' is malformed. Send names of headers, with "
            "commas between them.",
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
        # A star would not stand for `authorization`.
        found.append((b"access-control-allow-headers", names))
    found += [(allow, b"true") for request, allow in _NETWORKS.items() if request in asked]
    return Verdict(found, is_preflight=True)


def _origin_error(origin: str, is_keyless: bool) -> InvalidRequest:
    if is_keyless:
        name = origin if is_origin(origin) else "ORIGIN"
        message = (
            f"The origin '{_shown(origin)}' may not use this server. Without an API key only local "
            f"pages and apps may. To allow it, start the server with --cors-origin {_shown(name)}, "
            "or with --api-key."
        )
    else:
        message = (
            f"The origin '{_shown(origin)}' may not use this server. To allow it, name it in "
            "cors_origins (--cors-origin)."
        )
    return InvalidRequest(message, code="origin_not_allowed", status=403)


def _host_error(host: str) -> InvalidRequest:
    name = host_name(host) or "NAME"
    return InvalidRequest(
        f"The host '{_shown(host)}' is not a known name of this server. Without an API key it "
        "answers to addresses, localhost, names without a dot and its machine's name. To allow "
        f"another one, start the server with --allowed-host {_shown(name)}, or with --api-key.",
        code="host_not_allowed",
        status=403,
    )


def _shown(text: str) -> str:
    """A header's value for a message, harmless and short."""
    return text.encode("ascii", "backslashreplace").decode()[:100]
