"""Tests that the page on clients names the versions, tests and settings of `make clients`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from clients.installed.python.llm_client import MODELS
from clients.installed.test_agents import CODEX, CONTINUE, OPENCLAW, OPENCODE, PI
from support.documents import blocks

ROOT = Path(__file__).parent.parent.parent
INSTALLED = Path(__file__).parent / "installed"
PAGE = ROOT / "docs" / "clients.md"
PAGES = sorted((ROOT / "docs" / "clients").glob("*.md"))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\|.*`[\w@/-]+` \d", line)
]
PROGRAMS = [row for row in ROWS if len(row) == 5]
PINNED = re.compile(r"^([\w.-]+)==([\w.]+)$", re.MULTILINE)
VERSION = re.compile(r"`([\w@/.-]+)` (\d[\w.]*)")
SETTINGS = {
    "codex": CODEX, "opencode": OPENCODE, "pi": PI, "continue": CONTINUE, "openclaw": OPENCLAW,
    "llm": MODELS,
}  # fmt: skip
# Dependencies of the clients' programs that are not clients.
TOOLS = {"pytest", "pytest-asyncio", "zod", "@langchain/core", "node"}


def installed() -> set[tuple[str, str]]:
    """Return the names and versions that the lists pin."""
    found = set()
    for path in sorted((INSTALLED / "python").glob("*.in")):
        wanted = {line.split("[")[0] for line in path.read_text().split()}
        text = path.with_suffix(".txt").read_text()
        found |= {(name, version) for name, version in PINNED.findall(text) if name in wanted}
    for path in sorted(INSTALLED.glob("*/package.json")):
        found |= set(json.loads(path.read_text())["dependencies"].items())
    return {one for one in found if one[0] not in TOOLS}


def test_versions() -> None:
    """The tables have exactly the versions that are installed."""
    assert {pair for row in ROWS for pair in VERSION.findall(row[1])} == installed()


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row[0])
def test_a_row(row: list[str]) -> None:
    """The program of a row exists, and has a test for each word that the row names."""
    link = re.search(r"\]\((.*)\)", row[4])
    assert link
    text = (PAGE.parent / link[1]).read_text()
    if row[0] == "LangChain's standard tests":
        return
    for word in row[3].split(", "):
        assert re.search(rf"def test_{word.replace(' ', '_')}|test\([\"`]{word}:", text), word


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings: str) -> None:
    """The settings in the pages of the clients are those of the tests."""
    local = re.sub("@URL|{url}", "http://127.0.0.1:8000/v1", settings.strip("\n"))
    assert local in [block.text.strip() for page in PAGES for block in blocks(page)]


def test_every_page_is_listed() -> None:
    """The page on clients links to the page of each client, once in its list."""
    listed = re.findall(r"\]\(clients/([\w-]+)\.md\)", PAGE.read_text().split("## Tried in")[0])
    assert sorted(listed) == [page.stem for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path) -> None:
    """A page begins with a setting, names the address of the server, and leads to what is tried."""
    text = page.read_text()
    first = blocks(page)[0]
    assert text[: text.index("```")].count("\n") == 4, "text before the first block"
    assert first.language in ("python", "js", "json", "toml", "yaml", "sh")
    assert "http://127.0.0.1:8000" in text
    assert "(../clients.md#" in text
