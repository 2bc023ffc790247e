"""Tests of the built site: it builds strictly, and its pages need nothing that is not in it."""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from support.browser import chromium, needs_chromium
from support.servers import serving
from website import grid
from website.build import DOCS, STAGE, Stage, build, navigation, pages, rendered, staged

pytestmark = pytest.mark.slow

# Attributes with addresses that a browser loads by itself, by the tag.
LOADED = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the addresses of a tag."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        # An address of the page itself is not loaded.
        if tag in LOADED and found.get("rel") != "canonical" and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    return build(tmp_path_factory.mktemp("site"))


@cache
def page_of(path: Path) -> Page:
    """Return a page of the site."""
    return Page(path.read_text())


def html_pages(site: Path) -> Iterator[Path]:
    """Yield the pages of the site, without the reports, which are pages of their own."""
    yield from (
        path for path in sorted(site.rglob("*.html")) if path.name in ("index.html", "404.html")
    )


def target_of(site: Path, page: Path, address: str) -> Path:
    """Return the file that an address on a page names."""
    path = unquote(urlsplit(address).path)
    here = posixpath.join("/", page.parent.relative_to(site).as_posix(), "")
    target = site / posixpath.normpath(posixpath.join(here, path)).lstrip("/")
    return target / "index.html" if target.is_dir() else target


def test_every_page_is_built(site: Path) -> None:
    """Each page of the navigation is a page of the site, and its Markdown is there, too."""
    for _, path in pages(navigation()):
        page = Path(path)
        name = page.parent if page.stem in ("README", "index") else page.with_suffix("")
        assert (site / name / "index.html").exists(), path
        assert path.startswith("source/") or (site / path).read_text() == (DOCS / path).read_text()


def test_no_link_is_dead(site: Path) -> None:
    """Each link of each page leads to a file of the site, and to an anchor in it."""
    dead = []
    count = 0
    for page in html_pages(site):
        for address in page_of(page).links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            count += 1
            target = page if not parts.path else target_of(site, page, address)
            anchors = (
                page_of(target).anchors if target.suffix == ".html" and target.exists() else ()
            )
            if not target.exists() or (
                parts.fragment
                and target.suffix == ".html"
                and unquote(parts.fragment) not in anchors
            ):
                dead.append((page.relative_to(site).as_posix(), address))
    assert count > 4000
    assert not dead


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """No page loads a script, a style, a font or a picture of another host, and all are there."""
    for page in html_pages(site):
        for address in page_of(page).loaded:
            assert not urlsplit(address).netloc, (page, address)
            if page.name != "404.html" and not address.startswith("data:"):
                assert target_of(site, page, address).exists(), (page, address)


def test_the_search_finds_the_manual(site: Path) -> None:
    """The index of the search has each page of the manual, and no listing of the sources."""
    text = json.dumps(json.loads((site / "search.json").read_text()))
    assert "GBNF" in text
    assert "source/examples/" not in text


def test_a_dead_link_ends_the_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A link to a page or an anchor that does not exist is an error of the build."""
    stage = tmp_path / STAGE
    Stage(stage).fill()
    page = stage / "start.md"
    page.write_text(f"{page.read_text()}\n[one](nowhere.md), [two](chat.md#nowhere)\n")
    with pytest.raises(subprocess.CalledProcessError):
        rendered(tmp_path)
    # Without colors.
    report = re.sub(r"\x1b\[[\d;]*m", "", "".join(capfd.readouterr()))
    assert "page does not exist" in report
    assert "anchor does not exist" in report


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("docs/chat.md", "chat.md"),
        ("docs/conformance/notes", "conformance/notes/index.md"),
        ("CONTRIBUTING.md", "source/CONTRIBUTING.md"),
        ("examples/tools.py", "source/examples/tools.py.txt"),
        ("examples/deploy", "source/examples/deploy/index.md"),
    ],
)
def test_files_have_places(name: str, expected: str) -> None:
    """Markdown is a page, a folder is a page with its files, and other sources are text."""
    assert staged(name) == expected


def test_the_grid_has_every_check() -> None:
    """The grid has a row for each check of the reports, with the verdict of each server."""
    rows = grid.rows()
    counts = {
        name: len(json.loads((grid.REPORTS / f"{name}.json").read_text())["checks"])
        for name in grid.SERVERS
    }
    reports = {path.stem for path in grid.REPORTS.glob("*.json")} - {"report.schema"}
    assert reports == counts.keys()
    for name, count in counts.items():
        assert sum(name in row.found for row in rows) == count
    assert grid.table().count("<tr data-group") == len(rows)


@needs_chromium
def test_the_grid_has_filters(site: Path, tmp_path: Path) -> None:
    """The filters of the grid hide rows and columns, and the address keeps them."""
    files = Starlette(routes=[Mount("/", StaticFiles(directory=site, html=True))])
    with serving(lambda: files) as address, chromium(tmp_path) as browser:
        browser.get(f"{address}/conformance/grid/")
        total = len(shown(browser))
        assert total == len(grid.rows())
        Select(browser.find_element(By.NAME, "group")).select_by_value("embeddings")
        Select(browser.find_element(By.NAME, "server")).select_by_value("latimer-koboldcpp")
        Select(browser.find_element(By.NAME, "verdict")).select_by_value("unsupported")
        # A report has only the checks that the suite had.
        expected = [
            row.id
            for row in grid.rows()
            if row.group == "embeddings"
            and row.found.get("latimer-koboldcpp", ("",))[0] == "unsupported"
        ]
        assert expected
        assert shown(browser) == expected
        heads = browser.find_elements(By.CSS_SELECTOR, "#grid thead th[data-server]")
        assert [head.text for head in heads if head.is_displayed()] == ["Latimer, koboldcpp"]
        browser.refresh()
        assert shown(browser) == expected
        assert not browser.get_log("browser")  # type: ignore[no-untyped-call]


# The ids of the rows that the grid shows.
SHOWN = """
const rows = [...document.getElementById("grid").tBodies[0].rows];
return rows.filter((row) => !row.hidden).map((row) => row.querySelector("code").textContent);
"""


def shown(browser: Chrome) -> list[str]:
    """Return the ids of the rows that the grid shows."""
    found: list[str] = browser.execute_script(SHOWN)
    return found
