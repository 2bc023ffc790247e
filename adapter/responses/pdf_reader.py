"""Read the text of a PDF file, in a process of its own that can be killed (`sandbox`).

A PDF file may be made to take a reader hours or gigabytes. This file is run as a script. It reads a
PDF file from standard input, writes JSON to standard output, and imports nothing from Latimer.
"""

from __future__ import annotations

import io
import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any

# Flags of annotations that no reader shows (`Hidden`, `NoView`), and of a password's field.
_UNSEEN = 1 << 1 | 1 << 5
_PASSWORD = 1 << 13
# The number of parents that a form field may have.
_LEVELS = 32


def main() -> None:
    """Read the PDF file on standard input, and write its text or the reason that it has none.

    The script's arguments are numbers of pages and characters.
    """
    pages, characters = map(int, sys.argv[1:])
    sys.stdout.write(json.dumps(read(sys.stdin.buffer.read(), pages, characters)))


def read(data: bytes, most_pages: int, most_characters: int) -> dict[str, Any]:
    """Return the `text` of a PDF file, or an `error`: a word for the reason.

    The errors are `broken`, `encrypted`, `empty`, `heavy`, `long`, and `pages` with their `count`.
    """
    from pypdf import PdfReader, filters
    from pypdf.errors import LimitReachedError

    decompress = filters.decompress
    damaged = False

    def checked(data: bytes) -> bytes:
        nonlocal damaged
        found = decompress(data)
        damaged = damaged or not _is_whole(data)
        return found

    # The library reads what is left of a damaged stream, and only logs that.
    filters.decompress = checked
    try:
        found = _read(PdfReader(io.BytesIO(data)), most_pages, most_characters)
    except (LimitReachedError, MemoryError):
        return {"error": "heavy"}
    except Exception:
        # The library does not document its exceptions for broken files.
        return {"error": "broken"}
    finally:
        filters.decompress = decompress
    return {"error": "broken"} if damaged else found


def _is_whole(compressed: bytes) -> bool:
    """Return True if the data of a Flate stream has its end; the checksum after it may be wrong."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        inflater.decompress(compressed[2:])
    except zlib.error:
        return False
    return inflater.eof or not compressed.strip()


def _read(reader: Any, most_pages: int, most_characters: int) -> dict[str, Any]:
    if reader.is_encrypted and not _opens(reader):
        return {"error": "encrypted"}
    count = len(reader.pages)
    if count > most_pages:
        return {"error": "pages", "count": count}
    texts, size = [], 0
    for number, page in enumerate(reader.pages, 1):
        text = _clean("\n".join((page.extract_text(), *_fields(page))))
        size += len(text)
        if size > most_characters:
            return {"error": "long"}
        texts.append(text or f"[page {number} has no text]")
    return {"text": "\n\n".join(texts)} if size else {"error": "empty"}


def _fields(page: Any) -> Iterator[str]:
    """Return the names and values of the form fields that a reader shows on a page."""
    for one in page.annotations or ():
        widget = one.get_object()
        if not isinstance(widget, dict) or _inherited(widget, "/Subtype") != "/Widget":
            continue
        value = _value(widget)
        if value and not int(_inherited(widget, "/F") or 0) & _UNSEEN:
            name = _inherited(widget, "/TU") or _inherited(widget, "/T") or "field"
            yield f"{name}: {value}"


def _value(widget: Any) -> str:
    """Return the value of a form field, or of a button the name of its state unless it is off."""
    kind = _inherited(widget, "/FT")
    if kind == "/Btn":
        state = str(_inherited(widget, "/AS") or "/Off")
        return "" if state == "/Off" else state.removeprefix("/")
    value = _inherited(widget, "/V")
    if kind == "/Tx" and int(_inherited(widget, "/Ff") or 0) & _PASSWORD:
        return ""
    # The options of a choice are texts, or pairs of a value and the text that a reader shows.
    pairs = [one.get_object() for one in _inherited(widget, "/Opt") or ()]
    shown = {
        str(pair[0]): str(pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) == 2
    }
    values = [one.get_object() for one in value] if isinstance(value, list) else [value]
    texts = [str(one) for one in values if isinstance(one, str | int | float)]
    return ", ".join(shown.get(text, text) for text in texts)


def _inherited(field: Any, key: str) -> Any:
    """Return the value of a form field for a key, which may be that of a parent."""
    for _ in range(_LEVELS):
        if key in field:
            return field[key]
        if "/Parent" not in field:
            break
        field = field["/Parent"]
    return None


def _opens(reader: Any) -> bool:
    """Return True for an encrypted file that everybody may read, with an empty password."""
    try:
        return bool(reader.decrypt(""))
    except MemoryError:
        raise
    except Exception:
        return False


def _clean(text: str) -> str:
    """Return the text of a page without null characters and lone surrogates."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "").strip()


if __name__ == "__main__":
    main()
