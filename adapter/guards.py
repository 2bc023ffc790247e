"""API keys (contract 1.2): several, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from ..backends.errors import RequestError
from .exchange import Exchange

_MISSING = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header "
    "using Bearer auth (i.e. Authorization: Bearer YOUR_KEY), or as the password field (with blank "
    "username) if you're accessing the API from your browser and are prompted for a username and "
    "password."
)


class Keys:
    """The keys that open the API; without any, everybody may use it."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys if key]

    def check(self, exchange: Exchange) -> str:
        """Who asks, as a name that tells nothing of the key; empty where everybody may.

        Raises:
            RequestError: the 401 that OpenAI answers; every key is compared, found or not.
        """
        if not self._digests:
            return ""
        authorization = exchange.header(b"authorization")
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise RequestError(_MISSING, status=401)
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise RequestError(
                f"Incorrect API key provided: {_redacted(key)}. Ask whoever runs this server for "
                "one.",
                code="invalid_api_key",
                status=401,
            )
        return digest.hex()[:32]


def _digest(key: str) -> bytes:
    # Of equal length, so that comparing them tells nothing about a key's length either.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _redacted(key: str) -> str:
    if len(key) < 16:
        return "****"
    shown = f"{key[:8]}****{key[-4:]}"
    return shown.encode("ascii", "backslashreplace").decode()
