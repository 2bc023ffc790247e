"""Engines that Latimer loads: a llama-server for a file, and the engines of the tables.

`engines.py` makes their backends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..backends.base import Backend
from ..backends.fleet.machine import Machine, Member
from ..backends.fleet.pool import Pool
from ..backends.fleet.process import EngineProcess
from ..backends.fleet.replica import Replica
from ..backends.llama_cpp.options import EXTRA, name_of
from ..backends.llama_server.command import SUPPORTED, command_of, find_program
from .settings import Settings, option_of

# The variable in which llama-server finds its API key.
_KEY = "LLAMA_API_KEY"
# Seconds that the only model of a server may take to load.
_START = 3_600.0


def is_in_process(settings: Settings) -> bool:
    """Return True if llama.cpp in this process serves a file, and not a llama-server."""
    if settings.backend == "auto":
        return all(map(find_spec, EXTRA)) or find_program() is None
    return settings.backend == "llama-cpp"


def options_of(settings: Settings) -> dict[str, Any]:
    """Return the arguments of the engine that the settings set, for `command_of`."""
    arguments = settings.arguments("llama-cpp")
    return {
        option_of(field).argument or name: arguments[option_of(field).argument or name]
        for name, field in Settings.model_fields.items()
        if name in settings.model_fields_set and "llama-cpp" in option_of(field).to
    }


def unsupported(settings: Settings) -> list[str]:
    """Return where those settings were set that llama-server does not know."""
    return [
        settings.source_of(name)
        for name, field in Settings.model_fields.items()
        if name in settings.model_fields_set
        and option_of(field).needs == "a GGUF file"
        and (option_of(field).argument or name) not in SUPPORTED
    ]


def child_of(
    settings: Settings,
    program: Sequence[str],
    model: Path,
    make: Callable[[str, str], Backend],
) -> Backend:
    """Return the backend of a file that a llama-server serves, which is a child process.

    Args:
        program: see `find_program`.
        make: makes the backend for an address and an API key.
    """
    key = secrets.token_urlsafe(24)
    name = name_of(model)
    loader = EngineProcess(
        name,
        command_of(program, model, name, options_of(settings)),
        lambda address: make(address, key),
        environment={_KEY: key},
        start_timeout=_START,
    )
    return pool_of(name, Member(Machine(), loader), settings)


def pool_of(name: str, member: Member, settings: Settings) -> Pool:
    """Return the only model of a server, whose engine is loaded when it is needed."""
    replica = Replica(name, member.backend, loader=member)
    return Pool(name, [replica], settings.queue)


def machines_of(settings: Settings) -> Mapping[str, Machine]:
    """Return the machines of the tables."""
    return {
        name: Machine(name, machine.memory, machine.most_wait)
        for name, machine in settings.machines.items()
    }
