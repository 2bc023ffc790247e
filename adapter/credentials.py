"""Check API keys from settings without printing them, and name the owner of a key."""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path


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
