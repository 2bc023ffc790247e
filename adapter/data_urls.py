"""Data URLs (RFC 2397) and base64 in the fields of a request."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

_CHARSET = re.compile(r';\s*charset="?([^";]+)')


class DataUrl(NamedTuple):
    """The parts of a data URL.

    Args:
        kind: its MIME type in lower case, without parameters; empty if it names none.
        charset: the charset that it names in lower case, or an empty text.
        is_base64: True if its data is base64, False if it is percent-encoded.
        start: the index at which its data begins.
    """

    kind: str
    charset: str
    is_base64: bool
    start: int


def parse(text: str) -> DataUrl | None:
    """Return the parts of a data URL, or None for another text."""
    # Schemes, MIME types and the names of parameters have no case.
    comma = text.find(",") if is_data_url(text) else -1
    if comma < 0:
        return None
    head = text[len("data:") : comma].lower()
    charset = _CHARSET.search(head)
    return DataUrl(
        kind=head.partition(";")[0],
        charset="" if charset is None else charset[1],
        is_base64=head.endswith(";base64"),
        start=comma + 1,
    )


def is_data_url(text: str) -> bool:
    """Return True if the scheme of a URL is `data`."""
    return text[: len("data:")].lower() == "data:"


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


def beginning(text: str, size: int) -> bytes:
    """Return the first bytes of the data of a data URL or of base64, or none if they are wrong."""
    url = parse(text)
    start = 0 if url is None else url.start
    if url is not None and not url.is_base64:
        return unquote_to_bytes(text[start : start + 3 * size])[:size]
    # Twice as many characters leave room for line breaks; four encode three bytes.
    encoded = "".join(text[start : start + 2 * size].split())
    try:
        return decode_base64(encoded[: len(encoded) // 4 * 4])[:size]
    except ValueError:
        return b""


def decode_base64(text: str) -> bytes:
    """Return the data of base64; line breaks and spaces in it are ignored.

    Raises:
        ValueError: the text is not base64.
    """
    return base64.b64decode("".join(text.split()), validate=True)
