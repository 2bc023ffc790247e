"""The commands `latimer ps`, `load`, `unload` and `drain`, for a server that runs."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click
import orjson

from ..errors import printable
from .terminal import EXIT_CHECK, WrongUse, end_at_once, say

_PATH = "/admin/engines"
# Seconds between two looks at an engine that is drained.
_LOOK = 0.5
# The states in which an engine needs memory for its next load only.
_WITHOUT_MEMORY = ("unloaded", "failed")
_COLUMNS = ("engine", "state", "models", "running", "waiting", "memory", "reason")


def _options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option(
        "--admin-key", envvar="LATIMER_ADMIN_KEY", help="The key of the server's --admin-key."
    )(command)
    return click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server."
    )(command)


@click.command()
@_options
@click.option("--json", "as_json", is_flag=True, help="Print the server's response.")
def ps(url: str, admin_key: str | None, as_json: bool) -> None:
    """List the engines of a running server, with their states."""
    end_at_once()
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
    end_at_once()
    _say(_ask("POST", url, f"/{quote(name, safe='')}/load", admin_key))


@click.command()
@click.argument("name")
@_options
def unload(name: str, url: str, admin_key: str | None) -> None:
    """Unload the model of an engine when its requests have ended."""
    end_at_once()
    _say(_ask("POST", url, f"/{quote(name, safe='')}/unload", admin_key))


@click.command()
@click.argument("name")
@_options
def drain(name: str, url: str, admin_key: str | None) -> None:
    """Send no more requests to an engine, and wait until it runs none."""
    end_at_once()
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
        raise WrongUse("--admin-key is missing: send the key that the server was started with.")
    if not url.startswith(("http://", "https://")):
        raise WrongUse(f"--url: {url} is not an address such as http://127.0.0.1:8000.")
    request = urllib.request.Request(  # noqa: S310
        url.rstrip("/") + _PATH + path, method=method, headers={"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request) as reply:  # noqa: S310
            return orjson.loads(reply.read())
    except urllib.error.HTTPError as error:
        reason = _message(error.read()) or f"status {error.code}"
        if error.code == 404 and "engine" not in reason:
            reason = "the server has no admin path: it needs --admin-key, and tables of engines"
    except (OSError, ValueError) as error:
        reason = f"the server at {url} cannot be reached: {getattr(error, 'reason', error)}"
    say(reason)
    sys.exit(EXIT_CHECK)


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
