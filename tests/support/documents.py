"""The fenced blocks of a Markdown file, its commands, links, headings and sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"\n\n(?: {4}|\t).*")
_VARIABLE = re.compile(r"(\w+)=(.*)", re.DOTALL)


class Block(NamedTuple):
    """A fenced block with its language, the line of its fence, and its text.

    Args:
        output: what the block prints, with `…` for any text: the block `text` that follows it.
    """

    language: str
    line: int
    text: str
    output: str = ""

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
    found: list[Block] = []
    matches = [*_FENCE.finditer(text)]
    assert 2 * len(matches) == len(re.findall(r"^\s*```", text, re.MULTILINE)), "a fence is open"
    end = 0
    for match in matches:
        if match[1] == "text" and found and not text[end : match.start()].strip():
            found[-1] = found[-1]._replace(output=match[2])
        else:
            found.append(Block(match[1], text.count("\n", 0, match.start()) + 1, match[2]))
        end = match.end()
    indented = _INDENTED.search(_FENCE.sub("", text))
    assert indented is None, f"fence this code, so that it runs: {indented[0].strip()}"
    return found


def prints(found: str, expected: str) -> bool:
    """Return True if an output is the expected one, in which `…` is any text."""
    pattern = ".*?".join(map(re.escape, expected.strip().split("…")))
    return bool(re.fullmatch(pattern, found.replace("\r\n", "\n").strip(), re.DOTALL))


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


_CODE = re.compile(r"^```.*?^```$|<!--.*?-->|^---$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
# The beginnings of a paragraph: an empty line, a list item or a heading.
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )")
_SENTENCE = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=\S)")


def links(path: Path) -> list[str]:
    """Return the targets of a file's links and pictures."""
    return _LINK.findall(_text(path))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a file's headings, as GitHub makes them."""
    titles = [_LINK.sub("]", title).lower() for title in _HEADING.findall(_text(path))]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a file: those of paragraphs, list items and cells of tables."""
    for paragraph in _PARAGRAPH.split(_LINK.sub("]", _text(path))):
        lines = paragraph.strip().splitlines()
        rows = [line for line in lines if line.startswith("|")]
        cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
        for text in (" ".join(line for line in lines if line not in rows), *cells):
            yield from _SENTENCE.split(text)


def words(sentence: str) -> int:
    """Return the number of words of a sentence; signs alone do not count."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def _text(path: Path) -> str:
    return _CODE.sub("", path.read_text())
