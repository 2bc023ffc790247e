"""The commands `latimer serve` and `latimer config`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..settings import Settings
from ..settings_file import WrongSettings
from . import imports, options
from .terminal import WrongUse, fail


def loading(command: Callable[..., None]) -> Callable[..., None]:
    """Load the settings for a command; invalid settings end it with exit code 2.

    Options that are no settings are passed on.
    """

    @functools.wraps(command)
    def run(config: Path | None, **flags: Any) -> None:
        from ..auth import UnusableKey

        others = {name: flags.pop(name) for name in [*flags] if name not in Settings.model_fields}
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
            command(settings, **others)
        except WrongSettings as error:
            raise WrongUse(str(error)) from None

    return run


@click.command(cls=options.Sectioned)
@options.serve
@loading
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
