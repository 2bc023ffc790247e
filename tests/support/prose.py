"""The links, headings and sentences of a Markdown file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_CODE = re.compile(r"^```.*?^```$|<!--.*?-->|^---$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
# The beginnings of a paragraph: an empty line, a list item or a heading.
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )")
_SENTENCE = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=\S)")


def links(path: Path) -> list[str]:
    """Return the targets of a file's links and pictures."""
    return _LINK.findall(_text(path))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a file's headings, as GitHub makes them."""
    titles = [_LINK.sub("]", title).lower() for title in _HEADING.findall(_text(path))]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a file: those of paragraphs, list items and cells of tables."""
    for paragraph in _PARAGRAPH.split(_LINK.sub("]", _text(path))):
        lines = paragraph.strip().splitlines()
        rows = [line for line in lines if line.startswith("|")]
        cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
        for text in (" ".join(line for line in lines if line not in rows), *cells):
            yield from _SENTENCE.split(text)


def words(sentence: str) -> int:
    """Return the number of words of a sentence; signs alone do not count."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def _text(path: Path) -> str:
    return _CODE.sub("", path.read_text())
