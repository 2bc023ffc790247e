"""API keys: read from settings, check in requests, and name the owner of a key (contract 1.2)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import Header, InvalidRequest
from .limits.leases import Grant

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection


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
        raise UnusableKey(
            f"{setting}: a key is empty. Set the variable that it comes from, or omit {setting} to "
            "use no key."
        )
    if any(unicodedata.category(one) == "Cs" for one in key):
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
    return _owner(_digest(key.encode("utf-8", "surrogateescape")))


def keys_of(file: Path) -> list[str]:
    """Return the keys in a file, one per line; surrounding whitespace and empty lines are ignored.

    Raises:
        UnusableKey: the file is not UTF-8 text, has a comment, or has no key.
        OSError: the file cannot be read.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnusableKey(f"api_key_file: {file} is not UTF-8 text.") from None
    lines = (line.removesuffix("\r").strip(" \t") for line in text.split("\n"))
    found = [line for line in lines if line]
    if any(line.startswith("#") for line in found):
        # A comment such as `# team a` would be a key that others can guess.
        raise UnusableKey(
            f"api_key_file: a line of {file} starts with #. It has keys only; remove comments."
        )
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


# The accepted headers that are kept; a key has few spellings.
_MOST_SEEN = 4_096


class Keys:
    """The API keys that requests may use.

    Args:
        keys: keys without a table.
        grants: the permissions of keys with one, by their SHA-256 digests.

    Raises:
        UnusableKey: a key cannot be sent in a header.

    Attributes:
        plain: the digests of the keys without a table.
        needed: True if requests need a key: there is one.
        are_several: True if there are several.
        grants: the permissions by the owner of the key.
    """

    def __init__(self, keys: Iterable[str], grants: Mapping[bytes, Grant] | None = None) -> None:
        digests = []
        for key in keys:
            # An empty key would be that of requests without one.
            check_key(key, "api_keys")
            digests.append(_digest(key.encode()))
        self.plain = frozenset(digests)
        # Keys are looked up by their digests. So the time that this takes says nothing about a key.
        self._owners = {digest: _owner(digest) for digest in (*digests, *(grants or ()))}
        # The owners by the headers that were accepted, which need no digest again.
        self._seen: dict[bytes, str] = {}
        self.grants = {_owner(digest): grant for digest, grant in (grants or {}).items()}
        self.needed = bool(self._owners)
        self.are_several = len(self._owners) > 1

    def replace(self, others: Keys) -> None:
        """Accept the keys of `others` instead, from the next request on."""
        self._owners, self.grants, self.needed = others._owners, others.grants, others.needed
        self._seen, self.plain = others._seen, others.plain
        self.are_several = others.are_several

    def find(self, headers: Sequence[Header], named: Mapping[bytes, bytes]) -> str | None:
        """Return the owner of a request's key, as a digest; None if it has no known key.

        Clients of Anthropic's API send a key in `x-api-key`, some also another one as OpenAI's do.

        Args:
            named: the headers by their names.
        """
        owner = self._seen.get(named.get(b"authorization", b""))
        if owner is not None and len(named) == len(headers) and b"x-api-key" not in named:
            return owner
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            elif name == b"x-api-key":
                key = value
            else:
                continue
            key = key.strip(b" \t")
            owner = self._owners.get(sha256(key).digest())
            if owner is None and not key.isascii():
                # Some clients send Latin-1.
                key = key.decode("latin-1").encode()
                owner = self._owners.get(sha256(key).digest())
            if owner is not None:
                if name == b"authorization":
                    if len(self._seen) >= _MOST_SEEN:
                        self._seen.clear()
                    self._seen[value] = owner
                return owner
        return None


def require_key(request: HTTPConnection, hint: str = "") -> str:
    """Return the owner of a request's key, as a digest; empty if no key is needed.

    Args:
        hint: the end of the message of the error.

    Raises:
        InvalidRequest: OpenAI's 401, for a missing or unknown key.
    """
    key: str | None = request.state.key_digest
    if key is not None:
        return key
    sent = _key_of(request)
    if sent is None:
        raise InvalidRequest(_MISSING + hint, status=401)
    raise InvalidRequest(
        f"Incorrect API key provided: {_redacted(sent)}. Ask the operator of this server for a "
        f"valid key.{hint}",
        code="invalid_api_key",
        status=401,
    )


def _key_of(request: HTTPConnection) -> bytes | None:
    value = request.headers.get("authorization", "").encode("latin-1")
    scheme, _, key = value.partition(b" ")
    key = key.strip(b" \t")
    if scheme.lower() == b"bearer" and key:
        return key
    return request.headers.get("x-api-key", "").encode("latin-1").strip(b" \t") or None


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _owner(digest: bytes) -> str:
    return digest.hex()[:32]


def _redacted(key: bytes) -> str:
    text = key.decode("utf-8", "backslashreplace")
    if len(text) < 16:
        return "****"
    shown = f"{text[:8]}****{text[-4:]}"
    return shown.encode("ascii", "backslashreplace").decode()
