"""The blocks of the clients' pages run in the environments of the clients, as they stand."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from clients.installed.conftest import Packages
from support.documents import Block, blocks, prints
from support.environments import ROOT, Environment

pytestmark = pytest.mark.timeout(1200)
PAGES = ROOT / "docs" / "clients"
HERE = "http://127.0.0.1:8000"
# The environments of the pages with programs in Python. The others are settings of programs, which
# `test_agents.py` and the programs in `python` use. Anthropic's SDK is in Latimer's environment.
PYTHON: Mapping[str, str] = {
    "openai": "openai", "agents-sdk": "openai", "inspect": "openai", "langchain": "frameworks",
    "llama-index": "openai_2", "litellm": "frameworks", "pydantic-ai": "openai",
    "instructor": "openai_2", "dspy": "frameworks", "smolagents": "frameworks",
}  # fmt: skip


def programs(language: str) -> list[object]:
    """Return the blocks of a language with the names of their pages, as parameters."""
    return [
        pytest.param(page.stem, block, id=f"{page.stem}-{block.line}")
        for page in sorted(PAGES.glob("*.md"))
        for block in blocks(page)
        if block.language == language and (language == "js" or page.stem in PYTHON)
    ]


def check(words: list[str], block: Block, folder: Path, variables: Mapping[str, str]) -> None:
    """Run a program, which prints what its page shows."""
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert prints(done.stdout, block.output), done.stdout


@pytest.fixture
def local(urls: str) -> Callable[[Block], str]:
    """Return a function that returns the text of a block with the address of a Latimer."""
    address = urls.split()[0].partition("=")[2]
    return lambda block: block.text.replace(HERE, address)


@pytest.mark.parametrize(("page", "block"), programs("python"))
def test_python(
    page: str,
    block: Block,
    local: Callable[[Block], str],
    python_of: Callable[[str], Environment],
    tmp_path: Path,
) -> None:
    """A program in Python prints what its page shows."""
    made = python_of(PYTHON[page])
    (tmp_path / "block.py").write_text(local(block))
    check(["python", str(tmp_path / "block.py")], block, made.work, made.variables())


@pytest.mark.parametrize(("page", "block"), programs("js"))
def test_node(
    page: str, block: Block, local: Callable[[Block], str], node_of: Callable[[str], Packages]
) -> None:
    """A program in JavaScript prints what its page shows."""
    made = node_of("node")
    # Imports are found from the file's own folder upwards.
    path = made.folder / f"page-{page}-{block.line}.mjs"
    path.write_text(local(block))
    check(["node", path.name], block, made.folder, made.variables(os.environ))
