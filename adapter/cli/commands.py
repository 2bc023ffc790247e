"""The commands `latimer serve` and `latimer check`."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import printable
from ..settings import Settings, WrongSettings
from . import options
from .terminal import EXIT_CHECK, EXIT_START, WrongUse, end_at_once, fail, say


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
      latimer serve model.gguf --context 8192 --parallel 16 --gpu-layers all
      latimer serve http://127.0.0.1:8080 --model-name gpt-4o --api-key secret
      LATIMER_API_KEY=one,two latimer serve --config latimer.toml

    Every setting can come from a flag, from the environment (LATIMER_PORT=8080), or from the
    TOML file of --config (port = 8080), in this order of precedence.
    """
    from . import serve as server

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
    from ..engines import WrongSetup, backend_of, describe, describe_store, unused

    try:
        backend = backend_of(settings)
    except WrongSetup as error:
        say(f"Latimer cannot check: {error.message}")
        return EXIT_START
    for line in unused(settings):
        say(line)
    try:
        reachable, rows = await describe(backend)
    finally:
        await backend.aclose()
    is_open, row = await describe_store(settings.store_place())
    rows.append(row)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {printable(value)}")
    return 0 if reachable and is_open else EXIT_CHECK
