"""Metrics for Prometheus: what requests and engines did, under the names and buckets of vLLM.

Requests add to plain numbers, a few at a time (`Metrics.take`). A scrape makes samples of them.
`prometheus_client`'s own counters would take a lock and several calls for each value.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import accumulate, product
from operator import sub
from typing import TYPE_CHECKING, Any, Protocol

from .metric_rows import (
    AFFINITY,
    BETWEEN,
    BETWEEN_TOKENS,
    BUILD,
    CACHE,
    EJECTIONS,
    EVICTIONS,
    FINISHED,
    FROM_BEST,
    GENERATION,
    GONE,
    KEY_REQUESTS,
    KEY_TOKENS,
    LIMITS_UP,
    LOADS,
    MOST_TOKENS,
    OF_ALL,
    OF_STREAMS,
    PLAIN,
    PREEMPTIONS,
    REFUSED,
    REQUESTS,
    RETRIES,
    ROWS,
    RUNNING,
    STATE,
    STATUSES,
    STORE_LOST,
    STORE_QUEUE,
    STORE_UP,
    TOKENS,
    WAITING,
    Histogram,
    Labels,
    Names,
    Row,
    Values,
)
from .observers import Observer
from .readiness import States
from .record import CANCELLED, NO_ENGINE, OTHER, Record, engine_name
from .service import Service
from .store.records import Status
from .vllm_metrics import COUNTED, DERIVED, Http, derived

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_ROWS = {row.name: row for row in (*ROWS, *COUNTED)}
# It reads a file.
_version = cache(version)

# The requests that wait for their histograms: about a millisecond of work.
_MOST_ROWS = 512
# The times between tokens that wait for theirs, which take as long.
_MOST_GAPS = 4096
# The reasons that every model has from the start.
_REASONS = ("stop", "length", "tool_calls", "error", "abort")
_LIMITS = ("requests", "tokens", "concurrent", "queue")
# The place of the time to the first token among the histograms of streams.
_FIRST = [row.name for row in OF_STREAMS].index("time_to_first_token_seconds")
# The place of the wait among the histograms of all requests.
_QUEUED = [row.name for row in OF_ALL].index("request_queue_time_seconds")
# The places of three numbers among those of all requests.
_PROMPT, _GENERATED, _COMPUTED = (
    [row.name for row in OF_ALL].index(f"request_{name}_tokens")
    for name in ("prompt", "generation", "prefill_kv_computed")
)


class Series:
    """The sums of the requests of one model on one engine.

    Attributes:
        rows: the values for each of the histograms `of_all`, which they do not have yet;
            `stream_rows` those for `of_streams`, `limits` for `most` and `gaps` for `between`.
        shown: what a scrape has shown of generated tokens, which must not become less. Prometheus
            takes less for a restart.
    """

    __slots__ = (
        "accepted", "affinity", "between", "cached", "drafted", "finished", "gaps", "generated",
        "limits", "looked_up", "most", "of_all", "of_streams", "prompt", "reasoning", "rows",
        "shown", "stream_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.of_all = [Histogram(row.buckets) for row in OF_ALL]
        self.of_streams = [Histogram(row.buckets) for row in OF_STREAMS]
        self.between = Histogram(BETWEEN_TOKENS)
        self.gaps: list[float] = []
        self.rows: list[tuple[float, ...]] = []
        self.stream_rows: list[tuple[float, ...]] = []
        self.most = Histogram(MOST_TOKENS.buckets)
        self.limits: list[int] = []
        self.prompt = self.generated = self.looked_up = self.cached = self.reasoning = 0
        self.drafted = self.accepted = 0
        self.finished = defaultdict(int, dict.fromkeys(_REASONS, 0))
        self.affinity: dict[str, int] = {}
        self.shown = 0

    def add(self, record: Record, prompt: int) -> None:
        """Add a request that has succeeded, with the tokens of its prompts; see `fold`."""
        finished, ticket = self.finished, record.ticket
        generated, longest = record.completion_tokens, 0
        for finish, reason in zip(record.finishes, record.reasons, strict=True):
            finished[reason or "stop"] += 1
            if finish.completion_tokens > longest:
                longest = finish.completion_tokens
            if finish.accepted_tokens or finish.rejected_tokens:
                self.drafted += finish.accepted_tokens + finish.rejected_tokens
                self.accepted += finish.accepted_tokens
        if record.reasoning_tokens:
            self.reasoning += record.reasoning_tokens
        if ticket is not None and ticket.affinity:
            self.affinity[ticket.affinity] = self.affinity.get(ticket.affinity, 0) + 1
        begun_at, queued = record.begun_at, record.queued
        # Before `begun`, the request waited for a load.
        on_engine = record.begun + queued - record.loading
        seconds = record.last - on_engine
        self.rows.append(
            (
                record.ended - begun_at, queued, record.overhead, prompt, generated,
                seconds if seconds > 0.0 else 0.0, prompt - (record.cached_tokens or 0), longest,
                record.choices_per_prompt,
            )
        )  # fmt: skip
        if record.max_tokens:
            self.limits.append(record.max_tokens)
        if record.arrivals:
            first = record.arrivals[0]
            decode = record.arrivals[-1] - first
            between = decode / (generated - 1) if generated > 1 else 0.0
            # The first prompt of several can have a token while the last one waits.
            prefill = first - on_engine if first > on_engine else 0.0
            self.stream_rows.append((first - begun_at, prefill, decode, between))
            if len(record.arrivals) > 1:
                self.add_gaps(record)

    def add_gaps(self, record: Record, end: int | None = None) -> None:
        """Add the times between the tokens of a stream, without those that it has.

        Args:
            end: how many of its arrivals are taken into account; by default all.
        """
        # Those of several choices are mixed.
        if not record.arrivals or record.count != 1:
            return
        arrivals = record.arrivals[record.counted : end]
        self.gaps += map(sub, arrivals[1:], arrivals)
        record.counted += len(arrivals) - 1
        if len(self.gaps) >= _MOST_GAPS:
            self.between.add(self.gaps)
            self.gaps.clear()

    def fold(self) -> None:
        """Add the rows to their histograms and to the sums of tokens, all of them together."""
        for rows, histograms in ((self.rows, self.of_all), (self.stream_rows, self.of_streams)):
            if rows:
                columns = [*zip(*rows, strict=True)]
                for histogram, column in zip(histograms, columns, strict=True):
                    histogram.add(column)
                if rows is self.rows:
                    prompt = sum(columns[_PROMPT])
                    self.prompt += prompt
                    self.looked_up += prompt
                    self.cached += prompt - sum(columns[_COMPUTED])
                    self.generated += sum(columns[_GENERATED])
                rows.clear()
        for numbers, histogram in ((self.limits, self.most), (self.gaps, self.between)):
            histogram.add(numbers)
            numbers.clear()

    def copy(self) -> Series:
        """Return a series with the same values."""
        self.fold()
        copy = Series()
        copy.of_all = [one.copy() for one in self.of_all]
        copy.of_streams = [one.copy() for one in self.of_streams]
        copy.between, copy.most = self.between.copy(), self.most.copy()
        for name in TOKENS:
            setattr(copy, name, getattr(self, name))
        copy.finished, copy.affinity = self.finished.copy(), {**self.affinity}
        return copy


class Elsewhere(Protocol):
    """The metrics of other processes that serve the same port."""

    async def total(self, states: States) -> Values:
        """Return the values of all processes; this one has engines in these states."""


class Metrics(Observer):
    """The metrics of one app.

    Attributes:
        names: `vllm` for vLLM's names, where it has the metric.
        is_open: True if everybody may see them.
        elsewhere: the other processes, if there are any.
    """

    keeps = False

    def __init__(self, names: Names = "latimer", is_open: bool = False) -> None:
        self.names, self.is_open = names, is_open
        self.elsewhere: Elsewhere | None = None
        self._http = Http() if names == "vllm" else None
        self._series: dict[tuple[str, str], Series] = {}
        self._requests: dict[tuple[str, str, int], int] = {}
        self._gone: dict[str, int] = {}
        self._refused = dict.fromkeys(_LIMITS, 0)
        # Of keys that have a table: requests by its name, model and status, and tokens of prompts
        # and generated ones by its name and model.
        self._key_requests: dict[tuple[str, str, int], int] = {}
        self._key_tokens: dict[tuple[str, str], tuple[int, int]] = {}

    def take(self, ended: Sequence[Record]) -> None:
        """Count requests."""
        requests, all_series = self._requests, self._series
        for record in ended:
            model, engine, prompt = record.model, record.engine, record.prompt_tokens
            if not record.is_detached:
                key = model, record.endpoint, record.status
                requests[key] = requests.get(key, 0) + 1
                if self._http is not None:
                    self._http.add(record)
            if record.is_left:
                self._gone[model] = self._gone.get(model, 0) + 1
            if record.has_table:
                name = record.key
                if not record.is_detached:
                    row = name, model, record.status
                    self._key_requests[row] = self._key_requests.get(row, 0) + 1
                # What the limits of the key charge.
                tokens = record.partial if prompt is None else (prompt, record.completion_tokens)
                used = self._key_tokens.get((name, model), (0, 0))
                self._key_tokens[name, model] = used[0] + tokens[0], used[1] + tokens[1]
            if prompt is None:
                self._failed(record)
            else:
                series = all_series.get((model, engine)) or self._new(model, engine)
                series.add(record, prompt)
        for series in [*all_series.values()]:
            if len(series.rows) >= _MOST_ROWS:
                series.fold()

    def _new(self, model: str, engine: str) -> Series:
        return self._series.setdefault((model, engine), Series())

    def _failed(self, record: Record) -> None:
        """Count a request without usage: it was refused, or it failed."""
        if record.limit:
            self._refused[record.limit] += 1
        elif (
            record.begun
            or (record.queued and record.model != OTHER)
            or (record.failed >= 500 and record.endpoint in GENERATION)
        ):
            series = self._new(record.model, record.engine or NO_ENGINE)
            if record.is_left or record.error_code == CANCELLED:
                series.finished["abort"] += 1
            elif record.failed >= 500:
                series.finished["error"] += 1
            prompt, generated = record.partial
            series.prompt += prompt
            series.generated += generated
            if record.ticket is not None:
                series.looked_up += record.ticket.looked_up
                series.cached += record.ticket.cached
            series.add_gaps(record)
            # Clients leave slow engines and long queues, which must not look fast by that. Those
            # that did not wait count, too, or the engines would look slow.
            if record.queued or (record.begun and record.engine != NO_ENGINE):
                series.of_all[_QUEUED].add([record.queued])
            if record.arrivals:
                series.of_streams[_FIRST].add([record.arrivals[0] - record.begun_at])

    async def snapshot(self, service: Service, states: States) -> Snapshot:
        """Return the values now, with those of streams that run."""
        for model in states:
            name = model.name or OTHER
            # Series without values exist from the start.
            for engine in model.engines:
                self._new(name, engine.name)
            self._gone.setdefault(name, 0)
            for labels in product((name,), GENERATION, STATUSES):
                self._requests.setdefault(labels, 0)
        await self._count_running(service)
        service.observers.flush()
        # Another thread may add one.
        copies = {key: one.copy() for key, one in [*self._series.items()]}
        for key, record in _streams(service):
            if key in copies:
                copies[key].generated += len(record.arrivals or ())
        for key, copy in copies.items():
            # Tokens that arrive together are one event, and a stop sequence removes some.
            one = self._series[key]
            one.shown = copy.generated = max(one.shown, copy.generated)
        store = None if service.store is None else service.store.status()
        http = None if self._http is None else self._http.copy()
        retries = {
            (model.name, *failure): count
            for model in states
            if model.pool is not None
            for failure, count in model.pool.retries.items()
        }
        requests, gone, refused = {**self._requests}, {**self._gone}, {**self._refused}
        limits = service.limits.is_up()
        keys = {**self._key_requests}, {**self._key_tokens}
        return Snapshot(
            copies, requests, gone, refused, *keys, states, store, limits, retries, http
        )

    async def _count_running(self, service: Service) -> None:
        """Add the times between the tokens of streams that run, at most some at a time."""
        work = 0
        for key, record in [*_streams(service)]:
            series, arrivals = self._series.get(key), record.arrivals
            if series is None or not arrivals or record.count != 1:
                continue
            # The last arrival may be the end alone, which counts as no token.
            while record.counted < len(arrivals) - 2:
                before = record.counted
                series.add_gaps(record, min(before + _MOST_GAPS, len(arrivals) - 1))
                work += record.counted - before
                if work >= _MOST_GAPS:
                    work = 0
                    await asyncio.sleep(0)


def _streams(service: Service) -> Iterator[tuple[tuple[str, str], Record]]:
    """Yield the streams that run and have tokens, each with the model and engine of its series."""
    for exchange in [*service.observers.running]:
        record = exchange.record
        if record is not None and record.arrivals:
            name = record.ticket.engine if record.ticket is not None else ""
            yield (exchange.model, name or engine_name(record.engine)), record


@dataclass(eq=False, slots=True)
class Snapshot:
    """The numbers of one process at one time.

    Args:
        series: by model and engine.
        requests: by model, path and status.
        gone: by model; `refused`: by limit.
        key_requests: by the table of a key, model and status.
        key_tokens: of prompts, and generated ones, by the table of a key and model.
        retries: by model, engine and reason.
        http: the requests under other names, if they are served.
    """

    series: Mapping[tuple[str, str], Series]
    requests: Mapping[tuple[str, str, int], int]
    gone: Mapping[str, int]
    refused: Mapping[str, int]
    key_requests: Mapping[tuple[str, str, int], int]
    key_tokens: Mapping[tuple[str, str], tuple[int, int]]
    states: States
    store: Status | None
    limits_up: bool
    retries: Mapping[tuple[str, str, str], int]
    http: Http | None = None

    def values(self) -> Values:
        """Return the values of every metric of `ROWS`, and of `vllm_metrics.COUNTED`."""
        found = {row.name: numbers for row, numbers in self._of_series()}
        for row, values in (*self._of_states(), *self._of_requests()):
            found[row.name] = {(*map(str, key),): [value] for key, value in values.items()}
        return found | _of_process() | ({} if self.http is None else self.http.values())

    def _of_requests(self) -> Iterator[tuple[Row, Mapping[tuple[Any, ...], float]]]:
        yield REQUESTS, self.requests
        yield GONE, {(model,): count for model, count in self.gone.items()}
        yield REFUSED, {(limit,): count for limit, count in self.refused.items()}
        yield KEY_REQUESTS, self.key_requests
        for index, row in enumerate(KEY_TOKENS):
            yield row, {key: tokens[index] for key, tokens in self.key_tokens.items()}
        if self.store is not None:
            state, waiting, lost = self.store
            yield STORE_QUEUE, {(): waiting}
            yield STORE_LOST, {(): lost}
            yield STORE_UP, {(): int(state == "ok")}
        yield LIMITS_UP, {(): int(self.limits_up)}
        yield BUILD, {(_version("latimer"),): 1}

    def _of_series(self) -> Iterator[tuple[Row, dict[Labels, list[float]]]]:
        all_series = self.series.items()
        for index, row in enumerate(OF_ALL):
            yield row, {key: one.of_all[index].numbers() for key, one in all_series}
        for index, row in enumerate(OF_STREAMS):
            yield row, {key: one.of_streams[index].numbers() for key, one in all_series}
        yield BETWEEN, {key: one.between.numbers() for key, one in all_series}
        yield MOST_TOKENS, {key: one.most.numbers() for key, one in all_series}
        for name, row in TOKENS.items():
            yield row, {key: [getattr(one, name)] for key, one in all_series}
        for row, name in ((FINISHED, "finished"), (AFFINITY, "affinity")):
            counts: dict[Labels, list[float]] = {
                (*key, label): [count]
                for key, one in all_series
                for label, count in getattr(one, name).items()
            }
            if row is FINISHED:
                # A fleet's requests that get no engine have no other series from the start.
                for model in self.states:
                    if model.pool is not None:
                        counts.setdefault((model.name, NO_ENGINE, "error"), [0])
            yield row, counts

    def _of_states(self) -> Iterator[tuple[Row, Mapping[tuple[Any, ...], float]]]:
        engines = {
            (model.name or OTHER, engine.name): engine
            for model in self.states
            for engine in model.engines
        }
        yield RUNNING, {key: engine.load.running for key, engine in engines.items()}
        yield WAITING, {(model.name or OTHER,): model.waiting for model in self.states}
        caches = {key: engine.load.cache for key, engine in engines.items()}
        yield CACHE, {key: cache for key, cache in caches.items() if cache is not None}
        yield PREEMPTIONS, {key: engine.load.preemptions for key, engine in engines.items()}
        # An engine that has failed can be loaded again, but nobody knows whether that succeeds.
        states = {
            key: "failed" if engine.state == "unloaded" and engine.reason else engine.state
            for key, engine in engines.items()
        }
        yield STATE, {key: FROM_BEST.index(state) for key, state in states.items()}
        pools = [one.pool for one in self.states if one.pool is not None]
        yield RETRIES, self.retries
        replicas = {one.name: one for pool in pools for one in pool.replicas}
        yield EJECTIONS, {(name,): one.ejections for name, one in replicas.items()}
        loaders = {name: one.loader for name, one in replicas.items() if one.loader is not None}
        yield LOADS, {(name,): one.loads for name, one in loaders.items()}
        yield EVICTIONS, {(name,): one.unloads for name, one in loaders.items()}


def _of_process() -> Values:
    """Return the values of the process, as `prometheus_client` measures it on this platform."""
    from prometheus_client import (
        CollectorRegistry,
        GCCollector,
        PlatformCollector,
        ProcessCollector,
    )

    registry = CollectorRegistry(auto_describe=False)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    found: Values = {}
    for family in registry.collect():
        row = _ROWS.get(family.name)
        if row is not None and family.samples:
            found[row.name] = {
                tuple(one.labels[label] for label in row.labels): [one.value]
                for one in family.samples
            }
    return found


def merged(one: Values, other: Values) -> Values:
    """Return the values of two processes together."""
    found = {name: {**values} for name, values in one.items()}
    for name, values in other.items():
        merge, own = _ROWS[name].merge, found.setdefault(name, {})
        for labels, numbers in values.items():
            own[labels] = [*map(merge, own[labels], numbers)] if labels in own else numbers
    return found


def counted(values: Values) -> Values:
    """Return the values that stay when their process has ended: counters and histograms."""
    return {name: found for name, found in values.items() if _ROWS[name].kind != "gauge"}


@dataclass(eq=False, slots=True)
class Page:
    """The page of `/metrics`; a collector of `prometheus_client`."""

    names: Names
    values: Values

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their content type, for a scraper's `Accept` header."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        # The library's OpenMetrics has `vllm_` for `vllm:`, which every format allows.
        encode, content_type = choose_encoder(accept if self.names == "latimer" else PLAIN)
        return encode(registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        is_vllm = self.names == "vllm"
        values = self.values | derived(self.values) if is_vllm else self.values
        for row in (*ROWS, *COUNTED, *DERIVED):
            name = row.full_name(self.names)
            if name is not None and row.name in values:
                make = _histogram_of if row.kind == "histogram" else _numbers_of
                yield make(row, name, values[row.name])


def _numbers_of(row: Row, name: str, values: Mapping[Labels, list[float]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    metric: Metric = kind(name, row.text, labels=row.labels)
    for labels, (value,) in values.items():
        samples = [(labels, value)]
        if row is STATE:
            samples = [((*labels, one), int(index == value)) for index, one in enumerate(FROM_BEST)]
        for sample in samples:
            metric.add_metric(*sample)  # type: ignore[attr-defined]
    return metric


def _histogram_of(row: Row, name: str, values: Mapping[Labels, list[float]]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    metric = HistogramMetricFamily(name, row.text, labels=row.labels)
    bounds = [*map(str, row.buckets), "+Inf"]
    for labels, (*counts, total) in values.items():
        metric.add_metric(labels, [*zip(bounds, accumulate(counts), strict=True)], total)
    return metric
