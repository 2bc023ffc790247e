"""The road of imports: downwards from room to room, and never in a circle.

The list of exceptions may only become shorter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parent.parent
FLOORS = ("adapter", "backends", "schemas")

# From the ground up; a file may import from its own room and from those above this line in the
# list, which are below it in the house. Rooms of one entry know nothing of one another.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("schemas/*.py",),
    ("schemas/native/*.py", "schemas/openai/*.py"),
    ("backends/*.py",),
    ("backends/grammar/*.py",),
    ("backends/koboldcpp/*.py", "backends/llama_cpp/*.py", "backends/llama_server/*.py"),
    # What one HTTP exchange is, whatever it is about, and what is served.
    tuple(
        f"adapter/{name}.py"
        for name in (
            "cors", "credentials", "errors", "exchange", "guards", "origins", "printable",
            "service", "validation", "validation_errors",
        )
    ),
    ("adapter/generation/*.py",),
    # What was generated, taken apart.
    tuple(
        f"adapter/chat/{name}.py" for name in ("calls", "json_call", "parsing", "thinking")
    ),
    ("adapter/chat/formats/*.py",),
    tuple(
        f"adapter/chat/{name}.py"
        for name in (
            "__init__", "conversation", "fetch", "instruct", "media", "message", "prepare",
            "reasoning", "special_tokens", "templates", "tools",
        )
    ),
    ("adapter/endpoints/*.py",),
    tuple(
        f"adapter/{name}.py" for name in ("__init__", "app", "config", "config_errors", "discovery")
    ),
    ("adapter/cli/*.py",),
)  # fmt: skip

# Arrows that run upwards: the importer, and what it imports.
UPWARDS: set[tuple[str, str]] = set()


@lru_cache(maxsize=1)
def imports() -> Mapping[str, frozenset[str]]:
    """What each file imports of ours; what only type checkers import counts, too."""
    files = {path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}
    return MappingProxyType(
        {name_of(path): frozenset(map(name_of, _imported(path, files))) for path in files}
    )


def name_of(path: Path) -> str:
    """A file's path in the project."""
    return path.relative_to(ROOT).as_posix()


def _imported(path: Path, files: set[Path]) -> Iterator[Path]:
    package = path.parent
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [package, *package.parents][node.level - 1]
        base = base.joinpath(*(node.module or "").split("."))
        for imported in node.names:
            # A module of a package, a package's own name, or a module's.
            for found in (base / imported.name, base):
                options = (found.with_suffix(".py"), found / "__init__.py")
                known = next((one for one in options if one in files), None)
                if known is not None and known != path:
                    yield known
                    break


def rooms() -> Mapping[str, tuple[int, str]]:
    """The storey of each file, and its room where several share one."""
    found = {}
    for storey, patterns in enumerate(ROOMS):
        for pattern in patterns:
            room = pattern if pattern.endswith("/*.py") else ""
            for path in ROOT.glob(pattern):
                found[name_of(path)] = storey, room
    return found


def circles(graph: Mapping[str, frozenset[str]]) -> set[frozenset[str]]:
    """Files that lead back to one another: strongly connected components of more than one."""
    reached = {name: _reached(name, graph) for name in graph}
    found = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return {circle for circle in found if len(circle) > 1}


def _reached(name: str, graph: Mapping[str, frozenset[str]]) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        for other in graph[todo.pop()] - found:
            found.add(other)
            todo.append(other)
    return found


def test_every_file_is_in_a_room() -> None:
    """A new file belongs somewhere, and nothing is in two places."""
    listed = [
        path for patterns in ROOMS for one in patterns for path in map(name_of, ROOT.glob(one))
    ]
    assert sorted(listed) == sorted(imports())


def test_imports_run_downwards() -> None:
    """No file imports from a room above its own, or beside it."""
    where = rooms()
    found = set()
    for name, others in imports().items():
        storey, room = where[name]
        for other in others:
            its, beside = where[other]
            if its > storey or (its == storey and room != beside):
                found.add((name, other))
    assert found == UPWARDS


def test_no_files_import_one_another() -> None:
    """Each file can be read with those below it alone."""
    assert not circles(imports())


def test_circles_are_found() -> None:
    """Of any length, also where they share a file."""
    graph = {"a": "b", "b": "ac", "c": "d", "d": "c", "e": "a", "f": ""}
    found = circles({name: frozenset(others) for name, others in graph.items()})
    assert found == {frozenset("ab"), frozenset("cd")}
