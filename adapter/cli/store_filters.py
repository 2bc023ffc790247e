"""The options of `latimer store` that select objects."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import click

from ..store.place import seconds_of

Command = Callable[..., None]

_AGE = re.compile(r"[0-9]+[smhd]")
_SECOND = 1_000_000


def moment(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Return the microseconds since 1970 of a date, a time, or an age."""
    if value is None:
        return None
    try:
        if _AGE.fullmatch(value):
            return int((time.time() - (seconds_of(value) or 0)) * _SECOND)
        found = datetime.fromisoformat(value)
        found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return int(found.timestamp() * _SECOND)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            "expected a date or a time in UTC, such as 2026-01-31 or 2026-01-31T12:00, or an age "
            f"such as 7d, not {value!r}."
        ) from None


def age(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of an age."""
    try:
        seconds = None if value is None else seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    if value is not None and seconds is None:
        raise click.BadParameter("nothing is older than forever; expected an age such as 30d.")
    return seconds


def model_and_metadata(command: Command) -> Command:
    """Add the options for the model and the metadata of objects."""
    metadata = click.option(
        "--metadata",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_pairs,
        help="Only objects with this pair of metadata; repeatable, all pairs must match.",
    )
    return click.option("--model", metavar="NAME", help="Only objects of this model.")(
        metadata(command)
    )


def _pairs(
    _context: click.Context, _option: click.Parameter, values: Sequence[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator:
            raise click.BadParameter(f"expected KEY=VALUE, not {value!r}.")
        if found.setdefault(key, text) != text:
            raise click.BadParameter(f"an object has one value of {key!r}, not two.")
    return found
