"""API keys: read from settings, check in requests, and name the owner of a key (contract 1.2)."""

from __future__ import annotations

import hashlib
import hmac
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.requests import Request


class UnusableKey(ValueError):
    """A key that no request can send, or that breaks a header; the message omits the key."""


def check_key(key: str, setting: str) -> None:
    """Check that a key can be sent in an HTTP header.

    Args:
        setting: the setting that the key comes from, for the message.

    Raises:
        UnusableKey: the key is empty or not UTF-8, has a control character or a line end, or has
            spaces around it.
    """
    if not key:
        reason = "is empty"
    elif any(unicodedata.category(one) == "Cs" for one in key):
        reason = "is not valid UTF-8"
    elif any(unicodedata.category(one) == "Cc" for one in key):
        reason = "contains a line break or another control character"
    elif key != key.strip(" "):
        reason = "starts or ends with whitespace"
    else:
        return
    raise UnusableKey(f"{setting}: a key {reason}. Keys are sent unchanged in an HTTP header.")


def owner_of(key: str) -> str:
    """Return the digest of a key, which names the owner of stored objects."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def keys_of(file: Path) -> list[str]:
    """Return the keys in a file, one per line; surrounding whitespace and empty lines are ignored.

    Raises:
        UnusableKey: the file is not UTF-8 text, or has no key.
        OSError: the file cannot be read.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnusableKey(f"api_key_file: {file} is not UTF-8 text.") from None
    lines = (line.removesuffix("\r").strip(" \t") for line in text.split("\n"))
    found = [line for line in lines if line]
    if not found:
        # An empty file must not result in a server without keys.
        raise UnusableKey(f"api_key_file: {file} contains no key.")
    return found


_MISSING = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header "
    "using Bearer auth (i.e. Authorization: Bearer YOUR_KEY), or as the password field (with blank "
    "username) if you're accessing the API from your browser and are prompted for a username and "
    "password."
)


class Keys:
    """The API keys that requests may use.

    Attributes:
        needed: True if requests need a key: there is one.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have equal lengths, so comparing them does not reveal a key's length.
        self._owners: list[tuple[bytes, str]] = []
        for key in keys:
            if not key:
                continue
            owner = owner_of(key)
            self._owners += [(_digest(spelling), owner) for spelling in _spellings(key)]
        self.needed = bool(self._owners)

    def find(self, request: Request) -> str | None:
        """Return the owner of a request's key, as a digest; None if it has no known key.

        Every key is compared, even after a match.
        """
        key = _key_of(request)
        if key is None:
            return None
        digest = _digest(key)
        matches = [owner for known, owner in self._owners if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None


def require_key(request: Request) -> str:
    """Return the owner of a request's key, as a digest; empty if no key is needed.

    Raises:
        InvalidRequest: OpenAI's 401, for a missing or unknown key.
    """
    key: str | None = request.state.key_digest
    if key is not None:
        return key
    sent = _key_of(request)
    if sent is None:
        raise InvalidRequest(_MISSING, status=401)
    raise InvalidRequest(
        f"Incorrect API key provided: {_redacted(sent)}. Ask the operator of this server for a "
        "valid key.",
        code="invalid_api_key",
        status=401,
    )


def _key_of(request: Request) -> bytes | None:
    value = request.headers.get("authorization", "").encode("latin-1")
    scheme, _, key = value.partition(b" ")
    key = key.strip(b" \t")
    return key if scheme.lower() == b"bearer" and key else None


def _spellings(key: str) -> list[bytes]:
    """Return the bytes that clients may send for a key: UTF-8, or Latin-1 from some clients."""
    found = [key.encode("utf-8", "surrogateescape")]
    with suppress(UnicodeEncodeError):
        found += [one for one in [key.encode("latin-1")] if one not in found]
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _redacted(key: bytes) -> str:
    text = key.decode("utf-8", "backslashreplace")
    if len(text) < 16:
        return "****"
    shown = f"{text[:8]}****{text[-4:]}"
    return shown.encode("ascii", "backslashreplace").decode()
