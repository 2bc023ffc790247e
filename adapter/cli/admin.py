"""The commands `latimer ps`, `load`, `unload` and `drain`, for a server that runs."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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
_OVER_SOCKET = "http://localhost"
_TABLES = "with tables of engines in the file of --config"
_NO_PATHS = (
    f"The server has no paths for operators. Start it {_TABLES}, and with --admin-key KEY or "
    "--admin-socket PATH. For a server of one engine, use latimer top."
)
_NO_KEY = (
    "--admin-key or --socket is missing: give those of the server, or set LATIMER_ADMIN_KEY. Start "
    f"it {_TABLES}, and with --admin-key KEY or --admin-socket PATH. For a server of one engine, "
    "such as that of make serve, use latimer top."
)
_COLUMNS = ("engine", "state", "models", "running", "waiting", "memory", "reason")


class Refused(Exception):
    """A request that the server did not carry out; the message says why."""


@dataclass(frozen=True, slots=True)
class Operated:
    """A server as its operator reaches it.

    Args:
        url: its address.
        key: the key of its `--admin-key`.
        path: its Unix socket, which replaces both.
    """

    url: str
    key: str | None
    path: str | None

    def ask(self, method: str, path: str) -> Any:
        """Return the JSON of a response; end the process with the reason if it is an error."""
        try:
            return self.reply(method, path)
        except Refused as error:
            say(str(error))
            sys.exit(EXIT_CHECK)

    def reply(self, method: str, path: str) -> Any:
        """Return the JSON of a response.

        Raises:
            Refused: the response is an error, or there is none.
            WrongUse: no key is given.
        """
        if not self.key and self.path is None:
            raise WrongUse(_NO_KEY)
        base = _OVER_SOCKET if self.path else base_of(self.url)
        try:
            status, body = ask(method, base + _PATH + path, self.key, unix=self.path)
            reply = orjson.loads(body)
            if status < 400:
                return reply
            reason = str(reply["error"]["message"])
        except Unreachable as error:
            reason = f"{error}."
        except (ValueError, LookupError, TypeError):
            reason = f"{self.path or self.url} does not answer like Latimer. Correct the address."
        if reason.startswith("Invalid URL"):
            reason = _NO_PATHS
        raise Refused(reason)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the address of the server, as an argument or an option, and the key."""

    @click.argument("address", metavar="[URL]", required=False)
    @click.option("--url", default=DEFAULT, show_default=True, help="Address of the server.")
    @click.option(
        "--admin-key", envvar="LATIMER_ADMIN_KEY", help="The key of the server's --admin-key."
    )
    @click.option(
        "--socket",
        "path",
        envvar="LATIMER_ADMIN_SOCKET",
        type=click.Path(),
        help="The socket of the server's --admin-socket, which needs no key.",
    )
    @functools.wraps(command)
    def run(
        address: str | None, url: str, admin_key: str | None, path: str | None, **others: Any
    ) -> None:
        end_at_once()
        command(Operated(address or url, admin_key, path), **others)

    return run


@click.command()
@_options
@click.option("--json", "as_json", is_flag=True, help="Print the server's response.")
def ps(server: Operated, as_json: bool) -> None:
    """List the engines of a running server, with their states."""
    reply = server.ask("GET", "")
    _warn(reply)
    engines = reply["data"]
    if as_json:
        click.echo(orjson.dumps(engines, option=orjson.OPT_INDENT_2).decode())
        return
    rows = [_COLUMNS, *map(_row, engines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        line = "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def _row(engine: dict[str, Any]) -> tuple[str, ...]:
    memory, place = engine.get("memory") or {}, engine.get("place")
    sizes = [f"{kind} {size / 2**30:.2f} GiB" for kind, size in memory.items()]
    if place:
        sizes.append(f"one model of {place}")
    shown = ", ".join(sizes) or "-"
    if sizes and engine["state"] in _WITHOUT_MEMORY:
        shown += " (not used)"
    return (
        printable(engine["id"]),
        engine["state"],
        printable(", ".join(engine["models"])),
        f"{engine['running']}/{engine['places']}",
        str(engine["waiting"]),
        shown,
        printable(engine["reason"]) or "-",
    )


@click.command()
@click.argument("name")
@_options
def load(server: Operated, name: str) -> None:
    """Load the model of an engine, or use a drained engine again."""
    try:
        _say(server.reply("POST", f"/{quote(name, safe='')}/load"))
    except Refused as error:
        say(str(error))
        for line in _last_lines(server, name):
            say(line)
        sys.exit(EXIT_CHECK)


def _last_lines(server: Operated, name: str) -> list[str]:
    """Return the last lines that an engine wrote before its load failed, below a title."""
    try:
        engines = server.reply("GET", "")["data"]
    except Refused:
        return []
    found: dict[str, Any] = next((one for one in engines if one["id"] == name), {})
    if tail := found.get("log"):
        return [
            "The last lines of the engine:",
            *(f"  {printable(one)}" for one in tail.split("\n")),
        ]
    is_failed = found.get("state") == "failed"
    return ["The server's log has more: the event load_failed."] if is_failed else []


@click.command()
@click.argument("name")
@_options
def unload(server: Operated, name: str) -> None:
    """Unload the model of an engine when its requests have ended."""
    _say(server.ask("POST", f"/{quote(name, safe='')}/unload"))


@click.command()
@click.argument("name")
@_options
def drain(server: Operated, name: str) -> None:
    """Send no more requests to an engine, and wait until it runs none."""
    reply = engine = server.ask("POST", f"/{quote(name, safe='')}/drain")
    _warn(reply)
    # The server replaces a worker that does not answer.
    while engine["running"] or "silent_workers" in reply:
        time.sleep(_LOOK)
        reply = server.ask("GET", "")
        engine = next((one for one in reply["data"] if one["id"] == name), {**engine, "running": 0})
    say(f"{name} runs no requests, and gets no more. latimer load {name} uses it again.")


def _warn(reply: dict[str, Any]) -> None:
    """Say which workers do not answer."""
    for number in reply.get("silent_workers", ()):
        say(f"Worker {number} does not answer. Its requests are not counted.")


def _say(engine: dict[str, Any]) -> None:
    _warn(engine)
    say(f"{engine['id']} is {engine['state']}." if not engine["reason"] else _reason(engine))


def _reason(engine: dict[str, Any]) -> str:
    return f"{engine['id']} is {engine['state']}: {engine['reason']}."
