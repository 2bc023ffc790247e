"""Tests that imports run only downwards through the list of layers, and never in a circle.

The list of exceptions may only become shorter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from support.trees import tree_of

ROOT = Path(__file__).parent.parent
FLOORS = ("adapter", "backends", "schemas")

# From the bottom layer to the top. A file may import from its own folder and from the layers before
# it in this list. The folders of one layer must not import each other.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("schemas/*.py",),
    ("schemas/native/*.py", "schemas/openai/*.py"),
    ("schemas/anthropic/*.py",),
    (
        *(
            f"backends/{name}.py"
            for name in (
                "__init__", "base", "connection", "embeddings", "errors", "http", "identity",
                "offload", "pooling", "queue", "sandbox", "sentencepiece", "single_flight",
                "spellings", "sse",
                "stops", "streams",
            )
        ),
        "backends/speech/__init__.py", "backends/speech/base.py",
    ),
    ("backends/grammar/*.py",),
    # The libraries that speak and transcribe.
    tuple(
        f"backends/speech/{name}.py"
        for name in (
            "child", "phonemes", "pieces", "piper", "process", "sherpa", "speaking", "sphinx",
            "whisper", "worker",
        )
    ),
    ("backends/koboldcpp/*.py", "backends/llama_cpp/*.py", "backends/llama_server/*.py"),
    ("backends/speech/libraries.py",),
    ("backends/fleet/*.py",),
    (
        "adapter/daemon_threads.py", "adapter/data_urls.py", "adapter/errors.py",
        "adapter/messages/errors.py", "adapter/parts.py", "adapter/postgresql_errors.py",
        "adapter/probe.py", "adapter/text_frames.py",
    ),
    # Fields of other servers.
    ("adapter/dialects/*.py",),
    # The limits of keys.
    ("adapter/limits/*.py",),
    # Models by name.
    ("adapter/hub/*.py",),
    # Stored objects and their database.
    ("adapter/store/*.py",),
    # One HTTP exchange, independent of its endpoint, and the models that are served.
    tuple(
        f"adapter/{name}.py"
        for name in (
            "admission", "arrivals", "auth", "base_urls", "form", "handshake", "hosted",
            "metric_rows", "metrics", "model_entry", "observers", "origins", "proxies", "question",
            "readiness", "record", "request", "request_log", "responses/background",
            "responses/lanes", "responses/register", "responses/sealed", "service", "traces",
            "validation", "vllm_metrics",
        )
    ),
    ("adapter/generation/*.py",),
    # Parsers of generated text.
    ("adapter/chat/parsers.py", "adapter/chat/reasoning.py"),
    ("adapter/chat/formats/*.py",),
    tuple(
        f"adapter/chat/{name}.py"
        for name in (
            "__init__", "conversation", "fetch", "folding", "instruct", "media",
            "message", "prepare", "profile", "special_tokens", "templates", "tools", "webp",
        )
    ),
    # Speech: voices, sentences, audio formats, spoken answers.
    ("adapter/audio/*.py",),
    tuple(
        f"adapter/responses/{name}.py"
        for name in (
            "__init__", "files", "input", "items", "output", "pdf_reader", "prebuilt", "replicas",
            "response", "tools", "truncation",
        )
    ),
    tuple(
        f"adapter/messages/{name}.py"
        for name in (
            "__init__", "input", "message", "models", "output", "parts", "request", "thinking",
            "tools",
        )
    ),
    ("adapter/endpoints/*.py",),
    ("adapter/playground/*.py",),
    tuple(
        f"adapter/{name}.py"
        for name in (
            "__init__", "admin", "app", "arguments", "engines", "environment", "fleet", "on_demand",
            "openapi", "option", "routes", "settings", "settings_file",
        )
    ),
    ("adapter/cli/*.py",),
    ("adapter/ray_proxy.py", "adapter/ray_serve.py"),
)  # fmt: skip

# Allowed exceptions: the importing file and the imported one.
UPWARDS: set[tuple[str, str]] = set()


@lru_cache(maxsize=1)
def imports() -> Mapping[str, frozenset[str]]:
    """Return the project's files that each file imports, also for type checking only."""
    files = {path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}
    return MappingProxyType(
        {name_of(path): frozenset(map(name_of, _imported(path, files))) for path in files}
    )


def name_of(path: Path) -> str:
    """Return a file's path in the project."""
    return path.relative_to(ROOT).as_posix()


def _imported(path: Path, files: set[Path]) -> Iterator[Path]:
    package = path.parent
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [package, *package.parents][node.level - 1]
        base = base.joinpath(*(node.module or "").split("."))
        for imported in node.names:
            # A submodule of a package, or a name in a package or a module.
            for found in (base / imported.name, base):
                options = (found.with_suffix(".py"), found / "__init__.py")
                known = next((one for one in options if one in files), None)
                if known is not None and known != path:
                    yield known
                    break


def rooms() -> Mapping[str, tuple[int, str]]:
    """Return each file's layer, and its folder if the layer lists several."""
    found = {}
    for storey, patterns in enumerate(ROOMS):
        for pattern in patterns:
            room = pattern if pattern.endswith("/*.py") else ""
            for path in ROOT.glob(pattern):
                found[name_of(path)] = storey, room
    return found


def circles(graph: Mapping[str, frozenset[str]]) -> set[frozenset[str]]:
    """Return the import cycles: strongly connected components of more than one file."""
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
    """Every file is in exactly one layer."""
    listed = [
        path for patterns in ROOMS for one in patterns for path in map(name_of, ROOT.glob(one))
    ]
    assert sorted(listed) == sorted(imports())


def test_imports_run_downwards() -> None:
    """No file imports from a layer above its own, or from another folder of its layer."""
    where = rooms()
    assert where.keys() == imports().keys(), "each file belongs in a layer of ROOMS"
    found = set()
    for name, others in imports().items():
        storey, room = where[name]
        for other in others:
            its, beside = where[other]
            if its > storey or (its == storey and room != beside):
                found.add((name, other))
    assert found == UPWARDS


def test_no_files_import_one_another() -> None:
    """No files import each other in a cycle."""
    assert not circles(imports())


def test_circles_are_found() -> None:
    """Import cycles are found, and files outside of them are ignored."""
    graph = {"a": "b", "b": "ac", "c": "d", "d": "c", "e": "a", "f": ""}
    found = circles({name: frozenset(others) for name, others in graph.items()})
    assert found == {frozenset("ab"), frozenset("cd")}
