"""Data URLs (RFC 2397) and base64 in the fields of a request."""

from __future__ import annotations

import base64
from typing import NamedTuple
from urllib.parse import unquote_to_bytes


class DataUrl(NamedTuple):
    """The parts of a data URL.

    Args:
        kind: its MIME type without parameters; empty if it names none.
        is_base64: True if its data is base64, False if it is percent-encoded.
        start: the index at which its data begins.
    """

    kind: str
    is_base64: bool
    start: int


def parse(text: str) -> DataUrl | None:
    """Return the parts of a data URL, or None for another text."""
    comma = text.find(",") if text.startswith("data:") else -1
    if comma < 0:
        return None
    head = text[len("data:") : comma]
    return DataUrl(head.partition(";")[0], head.endswith(";base64"), comma + 1)


def decode(text: str) -> bytes:
    """Return the data of a data URL, or of base64.

    Raises:
        ValueError: the text is neither.
    """
    url = parse(text)
    if url is None:
        return decode_base64(text)
    data = text[url.start :]
    return decode_base64(data) if url.is_base64 else unquote_to_bytes(data)


def decode_base64(text: str) -> bytes:
    """Return the data of base64; line breaks and spaces in it are ignored.

    Raises:
        ValueError: the text is not base64.
    """
    return base64.b64decode("".join(text.split()), validate=True)
