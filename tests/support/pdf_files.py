"""Small PDF files, written byte by byte."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

_HEAD = b"%PDF-1.4\n"
_FONT = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
_PAGE = (
    b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Resources<</Font<</F1 3 0 R>>>>"
    b"/Contents %d 0 R/Annots[%s]>>"
)


def drawing(text: str) -> bytes:
    """Return the operators that draw a text; nothing for an empty text."""
    return f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode() if text else b""


def pdf(
    *pages: str | bytes, fields: bytes = b"", damage: Callable[[bytes], bytes] = bytes
) -> bytes:
    """Return a PDF file with a page for each text, or for the operators of a page.

    Args:
        fields: the form fields of the last page, as PDF writes them.
        damage: changes the compressed operators of the second page.
    """
    first = 4
    kids = b" ".join(b"%d 0 R" % (first + 2 * index) for index in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
        _FONT,
    ]
    for index, page in enumerate(pages):
        content = zlib.compress(drawing(page) if isinstance(page, str) else page, 9)
        if index == 1:
            content = damage(content)
        is_last = index == len(pages) - 1
        objects.append(_PAGE % (first + 2 * index + 1, fields if is_last else b""))
        head = b"<</Length %d/Filter/FlateDecode>>" % len(content)
        objects.append(head + b"stream\n" + content + b"\nendstream")
    return _file(objects)


def _file(objects: list[bytes]) -> bytes:
    data = bytearray(_HEAD)
    table = b"0000000000 65535 f \n"
    for number, one in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    count = len(objects) + 1
    end = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (count, len(data))
    return bytes(data) + b"xref\n0 %d\n" % count + table + end


def pdf_url(data: bytes) -> str:
    """Return a PDF file as a data URL."""
    return f"data:application/pdf;base64,{base64.b64encode(data).decode()}"
