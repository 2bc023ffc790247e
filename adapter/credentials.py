"""API keys as a user writes them: found unusable at the start, and never printed."""

from __future__ import annotations

import unicodedata
from pathlib import Path


class UnusableKey(ValueError):
    """A key that no request could match, or that would break a header; the text leaves it out."""


def check_key(key: str, setting: str) -> None:
    """Check that a key can be sent in an HTTP header.

    Args:
        setting: where the key is from, for the message.

    Raises:
        UnusableKey: it is empty, not UTF-8, has control characters or line ends, or blanks around.
    """
    if not key:
        reason = "is empty"
    elif any(unicodedata.category(one) == "Cs" for one in key):
        reason = "is not valid UTF-8"
    elif any(unicodedata.category(one) == "Cc" for one in key):
        reason = "has a line end or another control character"
    elif key != key.strip(" "):
        reason = "begins or ends with a blank"
    else:
        return
    raise UnusableKey(f"{setting}: a key {reason}. Keys go into an HTTP header as they are.")


def keys_of(file: Path) -> list[str]:
    """Return the keys in a file, one a line; blanks around them and empty lines do not count.

    Raises:
        UnusableKey: it is not UTF-8 text, or has no key.
        OSError: it cannot be read.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnusableKey(f"api_key_file: {file} is not UTF-8 text.") from None
    lines = (line.removesuffix("\r").strip(" \t") for line in text.split("\n"))
    found = [line for line in lines if line]
    if not found:
        # An open server is not what was asked for.
        raise UnusableKey(f"api_key_file: {file} has no key.")
    return found
