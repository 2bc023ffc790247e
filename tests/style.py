"""Check the project's English: common terms, also in names, and how docstrings begin.

    python tests/style.py

`make lint` runs it. It prints each text that breaks a rule, and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("adapter", "backends", "schemas")
# Users read the promises of the conformance suite.
SHOWN = (*SOURCES, "tests/conformance")

# Clauses that a docstring does not begin with: it begins with a verb or with a noun.
CLAUSES = re.compile(r"(How|What|Where|Whether|Which|Who|Whose|Why)\b")
# Words that are not OpenAI's or llama.cpp's terms, in texts that users read.
BANNED = re.compile(
    r"\b(is none|are none|beside|goes? on|made sure|told|tells|nearly|anew|stands (for|in)|thereby"
    r"|whoever|whatever|leave (it )?out|ask again|tokenisers?)\b",
    re.IGNORECASE,
)
# The same in docstrings and comments, where some of these words have another meaning.
ARCHAIC = re.compile(
    r"\b(beside(?!:)|told|tells|goes? on|made sure|nearly|anew|thereby|whoever|whatever|however"
    r"|tokenis\w+|blanks|leaves? out|left out|returns? whether"
    r"|(?<!there )(?-i:(is|are) none)|(?<!there )is no(?! (longer|more)))\b",
    re.IGNORECASE,
)
# Words that no name in the sources has: the interface has other terms for the things.
UNNAMED = re.compile(r"(?:^|_)(told|said|thoughts?|signs?|heard|manner|placer|cutter)(?:_|$)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def problems_of(path: Path) -> Iterator[str]:
    """Yield the texts of a module that break a rule."""
    source = path.read_text()
    tree = ast.parse(source)
    name = path.relative_to(ROOT).as_posix()
    nodes = list(ast.walk(tree))
    texts = []
    for node in nodes:
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node) or ""
            texts.append(text)
            if CLAUSES.match(text):
                yield f"begins with a clause: {text.splitlines()[0]}"
            if getattr(node, "name", "")[:5] == "test_" and not text.endswith((".", "!", "?")):
                yield f"is no sentence: the docstring of {getattr(node, 'name', '')}"
    tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
    texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    for text in texts:
        if found := ARCHAIC.search(text):
            yield f"{found[0]!r} in a docstring or comment: {text}"
    if name.startswith(SOURCES):
        names = {token.string for token in tokens if token.type == tokenize.NAME}
        yield from (f"{one!r} as a name" for one in sorted(filter(UNNAMED.search, names)))
    if name.startswith(SHOWN):
        # The value of an expression that is a statement: docstrings, and nothing else of text.
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if not isinstance(node, ast.Constant) or id(node) in docstrings:
                continue
            if isinstance(node.value, str) and (found := BANNED.search(node.value)):
                yield f"{found[0]!r} in a text: {node.value}"


def problems_of_notes(path: Path) -> Iterator[str]:
    """Yield the explanations of failed checks that break a rule."""
    for note in json.loads(path.read_text()).values():
        if BANNED.search(note) or CLAUSES.match(note):
            yield note


def main() -> int:
    """Check every module, and the notes of the conformance reports."""
    notes = sorted((ROOT / "docs" / "conformance" / "notes").glob("*.json"))
    found = [f"{path.name}: {one}" for path in notes for one in problems_of_notes(path)]
    for folder in (*SOURCES, "tests", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += [f"{path.relative_to(ROOT)}: {one}" for one in problems_of(path)]
    print("\n".join(found), end="\n" * bool(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
