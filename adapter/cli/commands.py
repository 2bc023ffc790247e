"""The commands `latimer serve`, `latimer check`, `latimer conform` and `latimer store`.

Exit codes: 0 success, 1 a failed check, 2 wrong usage, 3 failed to start.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import printable
from . import options, terminal
from .terminal import EXIT_CHECK, EXIT_START, WrongUse, end_at_once

if TYPE_CHECKING:
    from ..settings import Settings

# The modules of the extra that `latimer conform` needs.
CONFORMANCE = frozenset({"jsonschema", "openai"})


def _loading(command: Callable[..., None]) -> Callable[..., None]:
    """Load the settings for a command; invalid settings end it with exit code 2."""

    @functools.wraps(command)
    def run(config: Path | None, **flags: Any) -> None:
        from ..auth import UnusableKey
        from ..settings import Settings

        try:
            settings = Settings.load(config, **flags)
            _check_files(settings)
        except UnusableKey as error:
            from .serve import fail

            fail(str(error))
        except ValueError as error:
            raise WrongUse(str(error)) from None
        command(settings)

    return run


class _Commands(click.Group):
    """A group of commands that end without a traceback, even if the terminal is gone."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        terminal.secure()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; Ctrl-C is exit code 130, as in a shell."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="latimer")
def main() -> None:
    """Every OpenAI client over local LLM engines, through their native interfaces.

    \b
    Examples:
      latimer serve                                 the bundled demo model, in process
      latimer serve model.gguf --gpu-layers all     your own model, in process
      latimer serve http://127.0.0.1:8080           in front of llama-server
      latimer serve http://127.0.0.1:5001           in front of koboldcpp
      latimer check http://127.0.0.1:8080           what this engine supports
      latimer conform http://127.0.0.1:8080/v1      how well it conforms to OpenAI's API
      latimer store stats --store latimer.db        what a store contains
    """


@main.command()
@options.common
@options.serving
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
    from ..settings import WrongSettings
    from . import serve as server

    try:
        server.run(server.serve(settings))
    except WrongSettings as error:
        raise WrongUse(str(error)) from None


@main.command()
@options.common
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


class _Conform(click.Command):
    """The `conform` command, which is defined in the conformance package and imported on use."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        if not all(map(find_spec, CONFORMANCE)):
            click.echo(
                "'latimer conform' requires the extra 'conformance': run pip install "
                "'.[conformance]' in a clone of Latimer.",
                err=True,
            )
            sys.exit(EXIT_START)
        from ...conformance.command import conform

        return conform.make_context(*args, **kwargs)


main.add_command(
    _Conform("conform", short_help="Test any server for conformance with OpenAI's API.")
)


class _Store(click.Group):
    """The `store` command, which is imported on use."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        from .store import store

        return store.make_context(*args, **kwargs)


main.add_command(_Store("store", short_help="Migrate, measure, export or prune a store."))


async def _check(settings: Settings) -> int:
    from ..engines import WrongSetup, backend_of, describe, describe_store, unused

    try:
        backend = backend_of(settings)
    except WrongSetup as error:
        click.echo(f"Latimer cannot check: {printable(error.message)}", err=True)
        return EXIT_START
    for line in unused(settings):
        click.echo(printable(line), err=True)
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


def _check_files(settings: Settings) -> None:
    """Check the settings that are only used at the start: API keys and LoRA adapters.

    Raises:
        WrongUse: the file of API keys cannot be read, or a LoRA adapter is invalid.
        UnusableKey: an API key cannot be used.
    """
    from ..settings import reason_of

    try:
        settings.keys()
    except (OSError, UnicodeError) as error:
        where = settings.place("api_key_file")
        reason = reason_of(error)
        raise WrongUse(f"{where}: {settings.api_key_file} cannot be read: {reason}.") from None
    try:
        settings.adapters()
    except ValueError as error:
        raise WrongUse(str(error)) from None
