"""The fenced blocks of a Markdown file, and the commands of a shell block."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"\n\n(?: {4}|\t).*")
_VARIABLE = re.compile(r"(\w+)=(.*)", re.DOTALL)


class Block(NamedTuple):
    """A fenced block with its language, the line of its fence, and its text."""

    language: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"line-{self.line}-{self.language or 'plain'}"


class Command(NamedTuple):
    """A command of a shell block.

    Args:
        words: its words, with `|` between the commands of a pipe.
        background: True if it runs in the background.
        variables: the environment variables that are set in front of it.
    """

    words: tuple[str, ...]
    background: bool = False
    variables: Mapping[str, str] = MappingProxyType({})


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a file."""
    text = path.read_text()
    found = [
        Block(match[1], text.count("\n", 0, match.start()) + 1, match[2])
        for match in _FENCE.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), "a fence is open"
    indented = _INDENTED.search(_FENCE.sub("", text))
    assert indented is None, f"fence this code, so that it runs: {indented[0].strip()}"
    return found


def commands(text: str) -> list[Command]:
    """Return the commands of a shell block, without its comments."""
    found = []
    line = ""
    for part in text.replace("\\\n", " ").splitlines(keepends=True):
        line += part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that ends on a later line
            continue
        line = ""
        if words:
            background = words[-1] == "&"
            variables = {}
            while assigned := _VARIABLE.fullmatch(words[0]):
                variables[assigned[1]] = assigned[2]
                del words[0]
            found.append(Command(tuple(words[: -1 if background else None]), background, variables))
    assert not line, f"a quotation is open: {line}"
    return found
