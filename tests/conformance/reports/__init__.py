"""Reports of a run: JSON, Markdown, HTML, JUnit XML, SARIF, and a badge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from . import code_scanning, document, formats, html
from .run import Run

WRITERS: Mapping[str, Callable[[Run], str]] = {
    ".json": document.render_json,
    ".md": formats.render_markdown,
    ".html": html.render,
    ".xml": formats.render_junit,
    ".sarif": code_scanning.render_sarif,
    ".svg": formats.render_badge,
}


def write(run: Run, path: Path) -> None:
    """Write a report in the format that the file's suffix names."""
    path.write_text(WRITERS[path.suffix](run), encoding="utf-8")
