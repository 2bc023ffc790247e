"""Build the site of the documentation with Zensical, strictly.

    python tests/website/build.py

The pages stay plain Markdown that a code host shows. Their links may lead to any file of the
repository, and a site has only its own files. So the site is built from a copy of docs/ that also
has each of these files, below `source/`: Markdown as a page, a folder as a page with its files, and
any other file as text. The grid of the conformance reports becomes a table with filters.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parent.parent))

from website.grid import table

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
CONFIG = "zensical.toml"
# The paths in it.
STAGE, SITE = Path("build", "docs"), Path("build", "site")
# Where the site has files of the repository outside of docs/.
OUTSIDE = "source/"
GRID_MARK = "<!-- grid -->"

Nav: TypeAlias = list[Any]

_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
# Pages that are not for readers of the manual are not found by the search.
_UNLISTED = "---\nsearch:\n  exclude: true\n---\n\n"
_ASSETS = Path(__file__).parent / "assets"


class Stage:
    """The copy of the documentation from which the site is built.

    Paths are those of the repository, with `/`; the copy has its own.

    Args:
        folder: the folder of the copy, which is emptied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[str] = []
        self._known: set[str] = set()

    def fill(self) -> None:
        """Copy docs/, and each file of the repository that its pages link to."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in sorted(DOCS.rglob("*")):
            if path.is_file():
                self._add(path.relative_to(ROOT).as_posix())
        for _, page in pages(navigation()):
            if page.startswith(OUTSIDE):
                self._add(page.removeprefix(OUTSIDE))
        while self._waiting:
            self._write(self._waiting.pop())
        shutil.copytree(_ASSETS, self._folder, dirs_exist_ok=True)

    def _add(self, name: str) -> str:
        """Note a file or a folder of the repository, and return its path in the copy."""
        if name not in self._known:
            self._known.add(name)
            self._waiting.append(name)
        return staged(name)

    def _write(self, name: str) -> None:
        source, target = ROOT / name, self._folder / staged(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.write_text(_UNLISTED + self._linked(_listing(name), f"{name}/README.md"))
        elif source.suffix == ".md":
            target.write_text(_piped(self._linked(source.read_text(), name)))
        else:
            shutil.copy(source, target)

    def _linked(self, text: str, name: str) -> str:
        """Return the text of a page with links that work in the copy."""
        here = posixpath.dirname(staged(name))

        def moved(match: re.Match[str]) -> str:
            link, hash_, anchor = match[1].partition("#")
            if not link or "://" in link or link.startswith("mailto:"):
                return match[0]
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(link)))
            if not (ROOT / target).exists():
                # The strict build reports it.
                return match[0]
            found = posixpath.relpath(self._add(target), here)
            return f"]({found}{hash_}{anchor})"

        parts = _FENCE.split(text)
        # The fences are the odd parts.
        parts[::2] = [_LINK.sub(moved, part) for part in parts[::2]]
        return "".join(parts)


def _piped(text: str) -> str:
    """Return a page with bars in the code of tables as Zensical reads them: without a backslash."""
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), text)


def staged(name: str) -> str:
    """Return the path in the copy of a file or a folder of the repository."""
    inside = name.removeprefix("docs/") if name.startswith("docs/") else OUTSIDE + name
    if (ROOT / name).is_dir():
        return f"{inside}/index.md"
    is_shown = name.startswith("docs/") or name.endswith(".md")
    return inside if is_shown else f"{inside}.txt"


def _listing(name: str) -> str:
    """Return the page of a folder: the files that Git has, without hidden ones."""
    done = subprocess.run(
        ["git", "ls-files", "--", name], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # Zensical does not copy hidden files.
    paths = [path for path in done.stdout.splitlines() if "/." not in path]
    rows = [posixpath.relpath(path, name) for path in paths]
    return "\n".join([f"# {name}", "", *(f"- [{row}]({row})" for row in rows), ""])


def navigation() -> Nav:
    """Return the navigation of the site."""
    config = tomllib.loads((ROOT / CONFIG).read_text())
    found: Nav = config["project"]["nav"]
    return found


def pages(entries: Nav) -> Iterator[tuple[str, str]]:
    """Yield the title and the path of each page; the title is empty if the page has its own."""
    for entry in entries:
        if isinstance(entry, str):
            yield "", entry
            continue
        for title, found in entry.items():
            if isinstance(found, str):
                yield title, found
            else:
                yield from pages(found)


def build(folder: Path = ROOT) -> Path:
    """Build the site, and return its folder.

    Args:
        folder: the folder in which `STAGE` and `SITE` are.

    Raises:
        subprocess.CalledProcessError: a page has a link that leads nowhere.
    """
    Stage(folder / STAGE).fill()
    return rendered(folder)


def rendered(folder: Path) -> Path:
    """Run Zensical on a filled stage, and return the folder of the site."""
    if folder != ROOT:
        shutil.copy(ROOT / CONFIG, folder)
    site = folder / SITE
    shutil.rmtree(site, ignore_errors=True)
    zensical = Path(sys.executable).parent / "zensical"
    subprocess.run([str(zensical), "build", "--strict", "--clean"], cwd=folder, check=True)
    # Not a part of the Markdown, so that the search does not have its rows.
    grid = site / "conformance" / "grid" / "index.html"
    grid.write_text(grid.read_text().replace(GRID_MARK, table()))
    # `llms.txt` has the addresses of these.
    for path in DOCS.rglob("*.md"):
        shutil.copy(path, site / path.relative_to(DOCS))
    return site


def main() -> int:
    """Build the site, and print where it is."""
    try:
        site = build()
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(f"The site is in {site.relative_to(ROOT)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
