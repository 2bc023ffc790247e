"""The commands `latimer ps`, `load`, `unload` and `drain`, for a server that runs."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click
import orjson

from ..errors import printable
from .client import DEFAULT, Unreachable, ask, base_of
from .terminal import EXIT_CHECK, WrongUse, end_at_once, say

_PATH = "/admin/engines"
# Seconds between two looks at an engine that is drained.
_LOOK = 0.5
# The states in which an engine needs memory for its next load only.
_WITHOUT_MEMORY = ("unloaded", "failed")
_COLUMNS = ("engine", "state", "models", "running", "waiting", "memory", "reason")


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the address of the server, as an argument or an option, and the key."""

    @click.argument("address", metavar="[URL]", required=False)
    @click.option("--url", default=DEFAULT, show_default=True, help="Address of the server.")
    @click.option(
        "--admin-key", envvar="LATIMER_ADMIN_KEY", help="The key of the server's --admin-key."
    )
    @functools.wraps(command)
    def run(address: str | None, url: str, **others: Any) -> None:
        end_at_once()
        command(url=address or url, **others)

    return run


@click.command()
@_options
@click.option("--json", "as_json", is_flag=True, help="Print the server's response.")
def ps(url: str, admin_key: str | None, as_json: bool) -> None:
    """List the engines of a running server, with their states."""
    engines = _ask("GET", url, "", admin_key)["data"]
    if as_json:
        click.echo(orjson.dumps(engines, option=orjson.OPT_INDENT_2).decode())
        return
    rows = [_COLUMNS, *map(_row, engines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        line = "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def _row(engine: dict[str, Any]) -> tuple[str, ...]:
    memory = engine.get("memory") or {}
    sizes = ", ".join(f"{kind} {size / 2**30:.2f} GiB" for kind, size in memory.items()) or "-"
    if memory and engine["state"] in _WITHOUT_MEMORY:
        sizes += " (not used)"
    return (
        printable(engine["id"]),
        engine["state"],
        printable(", ".join(engine["models"])),
        f"{engine['running']}/{engine['places']}",
        str(engine["waiting"]),
        sizes,
        printable(engine["reason"]) or "-",
    )


@click.command()
@click.argument("name")
@_options
def load(name: str, url: str, admin_key: str | None) -> None:
    """Load the model of an engine, or use a drained engine again."""
    _say(_ask("POST", url, f"/{quote(name, safe='')}/load", admin_key))


@click.command()
@click.argument("name")
@_options
def unload(name: str, url: str, admin_key: str | None) -> None:
    """Unload the model of an engine when its requests have ended."""
    _say(_ask("POST", url, f"/{quote(name, safe='')}/unload", admin_key))


@click.command()
@click.argument("name")
@_options
def drain(name: str, url: str, admin_key: str | None) -> None:
    """Send no more requests to an engine, and wait until it runs none."""
    engine = _ask("POST", url, f"/{quote(name, safe='')}/drain", admin_key)
    while engine["running"]:
        time.sleep(_LOOK)
        engines = _ask("GET", url, "", admin_key)["data"]
        engine = next((one for one in engines if one["id"] == name), {**engine, "running": 0})
    say(f"{name} runs no requests, and gets no more. latimer load {name} uses it again.")


def _say(engine: dict[str, Any]) -> None:
    say(f"{engine['id']} is {engine['state']}." if not engine["reason"] else _reason(engine))


def _reason(engine: dict[str, Any]) -> str:
    return f"{engine['id']} is {engine['state']}: {engine['reason']}."


def _ask(method: str, url: str, path: str, key: str | None) -> Any:
    """Return the JSON of a response; end the process with the reason if it is an error."""
    if not key:
        raise WrongUse(
            "--admin-key is missing: send the key that the server was started with, or set "
            "LATIMER_ADMIN_KEY."
        )
    try:
        status, body = ask(method, base_of(url) + _PATH + path, key)
        reply = orjson.loads(body)
        if status < 400:
            return reply
        reason = str(reply["error"]["message"])
    except Unreachable as error:
        reason = f"{error}."
    except (ValueError, LookupError, TypeError):
        reason = f"{url} does not answer like Latimer. Correct the address."
    if reason.startswith("Invalid URL"):
        reason = (
            "The server has no paths for operators. Start it with --admin-key and with tables of "
            "engines in the file of --config."
        )
    say(reason)
    sys.exit(EXIT_CHECK)
