"""The settings that several workers of a server can share, and those of one process only."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..engines import is_elsewhere, is_in_process, why_one_process, why_one_process_at
from ..limits.config import grants_of, kind_of
from ..limits.leases import NO_RATES
from ..settings import Settings
from ..settings_file import WrongSettings
from ..store.config import StoreConfig

_MIB = 1 << 20


# What to do instead of several workers, by the reason against them.
OTHER_ENGINES = "Use --workers 1, or put llama-servers at URLs behind Latimer."
_OTHER_SYSTEM = "Use --workers 1."
_SHARED_LIMITS = "Use --workers 1, or set 'store' in the table [admission] to Redis or PostgreSQL."


class NotShared(WrongSettings):
    """Settings that only one process can serve; `advice` says in one sentence what to do."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def check_shared(settings: Settings) -> None:
    """Check that several workers can serve what the settings say.

    Raises:
        NotShared: only one process can; the message says what to do instead.
    """
    for reason, advice in _obstacles(settings):
        raise NotShared(f"{settings.source_of('workers')}: {reason}", advice)


def _obstacles(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the reasons why only one process can serve what the settings say, and advice."""
    if not hasattr(os, "fork"):
        yield "several workers need Linux or macOS. Omit it.", _OTHER_SYSTEM
    for reason in _engines(settings):
        yield reason, OTHER_ENGINES
    if kind_of(settings.admission.store) == "memory":
        for grant in grants_of(settings.keys).values():
            if grant.rates is not NO_RATES:
                reason = (
                    f"the limits of keys.{grant.name} would hold for each worker alone. Count them "
                    "in Redis or PostgreSQL (store in the table [admission]), or omit the workers."
                )
                yield reason, _SHARED_LIMITS


def _engines(settings: Settings) -> Iterator[str]:
    """Yield the reasons why several processes cannot use the engines."""
    for name, table in settings.engines.items():
        if table.is_loaded_on_demand:
            yield (
                f"engines.{name} is loaded and unloaded by Latimer, which only one process can do. "
                "Start the engine yourself and write its url, or omit the workers."
            )
        elif table.file is not None:
            yield f"engines.{name} {_of_one_process(settings.for_engine(name))}"
    if not settings.engines and not is_elsewhere(settings):
        yield f"the model {_of_one_process(settings)}"
    if reason := why_one_process(settings.backend):
        yield reason


def _of_one_process(settings: Settings) -> str:
    """Return why only one process can serve a file, and what to do instead."""
    if is_in_process(settings):
        reason = "runs in Latimer's own process. Serve it with llama-server"
    else:
        reason = (
            "is served by a llama-server that Latimer starts, which only one process can do. "
            "Start a llama-server yourself"
        )
    return f"{reason}, and start the workers in front of its address, such as {_EXAMPLE}."


_EXAMPLE = "http://127.0.0.1:8080"


async def one_process_engine(settings: Settings) -> str | None:
    """Return the reason why workers cannot serve the engines that run now, or None.

    Engines that do not answer within two seconds are left to the workers, which check them too.
    """
    own = [settings]
    if settings.engines:
        own = [settings.for_engine(name) for name in settings.engines]
    reasons = await asyncio.gather(*map(why_one_process_at, own))
    for one, reason in zip(own, reasons, strict=True):
        if reason:
            return f"{one.model}: {reason}"
    return None


def shared(settings: Settings, folder: Path) -> Settings:
    """Return the settings of the workers: with one secret, and with one store.

    A store in memory becomes an SQLite file with the same limits, which ends with the server.

    Args:
        folder: the place of the file.
    """
    flags: dict[str, Any] = {}
    if settings.reasoning_key is None:
        flags["reasoning_key"] = secrets.token_urlsafe(32)
    place = settings.store_place()
    if place is not None and place.kind == "memory":
        flags |= _in_file(place, folder / "store.db")
    return settings.with_flags(**flags)


def _in_file(place: StoreConfig, file: Path) -> dict[str, Any]:
    return {
        "store": str(file),
        "store_age": "forever" if place.age is None else f"{place.age:.0f}s",
        "store_size": None if place.size is None else place.size // _MIB,
    }
