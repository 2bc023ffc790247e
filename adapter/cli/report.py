"""The facts about an installation, for `latimer --version` and `latimer check --report`."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import printable

if TYPE_CHECKING:
    from ..settings import Settings

# Seconds that a program gets to print its version.
_PATIENCE = 5.0
# The distributions whose versions explain most differences.
_PACKAGES = (
    "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "orjson", "jinja2", "httpx2",
    "sqlalchemy", "numpy", "llguidance",
)  # fmt: skip
_ABSENT = "not installed"


def versions() -> list[tuple[str, str]]:
    """Return this program, and the builds of llama.cpp that it can use.

    No engine is imported, which takes seconds with a GPU.
    """
    return [
        ("latimer", version("latimer")),
        ("llama.cpp in process", _in_process()),
        ("llama-server", _server()),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _in_process() -> str:
    found = _version("llama-cpp-python")
    if not found:
        return f"{_ABSENT} (extra llama-cpp)"
    commit = _commit()
    return f"llama-cpp-python {found}" + (f", llama.cpp commit {commit}" if commit else "")


def _commit() -> str:
    """Return the commit of llama.cpp in llama-cpp-python; empty if it cannot be read."""
    spec = find_spec("llama_cpp")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        # The other libraries of it can load those of a GPU.
        for path in sorted(Path(place, "lib").glob("*ggml-base.*")):
            try:
                function = ctypes.CDLL(str(path)).ggml_commit
                function.restype = ctypes.c_char_p
                return str(function().decode())
            except (OSError, AttributeError):
                continue
    return ""


def _server() -> str:
    """Return the build of the llama-server that `latimer serve` starts for a file."""
    from ...backends.llama_server.command import build_of, find_program, is_wheel

    program = find_program()
    if program is None:
        return f"{_ABSENT} (extra prebuilt, or on the PATH)"
    if is_wheel(program):
        return build_of(program)
    try:
        done = subprocess.run(  # noqa: S603
            [*program, "--version"], capture_output=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{program[0]} does not print its version"
    printed = (done.stdout + done.stderr).decode(errors="replace")
    version = re.search(r"^version: *(.+)$", printed, re.MULTILINE)
    return f"{version[1].strip() if version else 'unknown version'} ({program[0]})"


def heading() -> Iterator[tuple[str, str]]:
    """Yield the versions of this installation, and facts about the machine."""
    from ..hub.memory import free_memory
    from ..hub.names import in_units

    yield from versions()
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    free = free_memory()
    memory = f", {in_units(free)} of memory free" if free is not None else ""
    yield "machine", f"{platform.machine()}, {os.cpu_count()} cores{memory}"
    found = {name: _version(name) for name in _PACKAGES}
    yield "packages", ", ".join(f"{name} {one}" for name, one in found.items() if one)


def settings_of(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the settings that were set, with their sources, and without secrets.

    Of a table only its keys are shown: a command of an engine can contain a secret.
    """
    from pydantic import BaseModel, SecretStr

    from ...backends.http import shown_address
    from ..option import option_of

    for name, field in type(settings).model_fields.items():
        if name not in settings.model_fields_set:
            continue
        value: Any = getattr(settings, name)
        if option_of(field).is_table:
            tables = value if isinstance(value, dict) else {"": value}
            for key, table in tables.items():
                place = f"[{name}.{key}]" if key else f"[{name}]"
                assert isinstance(table, BaseModel)
                yield place, ", ".join(sorted(table.model_fields_set))
            continue
        is_secret = option_of(field).is_secret or any(
            isinstance(one, SecretStr) for one in (value if isinstance(value, list) else [value])
        )
        if name == "store":
            stored = settings.store_place()
            shown = "off" if stored is None else stored.describe()
        elif is_secret:
            shown = "(not shown)"
        elif isinstance(value, str) and "://" in value:
            # It can contain a password.
            shown = shown_address(value)
        else:
            shown = str(value)
        yield name, f"{printable(shown)}  ({settings.source_of(name)})"


def block(sections: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Return rows under headings as a text block for Markdown."""
    home = str(Path.home())
    lines = ["```text"]
    for title, rows in sections:
        lines.append(f"{title}:")
        lines += [f"  {name}: {value}" if name else f"  {value}" for name, value in rows]
    # The name of the user is part of the paths.
    return "\n".join([*lines, "```"]).replace(home, "~" if len(home) > 1 else home)
