"""Tests that every code block of the README runs and does what the README says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.documents import Block, blocks
from support.reader import Reader

README = Path(__file__).parent.parent / "README.md"
STRANGE = [
    Block("", 1, "text\n"),
    Block("toml", 1, "port = 8080\n"),
    Block("python", 1, "print('nothing is served here')\n"),
    Block("sh", 1, "latimer dance\n"),
    Block("sh", 1, "make coffee\n"),
    Block("sh", 1, "latimer check http://127.0.0.1:8080 &\n"),
]


@pytest.fixture
def reader(tmp_path: Path, llama_server_url: str, koboldcpp_replay: tuple[str, Any]) -> Reader:
    """Return a reader with a model, a llama-server and a koboldcpp."""
    engines = {
        "http://127.0.0.1:8080": llama_server_url,
        "http://127.0.0.1:5001": koboldcpp_replay[0],
    }
    return Reader(tmp_path, engines)


@pytest.mark.parametrize("block", blocks(README), ids=str)
def test_a_block_runs_as_it_stands(block: Block, reader: Reader) -> None:
    """A code block runs as printed and has the result that the README promises."""
    reader.run(block)


@pytest.mark.parametrize("block", STRANGE, ids=lambda block: block.text.strip())
def test_an_unknown_block_fails(block: Block, reader: Reader) -> None:
    """A code block of an unknown kind, or with a misspelled command, fails."""
    with pytest.raises(AssertionError):
        reader.run(block)
