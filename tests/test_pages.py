"""Tests of the documents' text: links lead somewhere, and sentences are short."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.documents import anchors, links, sentences, words

ROOT = Path(__file__).parent.parent
LONGEST = 30
# Reports are generated; their sentences are the promises of checks and the servers' own words.
REPORTS = {path.with_suffix(".md") for path in (ROOT / "docs" / "conformance").glob("*.json")}
PAGES = [
    path
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if path not in REPORTS
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file that exists, and a heading in it."""
    for link in links(path):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path: Path) -> None:
    """No sentence has more than 30 words; the cells of a table are counted one by one."""
    assert not [one for one in sentences(path) if words(one) > LONGEST]


def test_long_sentences_are_found(tmp_path: Path) -> None:
    """Sentences are found in paragraphs, list items and cells, and code is not counted."""
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\nOne two.\nThree [four](a.md) five:\n\n```sh\nnot this one\n```\n\n"
        "- six (`x.y z`).\n- seven\n\n| eight | nine \\| ten |\n|---|--:|\n"
    )
    assert [words(one) for one in sentences(page) if words(one)] == [1, 2, 3, 3, 1, 1, 2]
