"""Tests that each part of the project declares exactly the packages that it imports.

A test environment has every package, so these tests find a missing declaration before a user does.
`tests/install` also finds it, by installing each extra separately.
"""

from __future__ import annotations

import ast
import copy
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter.cli import CONFORMANCE
from latimer.backends.llama_cpp.options import EXTRA

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# The list of requirements of each part. A file belongs to the first part that matches its path.
PARTS = {
    "setup.py": "build-system",
    "adapter/generation/token_ids.py": "tiktoken",
    "adapter/store/blobs.py": "s3",
    "adapter/limits/postgresql.py": "postgres",
    "adapter/limits/redis.py": "redis",
    "adapter/ray_serve.py": "ray",
    "adapter/audio/decoder.py": "transcription",
    "adapter/audio/formats.py": "speech",
    "backends/speech/piper.py": "piper",
    "backends/speech/sherpa.py": "speech",
    "backends/speech/sphinx.py": "pocketsphinx",
    "backends/speech/whisper.py": "transcription",
    "adapter/traces.py": "otel",
    "adapter/cli/otel.py": "otel",
    "backends/llama_cpp/": "llama-cpp",
    "backends/llama_server/wheel.py": "prebuilt",
    "adapter/": "dependencies",
    "backends/": "dependencies",
    "schemas/": "dependencies",
    "tests/benchmarks/sentence_transformers_speed.py": "sentence-transformers",
    "tests/suite/export.py": "export",
    "tests/conformance/": "conformance",
    "tests/": "test",
    "examples/": "test",
}
# The extras that are installed for the tests.
EXTRAS = ("llama-cpp", "tiktoken", "postgres", "redis", "s3", "otel", "speech", "conformance")
# The other lists that are installed with a list, from which its part may import too.
WITH = {
    "llama-cpp": ("dependencies",),
    "tiktoken": ("dependencies",),
    "s3": ("dependencies",),
    "postgres": ("dependencies",),
    "redis": ("dependencies",),
    "ray": ("dependencies",),
    "otel": ("dependencies",),
    "speech": ("dependencies",),
    "piper": ("dependencies",),
    "transcription": ("dependencies",),
    "pocketsphinx": ("dependencies",),
    "conformance": ("dependencies",),
    "test": ("dependencies", *EXTRAS),
}
# The distributions that share a namespace, by the module of each, the most special first.
NAMESPACE = {
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry": "opentelemetry-api",
}
# Modules that an extra of another distribution installs, or that are not installed here.
BROUGHT = {
    "botocore": "boto3",
    "faster_whisper": "faster-whisper",
    "onnxruntime": "onnxruntime",
    "piper": "piper-tts",
    "pocketsphinx": "pocketsphinx",
}
# Requirements that no file imports, and the reason for each.
NOT_IMPORTED = {
    ("dependencies", "python-multipart"): "Starlette's parser of forms imports it",
    ("dependencies", "websockets"): "uvicorn's protocol of WebSockets imports it",
    ("postgres", "psycopg[binary]"): "the store's SQLAlchemy and the limits import it",
    ("piper", "av"): "adapter/audio/formats.py imports it",
    ("pocketsphinx", "av"): "adapter/audio/decoder.py imports it",
    ("deploy", "helm-python-sdk"): "tests/examples/deploy imports it if it is installed",
    ("deploy", "kubernetes-validate"): "tests/examples/deploy imports it if it is installed",
    ("dist", "build"): "a command of `make dist`",
    ("dist", "cffconvert"): "a command of `make dist`",
    ("dist", "twine"): "a command of `make dist`",
    ("docs", "zensical"): "a command of `make docs`",
    ("ray", "ray[serve]"): "the tests of Ray are in a folder of its name",
    ("test", "flask"): "moto's server imports it",
    ("test", "flask-cors"): "moto's server imports it",
    ("test", "lm-eval[api]"): "the client of lm-eval that tests/clients runs",
    ("test", "moto[s3]"): "the server of S3 that tests run",
    ("test", "mypy"): "a command of `make types`",
    ("test", "pytest-asyncio"): "a plugin: asynchronous tests and fixtures",
    ("test", "pytest-randomly"): "a plugin: the order of tests",
    ("test", "pytest-timeout"): "a plugin: the timeout in pyproject.toml",
    ("test", "pytest-xdist"): "a plugin: tests side by side",
    ("test", "ruff"): "a command of `make lint`",
    ("test", "setuptools"): "`make test` builds without an environment of its own",
    ("test", "transformers"): "the client of lm-eval imports it",
    ("test", "types-jsonschema"): "types of jsonschema for mypy",
}
# Files that only pytest imports, so pytest is installed.
OF_PYTEST = ("tests/conformance/plugin.py", "tests/conformance/test_conformance.py")
# Scripts that list their own requirements in their docstrings.
SCRIPTS = ("tests/models/make.py", "tests/models/make_embeddings.py")
# Programs of `make clients`, which have environments of their own.
CLIENTS = "tests/clients/installed/python"
# The requirements that their modules with another name come with.
CLIENT_MODULES = {
    "agents": "openai-agents",
    "httpx": "openai",
    "langchain_core": "langchain-openai",
    "llama_index": "llama-index-llms-openai-like",
    "pydantic": "openai",
    "pydantic_ai": "pydantic-ai-slim",
}
# Their requirements that no program imports, and the reason for each.
CLIENTS_NOT_IMPORTED = {
    "aider-chat": "a command",
    "llama-index-embeddings-openai-like": "another part of `llama_index`",
    "llm": "a command",
    "pytest-asyncio": "a plugin: asynchronous tests",
}


