"""The command `latimer store` for the operator of a store.

A server can use the store at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from ..auth import owner_of
from ..errors import printable
from ..settings import Settings
from ..settings_file import WrongSettings
from ..store.config import LARGEST, StoreConfig, bytes_of, seconds_of
from ..store.errors import StoreError, StoreUnavailable, in_words
from . import options, terminal
from .terminal import EXIT_START, WrongUse, end_at_once, progress, say

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.statistics import Statistics

Work = Callable[..., Coroutine[Any, Any, None]]
Command = Callable[..., None]

_AGE = re.compile(r"[0-9]+[smhd]")
_SECOND = 1_000_000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

# Seconds that `prune` waits for those who read SQLite's log of changes.
LOG_SECONDS = 2.0

NO_STORE = (
    "a store on disk or on a server is needed, and {} is not one. Write --store FILE.db or "
    "--store postgresql://USER:PASSWORD@HOST/NAME, or set LATIMER_STORE."
)


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


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def store() -> None:
    """Migrate, measure, export or prune stored completions.

    \b
    Examples:
      latimer store stats --store latimer.db
      latimer store export --store latimer.db -o training.jsonl
      latimer store prune --store latimer.db --older-than 30d
      LATIMER_STORE=postgresql://… latimer store migrate

    A server can use the store at the same time.
    """


def placed(work: Work) -> Callable[..., None]:
    """Run a coroutine with the place of the store; errors are one line and an exit code."""

    @options.storage
    @functools.wraps(work)
    def run(
        config: Path | None,
        store: str | None,
        store_age: str | None,
        store_size: int | None,
        store_media: str | None,
        **own: Any,
    ) -> None:
        end_at_once()
        try:
            settings = Settings.load(
                config,
                store=store,
                store_age=store_age,
                store_size=store_size,
                store_media=store_media,
            )
            place = settings.store_place()
        except WrongSettings as error:
            raise WrongUse(str(error)) from None
        if place is None or not place.durable:
            what = "off" if place is None else "memory"
            raise WrongUse(f"{settings.source_of('store')}: {NO_STORE.format(what)}")
        try:
            asyncio.run(work(place, **own))
        except (StoreError, StoreUnavailable) as error:
            say(f"Latimer cannot use the store: {place.describe()}: {in_words(error)}")
            sys.exit(EXIT_START)

    return run


@asynccontextmanager
async def opened(place: StoreConfig) -> AsyncIterator[Database]:
    """Yield the database of a store that exists, without a change to its schema.

    Raises:
        StoreError: it does not exist, or has another schema than this program.
    """
    from ..store.database import Database
    from ..store.schema import NEWEST

    found = Database(place)
    version = await found.look()
    if not version:
        raise StoreError("Nothing was ever stored there. Check --store.")
    if version < NEWEST:
        raise StoreError(
            f"The schema has version {version}, and {NEWEST} is needed. Run 'latimer store "
            "migrate' first."
        )
    try:
        await found.open()
        yield found
    finally:
        await found.aclose()


@store.command()
@click.option("--dry-run", is_flag=True, help="Only print which migrations would run.")
@placed
async def migrate(place: StoreConfig, dry_run: bool) -> None:
    """Run the missing migrations of the schema.

    A server runs them at its start, too. One that runs already waits while this command migrates.
    """
    from ..store.database import Database
    from ..store.schema import NEWEST

    database = Database(place)
    before = await database.look()
    if dry_run or before == NEWEST:
        after = before
    else:
        before, after = await database.open()
        await database.aclose()
    if before == NEWEST:
        say(f"The schema has version {NEWEST}, the newest one. Nothing is to be done.")
    elif dry_run:
        say(f"The schema has version {before}. Version {NEWEST} would be made.")
    else:
        say(f"The schema had version {before}, and now has version {after}.")


@store.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@placed
async def stats(place: StoreConfig, as_json: bool) -> None:
    """Print the size of the store, and what it contains.

    It reads a row of every object: about a second for a million objects on a fast disk.
    """
    from ..store.statistics import statistics

    async with opened(place) as found:
        file = Path(place.target) if place.kind == "sqlite" else None
        figures = await found.read(statistics, file)
    if as_json:
        click.echo(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    else:
        click.echo(printable(table(place, figures), "\n"))


@store.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write to this file.  [standard output]"
)
@model_and_metadata
@click.option(
    "--since", callback=moment, metavar="TIME", help="Only objects from this time: 2026-01-31, 7d."
)
@click.option("--until", callback=moment, metavar="TIME", help="Only objects before this time.")
@click.option("--api-key", metavar="KEY", help="Only objects of this API key.  [all keys]")
@click.option("--reasoning", is_flag=True, help="Keep the reasoning, as reasoning_content.")
@placed
async def export(
    place: StoreConfig,
    output: Path | None,
    model: str | None,
    metadata: dict[str, str],
    since: int | None,
    until: int | None,
    api_key: str | None,
    reasoning: bool,
) -> None:
    """Write chat completions as JSONL for fine-tuning, the oldest first.

    A line has the messages of a request and one of its answers, in OpenAI's chat format, which
    TRL, axolotl and LLaMA-Factory read, too. Times are in UTC.

    \b
    Examples:
      latimer store export --store latimer.db -o training.jsonl
      latimer store export --store latimer.db --model demo --metadata rating=good --since 30d
    """
    from ..store.export import KIND, lines, read
    from ..store.objects import Selection

    owner = None if api_key is None else owner_of(api_key)
    selection = Selection(KIND, owner, model, metadata, since, until)
    objects = written = skipped = 0
    async with opened(place) as found:
        with terminal.output(output) as file, progress("exported") as show:
            async for some in read(found, selection):
                for one in some:
                    made = [] if one.missing else lines(one.stored, reasoning)
                    skipped += max(0, len(one.stored.reply["choices"]) - len(made))
                    written += len(made)
                    file.writelines(line + b"\n" for line in made)
                objects += len(some)
                show(objects)
    say(f"Exported {counted(written, 'line')} of {counted(objects, 'chat completion')}.")
    if skipped:
        say(f"Skipped {counted(skipped, 'choice')} without content or with a missing medium.")


@store.command()
@click.option(
    "--older-than", callback=age, metavar="DURATION", help="Delete older objects: 12h, 30d."
)
@click.option(
    "--max-size",
    type=click.IntRange(1, LARGEST),
    metavar="MIB",
    help="Delete the oldest objects until the store has this size, media included.",
)
@model_and_metadata
@click.option("--vacuum/--no-vacuum", default=True, help="Give the space back.  [--vacuum]")
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@placed
async def prune(
    place: StoreConfig,
    older_than: float | None,
    max_size: int | None,
    model: str | None,
    metadata: dict[str, str],
    vacuum: bool,
    dry_run: bool,
) -> None:
    """Delete objects by age and by size, and media that no object has.

    Without --older-than and --max-size, --store-age and --store-size apply.

    \b
    Examples:
      latimer store prune --store latimer.db --older-than 30d
      latimer store prune --store latimer.db --max-size 1024 --dry-run
    """
    from ..store import retention
    from ..store.objects import Selection

    most = None if max_size is None else bytes_of(max_size)
    if older_than is None and most is None:
        older_than, most = place.age, place.size
    if older_than is None and most is None:
        raise WrongUse("--older-than or --max-size is needed, such as --older-than 30d.")
    before = None if older_than is None else int((time.time() - older_than) * 1_000_000)
    limits = retention.Limits(Selection(model=model, metadata=metadata), before, most)
    verb = "Would delete" if dry_run else "Deleted"
    async with opened(place) as found:
        if dry_run:
            freed = await found.read(retention.plan, limits)
        else:
            with progress("deleted") as show:
                freed = await retention.prune(found, limits, show)
        say(f"{verb} {counted(freed.objects, 'object')} with {size(freed.bytes)}.")
        unused = await retention.remove_unused(found, not dry_run)
        if unused.objects:
            say(f"{verb} {unused.objects:,} media of no object with {size(unused.bytes)}.")
        if vacuum and not dry_run:
            await found.vacuum()
        if not dry_run and not await found.checkpoints.within(LOG_SECONDS):
            say("SQLite's log still has deleted text, because another process reads the store.")


def table(place: StoreConfig, found: Statistics) -> str:
    """Return the figures of a store as lines of two columns, and then its models."""
    per_object = found["bytes_per_object"]
    rows = [
        ("store", place.describe()),
        ("schema", f"version {found['schema_version']}"),
        ("objects", f"{found['objects']:,}, {size(found['object_bytes'])}"),
        ("media", f"{found['media']:,}, {size(found['media_bytes'])}"),
        ("owners", f"{found['owners']:,}"),
        ("oldest", found["oldest"] or "-"),
        ("newest", found["newest"] or "-"),
        ("database", _database(found)),
        ("per object", "-" if per_object is None else size(per_object)),
    ]
    groups = [
        (f"{one['objects']:,}", size(one["bytes"]), one["kind"], one["model"])
        for one in sorted(found["groups"], key=lambda one: -one["objects"])
    ]
    shown = [*_aligned(rows)]
    if groups:
        shown += ["", *_aligned([("objects", "bytes", "kind", "model"), *groups])]
    return "\n".join(shown)


def size(number: int) -> str:
    """Return a number of bytes in words."""
    value = float(number)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _database(found: Statistics) -> str:
    free, log = found["free_bytes"], found["log_bytes"]
    parts = (
        size(found["database_bytes"]),
        f"{size(free)} of it free" if free else "",
        f"and {size(log)} in the log of changes" if log else "",
    )
    return ", ".join(filter(None, parts))


def _aligned(rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    rows = [*rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]])
