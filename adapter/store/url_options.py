"""Hide the values of a URL's options in the messages of PostgreSQL and its driver (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sqlalchemy import URL

# A value such as `-c name=value` is shown in parts.
_BETWEEN = re.compile(r"[\s=,]+")
# Shorter parts are hidden between quotes only.
_LONG = 3
# A message must name the host, and so does the description of a place.
_SHOWN = ("host",)


def without_values(message: str, url: URL) -> str:
    """Return a message without the values of the options after `?`, such as a password."""
    options = url.normalized_query
    values = [one for name in options if name not in _SHOWN for one in options[name] if one]
    parts = {part for value in values for part in _BETWEEN.split(value)}
    quoted = rf"(?<=[\"'])(?:{_any([*values, *parts])})(?=[\"'])"
    bare = rf"(?<!\w)(?:{_any(part for part in parts if len(part) >= _LONG)})(?!\w)"
    return re.sub(f"{quoted}|{bare}", "…", message, flags=re.IGNORECASE) if values else message


def _any(texts: Iterable[str]) -> str:
    """Return a pattern for any of these texts, the longest first; it never matches nothing."""
    found = sorted(filter(None, texts), key=len, reverse=True)
    return "|".join(map(re.escape, found)) or "(?!)"
