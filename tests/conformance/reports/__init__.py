"""Reports of a run: JSON, Markdown, HTML, JUnit XML, and a badge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from . import badge, html, json, junit, markdown
from .run import Run

WRITERS: Mapping[str, Callable[[Run], str]] = {
    ".json": json.render,
    ".md": markdown.render,
    ".html": html.render,
    ".xml": junit.render,
    ".svg": badge.render,
}


def write(run: Run, path: Path) -> None:
    """Write a report in the format that the file's suffix names."""
    path.write_text(WRITERS[path.suffix](run), encoding="utf-8")
