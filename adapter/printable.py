"""Text of an engine or a request, made harmless for a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """The text with what would steer a terminal spelled out; characters of `keep` stay."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
