"""The command `latimer top`: a live table of a running server, read from its `/metrics`.

Rates and percentiles are those of the time between two scrapes.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, TypeAlias

import click
import orjson

from ..errors import printable
from ..metric_rows import BETWEEN_TOKENS
from .client import DEFAULT, Unreachable, ask, base_of
from .terminal import EXIT_CHECK, say

# Seconds that the server may take to answer.
_PATIENCE = 5.0
# The failed scrapes after which a server is not late but down.
_MOST_FAILED = 3
_PREFIXES = ("latimer_", "vllm:")
# States of engines that serve no requests, as they are shown.
_SHOWN = {"unavailable": "DOWN", "failed": "DOWN"}

_COLUMNS = (
    "MODEL", "ENGINE", "STATE", "RUN", "WAIT", "KV", "IN/S", "OUT/S", "TTFT", "P95", "ITL", "P95",
)  # fmt: skip
# The columns of text, which become shorter where the terminal is narrow, each with its least width.
_LEAST = (8, 6, 7)

Key: TypeAlias = tuple[str, str]
Buckets: TypeAlias = dict[float, float]


class Scrape(NamedTuple):
    """The numbers of one scrape, for each model and engine.

    Args:
        at: the time of it.
        states: the state of each engine.
        values: numbers by their metric.
        waiting: the waiting requests of each model.
        buckets: the cumulative buckets of histograms by their metric.
    """

    at: float
    states: dict[Key, str]
    values: dict[str, dict[Key, float]]
    waiting: dict[str, float]
    buckets: dict[str, dict[Key, Buckets]]


@dataclass(slots=True)
class Row:
    """A model on one engine; None for what is not known.

    Args:
        waiting: the requests that wait for any engine of the model.
        kv: the share of the KV cache that is in use.
        input, output: tokens a second.
        first, between: the 50th and the 95th percentile of the seconds to the first token, and
            between two tokens.
    """

    model: str
    engine: str
    state: str
    running: int
    waiting: int
    kv: float | None
    input: float | None
    output: float | None
    first: tuple[float | None, float | None]
    between: tuple[float | None, float | None]


_VALUES = ("num_requests_running", "kv_cache_usage_perc", "prompt_tokens", "generation_tokens")
_BUCKETS = ("time_to_first_token_seconds", "inter_token_latency_seconds")


def scrape_of(text: str, at: float) -> Scrape:
    """Return what a text in Prometheus' format has.

    Raises:
        ValueError: the text has another format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = Scrape(at, {}, {name: {} for name in _VALUES}, {}, {name: {} for name in _BUCKETS})
    for family in text_string_to_metric_families(text):
        name = family.name
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        for sample in family.samples:
            labels = sample.labels
            key = labels.get("model_name", ""), labels.get("engine", "")
            if name == "engine_state" and sample.value:
                found.states[key] = labels["state"]
            elif name == "num_requests_waiting":
                found.waiting[key[0]] = sample.value
            elif name in found.values:
                found.values[name][key] = sample.value
            elif name in found.buckets and "le" in labels:
                found.buckets[name].setdefault(key, {})[float(labels["le"])] = sample.value
    return found


def rows_of(before: Scrape | None, now: Scrape) -> list[Row]:
    """Return the rows of a table; the window is the time between the two scrapes.

    Without an earlier scrape, there are no rates, and percentiles are those of all requests.
    """
    # A real vLLM has no states.
    keys = sorted(now.states or now.values["generation_tokens"])
    return [_row(key, before, now) for key in keys]


def _row(key: Key, before: Scrape | None, now: Scrape) -> Row:
    model, engine = key
    state = now.states.get(key, "ready")
    first, between = (
        _percentiles(
            now.buckets[name].get(key, {}),
            {} if before is None else before.buckets[name].get(key, {}),
        )
        for name in _BUCKETS
    )
    return Row(
        model,
        engine,
        _SHOWN.get(state, state),
        int(now.values["num_requests_running"].get(key, 0)),
        int(now.waiting.get(model, 0)),
        now.values["kv_cache_usage_perc"].get(key),
        _rate("prompt_tokens", key, before, now),
        _rate("generation_tokens", key, before, now),
        first,
        between,
    )


def _rate(name: str, key: Key, before: Scrape | None, now: Scrape) -> float | None:
    if before is None or now.at <= before.at:
        return None
    # A counter that has become less began again: the server has restarted.
    after, earlier = now.values[name].get(key, 0.0), before.values[name].get(key, 0.0)
    rise = after - earlier if after >= earlier else after
    return rise / (now.at - before.at)