def canonical(name: str) -> str:
    """Return a distribution's name in the normalized form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirement: str) -> list[str]:
    """Return the distribution of a requirement, and the distribution with each extra."""
    match = re.match(r"([\w.-]+)(?:\[([^]]*)\])?", requirement)
    assert match, requirement
    name = canonical(match[1])
    return [name, *(f"{name}[{extra.strip()}]" for extra in (match[2] or "").split(",") if extra)]


def requirements(pyproject: dict[str, Any]) -> dict[str, list[str]]:
    """Return every list of requirements by its name."""
    return {
        "dependencies": pyproject["project"]["dependencies"],
        **pyproject["project"]["optional-dependencies"],
        **pyproject["dependency-groups"],
        "build-system": pyproject["build-system"]["requires"],
    }


def part_of(path: str) -> str:
    """Return the name of the list of requirements that a file belongs to."""
    return next(part for start, part in PARTS.items() if path.startswith(start))


def modules(source: str) -> set[str]:
    """Return the top-level modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {top_of(one.name) for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(top_of(node.module))
    return found - sys.stdlib_module_names


def top_of(module: str) -> str:
    """Return the part of a module's name that its distribution depends on."""
    shared = (one for one in NAMESPACE if f"{module}.".startswith(f"{one}."))
    return next(shared, module.split(".")[0])


def files() -> Iterator[Path]:
    """Yield each Python file of the project."""
    yield ROOT / "setup.py"
    for folder in ("adapter", "backends", "schemas", "tests", "examples"):
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def imports() -> dict[tuple[str, str], str]:
    """Return a file for each module that a part imports from elsewhere, by part and module."""
    ours = {"latimer", *(path.stem for path in (ROOT / "tests").iterdir())}
    found: dict[tuple[str, str], str] = {}
    for path in files():
        name = str(path.relative_to(ROOT))
        if name not in SCRIPTS and not name.startswith(CLIENTS):
            for module in modules(path.read_text()) - ours:
                if module != "pytest" or name not in OF_PYTEST:
                    found.setdefault((part_of(name), module), name)
    return found


@cache
def installed() -> Mapping[str, list[str]]:
    """Return the distributions of each module in this environment."""
    return packages_distributions()


def providers(module: str) -> set[str]:
    """Return the distributions that a module can come from."""
    if module in BROUGHT:
        return {BROUGHT[module]}
    if module in NAMESPACE:
        return {NAMESPACE[module]}
    return {canonical(name) for name in installed().get(module, [module])}


def problems(pyproject: dict[str, Any]) -> list[str]:
    """Return a sentence for each disagreement between imports and declarations."""
    lists = {
        part: {name for one in declared for name in names(one)}
        for part, declared in requirements(pyproject).items()
    }
    found, used = [], {(part, one) for part, name in NOT_IMPORTED for one in names(name)}
    for (part, module), path in imports().items():
        parts = [one for one in (part, *WITH.get(part, ())) if lists[one] & providers(module)]
        if not parts:
            found.append(f"{path} imports {module}: {part} lacks {'/'.join(providers(module))}")
        used |= {(part, name) for name in lists[part] & providers(module)}
        if part in parts and len(parts) > 1:
            found.append(f"{part} declares {module} again: {parts[1]} has it")
    found += [f"{part} lacks {name}" for part, name in NOT_IMPORTED if name not in lists[part]]
    for part, declared in lists.items():
        for name in declared:
            if (part, name) not in used:
                found.append(f"{part} declares {name}, which nothing there imports")
    return found


DECLARED = [(part, one) for part, every in requirements(PYPROJECT).items() for one in every]


def test_imports_and_declarations_agree() -> None:
    """Every import is declared where it is needed, and every declaration is needed there."""
    assert problems(PYPROJECT) == []


@pytest.mark.parametrize(("part", "requirement"), DECLARED)
def test_a_requirement_that_is_taken_out_is_named(part: str, requirement: str) -> None:
    """A requirement that is removed is reported as missing."""
    changed = copy.deepcopy(PYPROJECT)
    requirements(changed)[part].remove(requirement)
    name = names(requirement)[0]
    assert [one for one in problems(changed) if re.search(rf"lacks .*\b{re.escape(name)}\b", one)]


@pytest.mark.parametrize("part", requirements(PYPROJECT))
def test_a_requirement_that_nothing_needs_is_named(part: str) -> None:
    """A requirement that no file imports is reported."""
    changed = copy.deepcopy(PYPROJECT)
    requirements(changed)[part].append("no-such-package[fast]>=1")
    assert f"{part} declares no-such-package, which nothing there imports" in problems(changed)


def test_scripts_name_their_own_requirements() -> None:
    """A script outside the comparison lists its requirements in its docstring."""
    for name in SCRIPTS:
        source = (ROOT / name).read_text()
        listed = (ast.get_docstring(ast.parse(source)) or "").split("pip install ")[1].split()
        assert modules(source) <= set(listed) | {"latimer", "models"}


def test_programs_of_clients_declare_their_imports() -> None:
    """The programs of clients import what their requirements list, and nothing else."""
    folder = ROOT / CLIENTS
    lists = [path.read_text().split() for path in sorted(folder.glob("*.in"))]
    declared = {names(one)[0] for listed in lists for one in listed}
    programs = {path.stem: modules(path.read_text()) for path in folder.glob("*.py")}
    used = set().union(*programs.values()) - programs.keys()
    imported = {CLIENT_MODULES.get(module, canonical(module)) for module in used}
    assert imported | CLIENTS_NOT_IMPORTED.keys() == declared


def test_messages_know_the_packages_of_their_extras() -> None:
    """The messages about a missing extra cover every package of the extra."""
    lists = requirements(PYPROJECT)
    for extra, known in (("conformance", CONFORMANCE), ("llama-cpp", EXTRA)):
        declared = {name for one in lists[extra] for name in names(one)}
        assert {name for module in known for name in providers(module)} == declared


MISSING = [
    ("openai", ["conform", "--help"], 3, "'latimer conform' requires the extra 'conformance'"),
    ("jsonschema", ["conform", "http://127.0.0.1:1/v1"], 3, "requires the extra 'conformance'"),
    (
        "llguidance",
        ["serve", "--port", "0", "--backend", "llama-cpp"],
        3,
        "llama.cpp in process requires the extra 'llama-cpp'",
    ),
    (
        "tiktoken",
        ["serve", "--port", "0", "--logit-bias-vocabulary", "p50k_base"],
        3,
        "the extra 'tiktoken'",
    ),
    ("opentelemetry.sdk", ["serve", "--port", "0", "--otel"], 3, "the extra 'otel'"),
    ("latimer.conformance.runner", ["conform", "--help"], 1, "ModuleNotFoundError"),
]


@pytest.mark.parametrize(("module", "arguments", "code", "says"), MISSING)
def test_a_missing_module(module: str, arguments: list[str], code: int, says: str) -> None:
    """A missing package exits with 3 and names its extra; a missing own module is a bug."""
    script = (
        f"import sys\nsys.modules[{module!r}] = None\n"
        f"from latimer.adapter.cli import main\nmain({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)
