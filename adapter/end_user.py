"""The end user that a request names, and the hash that represents that user in logs."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

# A new salt for each process, so that a hash cannot be compared with those of known names.
_SALT = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)


def named(body: Mapping[str, Any]) -> str:
    """Return the end user that a request's body names, or an empty text."""
    # OpenAI replaces `user` by `safety_identifier`; a request can have both.
    name = body.get("safety_identifier") or body.get("user")
    return name if name and isinstance(name, str) else ""


def in_log(name: str) -> str:
    """Return the hash of a name: 12 hex digits, the same ones until the process ends."""
    data = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, key=_SALT, digest_size=6).hexdigest()
