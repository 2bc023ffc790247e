"""The commands `latimer serve`, `latimer check` and `latimer config`."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import printable
from ..settings import Settings
from ..settings_file import WrongSettings
from . import imports, options
from .terminal import EXIT_CHECK, EXIT_START, Download, WrongUse, end_at_once, fail, say


def _loading(command: Callable[[Settings], None]) -> Callable[..., None]:
    """Load the settings for a command; invalid settings end it with exit code 2."""

    @functools.wraps(command)
    def run(config: Path | None, **flags: Any) -> None:
        from ..auth import UnusableKey

        try:
            settings = Settings.load(config, **flags)
            # They are used later only.
            settings.api_keys()
            settings.adapters()
        except UnusableKey as error:
            fail(str(error))
        except ValueError as error:
            raise WrongUse(str(error)) from None
        try:
            command(settings)
        except WrongSettings as error:
            raise WrongUse(str(error)) from None

    return run


@click.command()
@options.serve
@_loading
def serve(settings: Settings) -> None:
    """Serve OpenAI's API over a model or an engine.

    \b
    Examples:
      latimer serve
      latimer serve hf:Qwen/Qwen3-8B-GGUF:Q4_K_M
      latimer serve model.gguf --context 8192 --parallel 16 --gpu-layers all
      latimer serve http://127.0.0.1:8080 --model-name gpt-4o --api-key secret
      LATIMER_API_KEY=one,two latimer serve --config latimer.toml

    Every setting can come from a flag, from the environment (LATIMER_PORT=8080), or from the
    TOML file of --config (port = 8080), in this order of precedence.
    """
    with imports():
        from . import serve as server

    if settings.workers > 1:
        from . import parent

        parent.run(settings)
    else:
        server.run(server.serve(settings))


@click.command()
@options.check
@_loading
def check(settings: Settings) -> None:
    """Show the capabilities of an engine, and the store, as a table.

    The exit code is 1 if the engine cannot be reached, or the store cannot be opened.

    \b
    Examples:
      latimer check
      latimer check http://127.0.0.1:5001
    """
    end_at_once()
    sys.exit(asyncio.run(_check(settings)))


async def _check(settings: Settings) -> int:
    from ...backends.errors import LatimerError
    from ..engines import backend_of, describe, describe_store, unused, with_files

    if settings.engines:
        return await _check_fleet(settings)
    try:
        backend = backend_of(with_files(settings, Download()))
    except LatimerError as error:
        say(f"Latimer cannot check: {error.message}")
        return EXIT_START
    for line in unused(settings):
        say(line)
    try:
        reachable, rows = await describe(backend)
    finally:
        await backend.aclose()
    is_open, row = await describe_store(settings.store_place())
    can_share, workers = await _workers(settings)
    can_send, telemetry = _telemetry(settings)
    _print([*rows, row, *workers, *telemetry])
    return 0 if reachable and is_open and can_share and can_send else EXIT_CHECK


async def _workers(settings: Settings) -> tuple[bool, list[tuple[str, str]]]:
    """Return False if only one process can serve what the settings say, and a row of the table."""
    if settings.workers == 1:
        return True, []
    from .sharing import check_shared, one_call_engine

    try:
        check_shared(settings)
    except WrongSettings as error:
        reason: str | None = str(error)
    else:
        reason = await one_call_engine(settings)
    return reason is None, [("workers", f"no: {reason}" if reason else str(settings.workers))]


def _telemetry(settings: Settings) -> tuple[bool, list[tuple[str, str]]]:
    """Return False if OpenTelemetry cannot send what the settings ask for, and a row."""
    from . import otel

    if not otel.is_asked(settings):
        return True, []
    try:
        return True, [("otel", otel.Sdk().where)]
    except otel.Unsendable as error:
        return settings.otel is not True, [("otel", f"no: {error}")]


def _print(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {printable(value)}")


async def _check_fleet(settings: Settings) -> int:
    """Print the engines of a fleet, then its models and the store."""
    from ...backends.fleet.machine import Member
    from ..engines import ON_DEMAND, WrongSetup, describe, describe_loader, describe_store
    from ..fleet import Fleet

    try:
        fleet = Fleet(settings)
    except WrongSetup as error:
        say(f"Latimer cannot check: {error.message}")
        return EXIT_START
    try:
        are_ready = True
        broken: set[str] = set()
        for name, replica in fleet.replicas.items():
            if isinstance(replica.loader, Member):
                reachable, rows = await describe_loader(replica.loader.loader)
            else:
                reachable, rows = await describe(replica.backend)
            are_ready = are_ready and reachable
            broken |= set() if reachable else {name}
            _print([("engines." + name, "")] + [("  " + key, value) for key, value in rows])
            click.echo()
        rows = []
        for name, pool in fleet.pools.items():
            await pool.ask_all()
            if pool.known is not None:
                about = f"{pool.known.name}, {pool.places} at a time"
            else:
                can_load = any(one.is_loadable and one.name not in broken for one in pool.replicas)
                about = ON_DEMAND if can_load else "no engine is ready"
            rows.append((f"models.{name}", about))
            for one in pool.replicas:
                state = f"{one.state}: {one.reason}" if one.reason else one.state
                if one.is_loadable:
                    state = "cannot be loaded" if one.name in broken else ON_DEMAND
                rows.append((f"  {one.name}", state))
                are_ready = are_ready and (one.state == "ready" or one.is_loadable)
        is_open, row = await describe_store(settings.store_place())
        can_share, workers = await _workers(settings)
        can_send, telemetry = _telemetry(settings)
        _print([*rows, row, *workers, *telemetry])
    finally:
        await fleet.aclose()
    return 0 if are_ready and is_open and can_share and can_send else EXIT_CHECK


@click.group()
def config() -> None:
    """Print the JSON schema of the settings file, or the digest of a key for it."""


@config.command()
def schema() -> None:
    """Print the JSON schema of the settings file, for editors.

    \b
    Examples:
      latimer config schema > latimer.schema.json
      # in the first line of fleet.toml, for taplo and Even Better TOML:
      #:schema ./latimer.schema.json
    """
    from ..settings import schema_of_file

    click.echo(json.dumps(schema_of_file(), indent=2))


@config.command()
def digest() -> None:
    """Print the digest of a key, for the table [keys.NAME].

    The key is read from standard input: one line, which a terminal does not show.

    \b
    Examples:
      latimer config digest
      openssl rand -hex 24 | tee key.txt | latimer config digest
    """
    from ..auth import UnusableKey, check_key
    from ..limits.config import digest_of

    if sys.stdin.isatty():
        key = click.prompt("Key", hide_input=True, err=True)
    else:
        try:
            key = sys.stdin.buffer.read(2**16).decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise WrongUse("standard input: the key is not valid UTF-8") from None
    try:
        check_key(key, "standard input")
    except UnusableKey as error:
        raise WrongUse(str(error)) from None
    click.echo(digest_of(key))
