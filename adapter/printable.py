"""Make text from an engine or a request safe to print on a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Escape the unprintable characters of a text, except those in `keep`."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
