"""The fenced blocks of a Markdown file, and the commands of a shell block."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block with its language, the line of its fence, and its text."""

    language: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"line-{self.line}-{self.language or 'plain'}"


class Command(NamedTuple):
    """A command of a shell block: its words, and True if it runs in the background."""

    words: tuple[str, ...]
    background: bool = False


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a file."""
    text = path.read_text()
    found = [
        Block(match[1], text.count("\n", 0, match.start()) + 1, match[2])
        for match in _FENCE.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), "a fence is open"
    return found


def commands(text: str) -> list[Command]:
    """Return the commands of a shell block, without its comments."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            background = words[-1] == "&"
            found.append(Command(tuple(words[: -1 if background else None]), background))
    return found
