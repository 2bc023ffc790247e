"""The command `latimer check`: the features of an engine, the memory of a model, and advice."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import click

from ...backends.errors import LatimerError
from ..errors import printable
from ..settings import Settings
from . import options
from .commands import loading
from .terminal import EXIT_CHECK, EXIT_START, Download, end_at_once, say

if TYPE_CHECKING:
    from ...backends.base import Backend
    from ...backends.fleet.pool import Pool

Status = Literal["ok", "warning", "failed"]
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fact.

    Args:
        of: the table that it is about, such as `engines.a`; empty for the whole server.
        advice: what to do unless the status is `ok`.
        numbers: the bytes of the row `memory`.
    """

    of: str = ""
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""
    numbers: Mapping[str, int | None] | None = None


@click.command(cls=options.Sectioned)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option(
    "--report", is_flag=True, help="Print a text block with versions and settings, for an issue."
)
@options.check
@loading
def check(settings: Settings, as_json: bool, report: bool) -> None:
    """Show what an engine supports, the memory of a model, and the store, as a table.

    Each row that failed has a line that says what to do. The exit code is 1 if the engine cannot be
    reached, or a store cannot be used.

    \b
    Examples:
      latimer check
      latimer check http://127.0.0.1:5001
      latimer check hf:Qwen/Qwen3-8B-GGUF --context 32768
      latimer check --json | jq '.rows[] | select(.status != "ok")'
      latimer check --report
    """
    end_at_once()
    error = ""
    rows: Sequence[Row] = ()
    try:
        rows = asyncio.run(_rows_of(settings))
    except LatimerError as found:
        error = found.message
        say(f"Latimer cannot check: {error}")
    if as_json:
        click.echo(json.dumps(_json_of(rows, error), indent=2))
    elif report:
        click.echo(_report(settings, rows, error))
    else:
        for line in lines_of(rows):
            click.echo(line)
    failed = any(row.status == "failed" for row in rows)
    sys.exit(EXIT_START if error else EXIT_CHECK if failed else 0)


def _json_of(rows: Sequence[Row], error: str) -> dict[str, Any]:
    """Return the output of `--json`; keys without a value are omitted in rows."""
    return {
        "ok": not error and all(row.status != "failed" for row in rows),
        "error": error or None,
        "rows": [
            {key: value for key, value in asdict(row).items() if value or key == "value"}
            for row in rows
        ],
    }


