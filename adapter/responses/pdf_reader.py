"""Read the text of a PDF file, in a process of its own that can be killed (`sandbox`).

A PDF file may be made to take a reader hours or gigabytes. This file is run as a script. It reads a
PDF file from standard input, writes JSON to standard output, and imports nothing from Latimer.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any


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
    from pypdf import PdfReader
    from pypdf.errors import LimitReachedError

    try:
        return _read(PdfReader(io.BytesIO(data)), most_pages, most_characters)
    except (LimitReachedError, MemoryError):
        return {"error": "heavy"}
    except Exception:
        # The library does not document its exceptions for broken files.
        return {"error": "broken"}


def _read(reader: Any, most_pages: int, most_characters: int) -> dict[str, Any]:
    if reader.is_encrypted and not _opens(reader):
        return {"error": "encrypted"}
    count = len(reader.pages)
    if count > most_pages:
        return {"error": "pages", "count": count}
    texts, size = [], 0
    for page in reader.pages:
        text = _clean(page.extract_text())
        size += len(text)
        if size > most_characters:
            return {"error": "long"}
        if text:
            texts.append(text)
    return {"text": "\n\n".join(texts)} if texts else {"error": "empty"}


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
