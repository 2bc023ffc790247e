"""Tests of the pages that are written from the program, and of the navigation."""

from __future__ import annotations

import os

import pytest
from website.build import DOCS, navigation, pages
from website.reference import GENERATED, title_of


@pytest.mark.parametrize("name", GENERATED)
def test_a_page_is_current(name: str) -> None:
    """The committed page is what the program says now; LATIMER_SNAPSHOT=1 writes it again."""
    path = DOCS / name
    if os.environ.get("LATIMER_SNAPSHOT"):
        path.write_text(GENERATED[name]())
    assert path.read_text() == GENERATED[name]()


def test_every_page_is_in_the_navigation() -> None:
    """The navigation of the site has each page of docs/ once, and no page that does not exist."""
    listed = [path for _, path in pages(navigation()) if not path.startswith("source/")]
    assert sorted(listed) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )


def test_titles_differ() -> None:
    """No two pages have the same title, which search results and llms.txt show."""
    titles = [title_of(DOCS / path) for _, path in pages(navigation()) if "source/" not in path]
    assert len(titles) == len(set(titles))