def _percentiles(now: Buckets, before: Buckets) -> tuple[float | None, float | None]:
    """Return the 50th and the 95th percentile of what was added to a histogram."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in now.items()}
    if any(count < 0 for count in counts.values()):
        counts = now
    return percentile(counts, 0.5), percentile(counts, 0.95)


def percentile(cumulative: Mapping[float, float], share: float) -> float | None:
    """Return a percentile of a histogram, as Prometheus estimates it; None if it is empty.

    Values are spread evenly in a bucket. Beyond the last bound, the answer is that bound.
    """
    bounds = sorted(cumulative)
    if not bounds or not cumulative[bounds[-1]]:
        return None
    wanted = share * cumulative[bounds[-1]]
    for low, high in pairwise([0.0, *bounds]):
        below = cumulative.get(low, 0.0)
        if cumulative[high] >= wanted:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (cumulative[high] - below or 1)
    return bounds[-1]


def table_of(rows: Sequence[Row], width: int = 0) -> list[str]:
    """Return the lines of a table; at most `width` characters each, unless it is 0."""
    cells = [_COLUMNS, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    excess = sum(widths) + 2 * (len(widths) - 1) - width if width else 0
    for _ in range(excess):
        # The one that has most to spare.
        spare, column = max((widths[column] - least, column) for column, least in enumerate(_LEAST))
        widths[column] -= spare > 0
    cells = [tuple(map(_fitted, row, widths)) for row in cells]
    lines = []
    for row in cells:
        words = [
            f"{text:<{size}}" if column < 3 else f"{text:>{size}}"
            for column, (text, size) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(words).rstrip()
        lines.append(line[:width] if width else line)
    return lines


def _fitted(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        printable(row.model),
        printable(row.engine),
        row.state,
        str(row.running),
        str(row.waiting),
        "-" if row.kv is None else f"{row.kv:.0%}",
        *map(_rate_text, (row.input, row.output)),
        *map(_seconds, row.first),
        *map(_gap, row.between),
    )


def _gap(value: float | None) -> str:
    finest = BETWEEN_TOKENS[0]
    return f"<{_seconds(finest)}" if value and value < finest else _seconds(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f}ms"
    return f"{value:.2f}s" if value < 10 else f"{value:.0f}s"


def _rate_text(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def fetch(url: str, key: str | None) -> str:
    """Return the metrics of a server.

    Raises:
        Unreachable: it does not answer, or has none of Latimer's or vLLM's.
    """
    status, body = ask("GET", url, key, _PATIENCE)
    if status == 401:
        if key:
            raise Unreachable(
                "the API key is wrong: send one of the server's with --api-key or LATIMER_API_KEY"
            )
        raise Unreachable("the server needs an API key: send one with --api-key")
    if status == 403:
        raise Unreachable("the API key may use some models only: send one for all")
    text = body.decode(errors="replace")
    if status != 200 or not any(prefix in text for prefix in _PREFIXES):
        more = ", and start it without --no-metrics" if status == 404 else ""
        raise Unreachable(
            f"{url} does not answer like Latimer (status {status}). Write the address of "
            f"'latimer serve', not that of an engine{more}"
        )
    return text


@click.command()
@click.argument("url", default=DEFAULT)
@click.option("--api-key", envvar="LATIMER_API_KEY", help="An API key of the server.")
@click.option("--once", is_flag=True, help="Print one table and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows of one table as JSON.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two scrapes, which are the window of rates and percentiles.",
)
def top(url: str, api_key: str | None, once: bool, as_json: bool, interval: float) -> None:
    """Show what the models and engines of a running server do, in a live table.

    Rates and percentiles are those of the time between two scrapes (--interval), also with --once
    and --json, which wait for it. Without a terminal there is one table.

    \b
    Columns:
      MODEL        its first name
      ENGINE       its name, or its kind
      STATE        of the engine; DOWN if it does not answer
      RUN, WAIT    requests that run on the engine, that wait for the model
      KV           share of the KV cache in use, of engines that report it
      IN/S, OUT/S  tokens of prompts, and generated tokens, a second
      TTFT, P95    time to the first token of streams: median, 95th percentile
      ITL, P95     time between two tokens of streams: median, 95th percentile

    \b
    Examples:
      latimer top
      latimer top http://10.0.0.5:8000 --api-key secret
      latimer top --json | jq '.rows[].output'
    """
    place = base_of(url) + "/metrics"
    # LATIMER_API_KEY can have several keys, for the server.
    key = api_key.partition(",")[0].strip() if api_key else None
    if as_json or once or not sys.stdout.isatty():
        _print_once(place, key, as_json, interval)
    else:
        _run(place, key, interval)


def _print_once(place: str, key: str | None, as_json: bool, interval: float) -> None:
    try:
        before = scrape_of(fetch(place, key), time.monotonic())
        time.sleep(interval)
        now = scrape_of(fetch(place, key), time.monotonic())
    except (Unreachable, ValueError) as error:
        say(f"latimer top: {error}.")
        sys.exit(EXIT_CHECK)
    rows = rows_of(before, now)
    if as_json:
        reply: Any = {
            "seconds": round(now.at - before.at, 3),
            "rows": [asdict(row) for row in rows],
        }
        click.echo(orjson.dumps(reply, option=orjson.OPT_INDENT_2).decode())
    else:
        click.echo("\n".join(table_of(rows, shutil.get_terminal_size().columns)))


def _run(place: str, key: str | None, interval: float) -> None:
    before: Scrape | None = None
    now: Scrape | None = None
    failed = 0
    with _screen():
        while True:
            begun = time.monotonic()
            note = ""
            try:
                before, now = now, scrape_of(fetch(place, key), begun)
                failed = 0
            except (Unreachable, ValueError) as error:
                failed += 1
                note = printable(str(error))
            _draw(place, before, now, failed, note)
            time.sleep(max(interval - (time.monotonic() - begun), 0.1))


def _draw(place: str, before: Scrape | None, now: Scrape | None, failed: int, note: str) -> None:
    size = shutil.get_terminal_size()
    head = f"{place}  {time.strftime('%H:%M:%S')}"
    lines = [head[: size.columns], note[: size.columns], ""]
    if now is not None:
        rows = rows_of(before, now)
        for row in rows if failed else ():
            row.state = "DOWN" if failed >= _MOST_FAILED else "STALE"
        lines += table_of(rows, size.columns)
    elif failed:
        lines.append("DOWN")
    # Each line is overwritten and its rest deleted, which does not flicker.
    text = "".join(f"{line}\x1b[K\r\n" for line in lines[: size.lines - 1])
    sys.stdout.write(f"\x1b[H{text}\x1b[J")
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Use the terminal's other screen, and restore the first one at every end."""

    def end(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, before)
