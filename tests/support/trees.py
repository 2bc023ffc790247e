"""The syntax trees of the project's files, for tests that read the sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once."""
    return ast.parse(path.read_text())