def lines_of(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of the table for people, with a heading for each engine and model."""
    for number, (of, group) in enumerate(groupby(rows, key=lambda row: row.of)):
        if number:
            yield ""
        if of:
            yield printable(of)
        members, indent = [*group], "  " if of else ""
        width = max(len(row.name) for row in members)
        for row in members:
            yield f"{indent}{row.name:<{width}}  {printable(row.value)}".rstrip()
            if row.advice:
                yield f"{indent}{'':<{width}}  → {printable(row.advice)}"


def _report(settings: Settings, rows: Sequence[Row], error: str) -> str:
    from .model_file import facts_of, files_of
    from .report import block, heading, settings_of

    files = files_of(settings)
    facts = [(f"{row.of}.{row.name}".lstrip("."), row.value) for row in rows]
    sections = [
        ("versions", [*heading()]),
        ("model file", [*facts_of(settings, files)] if files else []),
        ("check", [("error", error)] if error else facts),
        ("settings", [*settings_of(settings)] or [("", "none")]),
    ]
    return block([(title, [*lines]) for title, lines in sections if lines])


async def _rows_of(settings: Settings) -> list[Row]:
    """Return all rows.

    Raises:
        LatimerError: no engine can be made from the settings.
    """
    rows = await _fleet(settings) if settings.engines else await _single(settings)
    rows.append(await _store(settings))
    rows += await _limits(settings)
    rows += await _workers(settings)
    rows += _telemetry(settings)
    rows += await _speech(settings)
    rows += await _transcription(settings)
    rows += _variables(settings)
    return rows


async def _single(settings: Settings) -> list[Row]:
    from ..engines import backend_of, chosen, describe, unused, with_files

    placed = with_files(settings, Download())
    # Before the engine takes it.
    memory = _memory(placed)
    backend = backend_of(placed)
    for line in [*chosen(settings), *unused(settings)]:
        say(line)
    try:
        error, pairs = await describe(backend)
        rows = [*_reached(pairs, None if error is None else _advice(error, settings.model))]
        if memory is None and error is None:
            memory = await _memory_elsewhere(backend)
    finally:
        await backend.aclose()
    return rows if memory is None else [*rows, memory]


def _reached(pairs: Pairs, advice: str | None, of: str = "") -> Iterator[Row]:
    """Yield the rows of an engine.

    Args:
        advice: what to do if it cannot be reached; None if it can.
    """
    for name, value in pairs:
        if advice is None or name != "reachable":
            yield Row(of=of, name=name, value=value)
        else:
            yield Row(of=of, name=name, value=value, status="failed", advice=advice)


def _advice(error: LatimerError, model: str | None) -> str:
    """Return what to do about an engine that cannot be used; messages of others have a hint."""
    from ..engines import ENGINES, is_loading

    if is_loading(error):
        return "Wait until the engine has loaded its model, and check again."
    if model is None or "://" not in model:
        return "Correct what this names; if memory is short, try a smaller --context."
    if "cannot be reached" in error.message:
        return (
            "Start the engine, or correct the address. latimer serve can start before its engine: "
            "it answers 503 until one serves the model."
        )
    if "SSL_CERT_FILE" in error.message:
        return "latimer serve needs the variable, too; or use a certificate of a known authority."
    if "--engine-key" in error.message:
        return (
            "Use the key that the engine was started with: --api-key of llama-server, or "
            "--password of koboldcpp."
        )
    engines = " or ".join(ENGINES)
    return f"Check the address, and that a {engines} with a model listens there."


def _memory(settings: Settings) -> Row | None:
    """Return the memory that a model on this machine needs; None for an engine at a URL."""
    from ..hub.memory import free_memory
    from ..hub.names import in_units
    from .model_file import files_of, memory_in_words, needed_by

    files = files_of(settings)
    if not files:
        return None
    needed, free = needed_by(settings, files, settings.context), free_memory()
    room = "" if free is None else f"; {in_units(free)} are free"
    numbers = {**asdict(needed), "total": needed.total, "free": free}
    row = Row(name="memory", value=f"{memory_in_words(needed)}{room}", numbers=numbers)
    if free is None or needed.total <= free:
        return row
    advice = (
        "Use a smaller --context, --cache-type q8_0 for half of the KV cache, or a smaller "
        "quantization of the model."
    )
    return replace(row, status="warning", advice=advice)


async def _memory_elsewhere(backend: Backend) -> Row:
    """Return what is known of the memory of an engine at a URL."""
    from ..hub.names import in_units

    size = (await backend.model()).sizes.get("size")
    weights = f"weights {in_units(size)}" if size else "unknown"
    return Row(name="memory", value=f"{weights}; the engine has loaded the model already")


async def _store(settings: Settings) -> Row:
    from ..engines import describe_store, store_advice

    place = settings.store_place()
    is_open, (name, value) = await describe_store(place)
    if is_open:
        return Row(name=name, value=value)
    advice = store_advice(place, settings.source_of("store"))
    return Row(name=name, value=value, status="failed", advice=advice)


async def _limits(settings: Settings) -> Iterable[Row]:
    """Return a row for the store of the limits, if the server uses one that processes share."""
    from ..engines import describe_limits
    from ..limits.config import kind_of

    if not settings.keys or kind_of(settings.admission.store) == "memory":
        return ()
    advice, (name, value) = await describe_limits(settings.admission)
    status: Status = "failed" if advice else "ok"
    return (Row(name=name, value=value, status=status, advice=advice),)


async def _workers(settings: Settings) -> Iterable[Row]:
    """Return a row that says if several processes can serve what the settings say."""
    if settings.workers == 1:
        return ()
    from .sharing import OTHER_ENGINES, NotShared, check_shared, one_process_engine

    reason: str | None
    advice = OTHER_ENGINES
    try:
        check_shared(settings)
    except NotShared as error:
        reason, advice = str(error), error.advice
    else:
        reason = await one_process_engine(settings)
    if reason is None:
        return (Row(name="workers", value=str(settings.workers)),)
    return (Row(name="workers", value=f"no: {reason}", status="failed", advice=advice),)


def _variables(settings: Settings) -> Iterator[Row]:
    """Yield a row for each variable that is only named like a setting."""
    for variable, advice in settings.unknown_variables():
        value, words = f"{variable} is no setting", advice[:1].upper() + advice[1:]
        yield Row(name="variable", value=value, status="warning", advice=words)


def _telemetry(settings: Settings) -> Iterable[Row]:
    """Return a row that says if OpenTelemetry can send what the settings ask for."""
    from . import otel

    if not otel.is_asked(settings):
        return ()
    try:
        return (Row(name="otel", value=otel.Sdk().where),)
    except otel.Unsendable as error:
        status: Status = "failed" if settings.otel is True else "warning"
        advice = "Correct the variables OTEL_…, or use --no-otel."
        return (Row(name="otel", value=f"no: {error}", status=status, advice=advice),)


async def _speech(settings: Settings) -> Iterable[Row]:
    """Return a row that says if `--speech` can speak; its model is loaded."""
    if settings.speech is None:
        return ()
    from ...backends.speech.libraries import UnknownLibrary, speaker_of
    from ..hub.voices import placed

    try:
        found = speaker_of(placed(settings.speech, Download(), offline=settings.offline))
        try:
            facts = await found.facts()
        finally:
            await found.aclose()
    except UnknownLibrary as error:
        advice = "Correct --speech."
        return (Row(name="speech", value=f"no: {error}", status="failed", advice=advice),)
    except LatimerError as error:
        advice = "Correct --speech, or start what it names."
        return (Row(name="speech", value=f"no: {error.message}", status="failed", advice=advice),)
    count = len(facts.voices)
    return (Row(name="speech", value=f"{facts.name}, {count} voice{'s' * (count > 1)}"),)


async def _transcription(settings: Settings) -> Iterable[Row]:
    """Return a row that says if `--transcription` can transcribe; its model is loaded."""
    if settings.transcription is None:
        return ()
    from ...backends.speech.libraries import UnknownLibrary, transcriber_of

    name = "transcription"
    try:
        found = transcriber_of(settings.transcription, offline=settings.offline)
        try:
            facts = await found.facts()
        finally:
            await found.aclose()
    except UnknownLibrary as error:
        advice = "Correct --transcription."
        return (Row(name=name, value=f"no: {error}", status="failed", advice=advice),)
    except LatimerError as error:
        advice = "Correct --transcription, or start what it names."
        return (Row(name=name, value=f"no: {error.message}", status="failed", advice=advice),)
    times = "with times" if facts.has_segments else "without times"
    return (Row(name=name, value=f"{facts.name}, {times}"),)


async def _fleet(settings: Settings) -> list[Row]:
    """Return the rows of the engines of a fleet, then those of its models."""
    from ...backends.fleet.machine import Member
    from ..engines import describe, describe_loader
    from ..fleet import Fleet

    fleet = Fleet(settings)
    rows: list[Row] = []
    broken: set[str] = set()
    try:
        for name, replica in fleet.replicas.items():
            of, table = f"engines.{name}", settings.engines[name]
            if isinstance(replica.loader, Member):
                can_load, pairs = await describe_loader(replica.loader.loader)
                advice = None if can_load else f"Correct command or url of [{of}]."
            else:
                error, pairs = await describe(replica.backend)
                advice = None if error is None else _advice(error, table.url or table.file)
            broken |= set() if advice is None else {name}
            rows += _reached(pairs, advice, of)
        await asyncio.gather(*(pool.ask_all() for pool in fleet.pools.values()))
        for entry, name in zip(fleet.entries, fleet.pools, strict=True):
            serves = (one for one in entry.fallback if _about(fleet.pools[one], broken))
            rows += _model(fleet.pools[name], name, broken, next(serves, ""))
    finally:
        await fleet.aclose()
    return rows


def _about(pool: Pool, broken: Collection[str]) -> str:
    """Return how a model is served; empty if it is not.

    Args:
        broken: the names of engines that cannot be used.
    """
    from ..engines import ON_DEMAND

    if pool.known is not None:
        return f"{pool.known.name}, {pool.places} at a time"
    loads = any(one.is_loadable and one.name not in broken for one in pool.replicas)
    return ON_DEMAND if loads else ""


def _model(pool: Pool, name: str, broken: Collection[str], fallback: str) -> list[Row]:
    """Return the rows of a model of a fleet: its first engine's, and the state of each.

    Args:
        fallback: the model that serves its requests while no engine does, if there is one.
    """
    from ..engines import ON_DEMAND

    of, about, advice = f"models.{name}", _about(pool, broken), ""
    status: Status = "ok"
    if not about:
        about, status = "no engine is ready", "warning" if fallback else "failed"
        until = f"{fallback} serves its requests" if fallback else "requests get a 503"
        advice = f"Mend one of its engines; {until} until then."
    rows = [Row(of=of, name="served", value=about, status=status, advice=advice)]
    for one in pool.replicas:
        state = f"{one.shown}: {one.reason}" if one.reason else one.shown
        if one.is_loadable:
            state = "cannot be loaded" if one.name in broken else ON_DEMAND
        is_ready = one.state == "ready" or one.is_loadable
        row = Row(of=of, name=one.name, value=state)
        failed = replace(row, status="failed", advice=f"See engines.{one.name} above.")
        rows.append(row if is_ready else failed)
    return rows
