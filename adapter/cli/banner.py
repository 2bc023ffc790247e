"""The lines below the first line of `latimer serve` on a terminal: the model, addresses, a call.

Elsewhere, such as in a log, a line has the address of the playground instead.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from ...backends.base import EmbeddingModel, Model
from ..engines import shown_engine
from ..errors import printable
from ..hub.memory import free_memory, quantization, read_metadata
from ..hub.names import in_units, tag_of
from ..settings import Settings
from .model_file import files_of, memory_in_words, needed_by, size_of

if TYPE_CHECKING:
    from ..fleet import Fleet

Row: TypeAlias = tuple[str, str]

# The models of a fleet that are listed, the widest line, and the least width of a value.
_MODELS, _WIDEST, _LEAST = 8, 80, 24
_KEY = "LATIMER_API_KEY"
_HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Server:
    """The addresses and the keys of a server.

    Args:
        url: the address of the API, which ends with `/v1`.
        is_local: True if only programs of this machine can reach it.
    """

    settings: Settings
    url: str
    is_local: bool

    @property
    def keys(self) -> int:
        """The number of keys that clients can use."""
        return len(self.settings.api_keys()) + len(self.settings.keys)


def show(rows: Sequence[Row], command: Sequence[str]) -> None:
    """Print rows on standard error, and a command below them."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    lines = [*lines_of(rows, width, is_plain), "", *command, ""]
    click.echo("\n".join(lines), err=True)


def lines_of(rows: Sequence[Row], width: int, is_plain: bool) -> Iterator[str]:
    """Yield the lines of rows; values of a narrow terminal take several."""
    first = max(len(name) for name, _ in rows) + 2
    room = max(width - first - 2, _LEAST)
    for name, value in rows:
        # An address stays whole, so that it can be opened.
        parts = textwrap.wrap(
            printable(value), room, break_long_words=False, break_on_hyphens=False
        ) or [""]
        label = f"{name:<{first}}"
        yield f"  {label if is_plain else click.style(label, dim=True)}{parts[0]}"
        yield from (f"  {'':<{first}}{part}" for part in parts[1:])


def rows_of(server: Server, model: Model, engine: str) -> Iterator[Row]:
    """Yield the rows of a server of one model, and of the engine of this name."""
    settings = server.settings
    files = files_of(settings)
    metadata = (read_metadata(files[0]) if files else None) or {}
    kind = quantization(metadata) or (tag_of(model.name) if model.name.endswith(".gguf") else "")
    size = size_of(files) or model.sizes.get("size", 0)
    facts = (kind, in_units(size) if size else "")
    yield "model", ", ".join(filter(None, (model.name, *facts)))
    yield "engine", shown_engine(engine, model) + _device(settings, engine)
    calls = f"{model.places} at a time" if model.places > 1 else "one at a time"
    yield "context", f"{model.context:,} tokens; requests: {calls}"
    if files:
        free = free_memory()
        room = "" if free is None else f"; {in_units(free)} are free now"
        yield "memory", f"{memory_in_words(needed_by(settings, files, model.context))}{room}"
    yield from _addresses(server)


def _device(settings: Settings, engine: str) -> str:
    """Return where layers of the in-process engine are; it has been imported."""
    if not engine.endswith("in process"):
        return ""
    from ...backends.llama_cpp.library import has_gpu

    if not has_gpu() or not settings.gpu_layers:
        return ", on the CPU"
    layers = "all layers" if settings.gpu_layers < 0 else f"{settings.gpu_layers} layers"
    return f", {layers} on the GPU"


def rows_of_fleet(server: Server, fleet: Fleet) -> Iterator[Row]:
    """Yield the rows of a server of a fleet."""
    for number, (name, pool) in enumerate(fleet.pools.items()):
        if number == _MODELS:
            yield "", f"and {len(fleet.pools) - _MODELS} more"
            break
        engines = ", ".join(replica.name for replica in pool.replicas)
        yield "" if number else "models", f"{name} ({engines})"
    yield from _addresses(server)
    if server.settings.admin_socket is not None:
        yield "operator", f"latimer ps --socket {server.settings.admin_socket}"
    elif server.settings.admin_key is not None:
        yield "operator", f"latimer ps {_base(server)}, with the key of --admin-key"


def _addresses(server: Server) -> Iterator[Row]:
    settings, base = server.settings, _base(server)
    if settings.workers > 1:
        yield "workers", f"{settings.workers} processes"
    yield "API", f"{base}/v1"
    if settings.playground is not False:
        yield "playground", f"{base}/"
    yield "key", _keys(server)
    yield "stop", "Ctrl-C"


def _base(server: Server) -> str:
    """Return the address by which a program of this machine reaches the server."""
    base = server.url.removesuffix("/v1")
    return base.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _keys(server: Server) -> str:
    if server.keys:
        count = f", one of {server.keys}" if server.keys > 1 else ""
        place = "its file" if _has_file(server.settings) else f"the variable {_KEY}"
        return f"required{count}; this call reads it from {place}"
    if server.is_local:
        return "none; only this machine can connect"
    return "none, and other machines can connect; --api-key closes the server"


def command_of(server: Server, model: str | None, task: EmbeddingModel | None) -> list[str]:
    """Return the lines of a command that calls the server, for a shell.

    Args:
        model: its name in the request; None to omit it.
        task: what the model is made for, if it does not generate.
    """
    path, body = _call(task)
    if model is not None:
        body = {"model": model, **body}
    words = [f"curl {_base(server)}/v1/{path}"]
    if server.keys:
        words.append(f'-H "Authorization: Bearer {_own_key(server.settings)}"')
    words += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(json.dumps(body))}"]
    return " \\\n  ".join(words).split("\n")


def _call(task: EmbeddingModel | None) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request that the model can answer."""
    if task is None or task.generates:
        return "chat/completions", {"messages": _HELLO}
    if task.pooling == "rank":
        return "rerank", {"query": "a fruit", "documents": ["an apple", "a stone"]}
    return "embeddings", {"input": "Hello"}


def _own_key(settings: Settings) -> str:
    """Return what a shell replaces by a key; the key itself is not shown."""
    if _has_file(settings):
        return f"$(grep -m1 . {shlex.quote(str(settings.api_key_file))})"
    # The variable of the server can have several keys.
    return f"${{{_KEY}%%,*}}" if "," in os.environ.get(_KEY, "") else f"${_KEY}"


def _has_file(settings: Settings) -> bool:
    return settings.api_key_file is not None and not settings.api_key
