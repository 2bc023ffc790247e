"""The commands `latimer config …`, for the settings file."""

from __future__ import annotations

import sys

import click

from .terminal import WrongUse


@click.group()
def config() -> None:
    """Help to write the settings file of --config."""


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
