"""Reasoning that a client keeps: sealed, so that only this server can read and change it.

A client that stores nothing here sends the reasoning of earlier turns back as `encrypted_content`.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# The beginning of every sealed text, with the version of its format.
PREFIX = "latimer1."
_NONCE = 12


class Seal:
    """AES-256-GCM with a key of the server; the owner of a text is a part of its seal.

    Args:
        secret: the secret that the key is made from; by default a random one, so that texts can be
            opened until the end of the process.

    Raises:
        ValueError: the secret is empty.
    """

    def __init__(self, secret: str | None = None) -> None:
        if secret == "":
            raise ValueError("reasoning_key: expected a secret, but got an empty text")
        given = secrets.token_bytes(32) if secret is None else secret.encode()
        self._key = hashlib.blake2b(given, digest_size=32, person=b"latimer seal").digest()

    async def load(self) -> None:
        """Import the library before the first text, in a thread: that takes 20 ms."""
        if "_cipher" not in vars(self):
            await asyncio.to_thread(getattr, self, "_cipher")

    def seal(self, text: str, owner: str) -> str:
        """Return a sealed text.

        Args:
            owner: the digest of the API key; empty if the server has no keys.
        """
        nonce = secrets.token_bytes(_NONCE)
        sealed = self._cipher.encrypt(nonce, text.encode(), _of(owner))
        return PREFIX + urlsafe_b64encode(nonce + sealed).decode()

    def unseal(self, sealed: str, owner: str) -> str | None:
        """Return the text, or None if another server, key or owner sealed it."""
        if not sealed.startswith(PREFIX):
            return None
        from cryptography.exceptions import InvalidTag

        try:
            data = urlsafe_b64decode(sealed[len(PREFIX) :])
            return self._cipher.decrypt(data[:_NONCE], data[_NONCE:], _of(owner)).decode()
        except (ValueError, InvalidTag):
            return None

    @cached_property
    def _cipher(self) -> AESGCM:
        # The import takes 7 MB, so it waits for the first text.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)


def _of(owner: str) -> bytes:
    return PREFIX.encode() + owner.encode()
