"""Metrics for Prometheus: what requests and engines did, under the names and buckets of vLLM.

Requests add to plain numbers, a few at a time (`Metrics.take`). A scrape makes samples of them.
`prometheus_client`'s own counters would take a lock and several calls for each value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from itertools import accumulate
from operator import add, sub
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from ..backends.fleet.replica import State
from ..schemas.openai.common import Usage
from .readiness import States
from .record import OTHER, PROBES, Record, engine_name
from .service import Observer, Service
from .store.records import Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Names: TypeAlias = Literal["latimer", "vllm"]
Labels: TypeAlias = tuple[str, ...]
# The values of metrics, by the name of their row and their labels: a number, or how many values are
# in each bucket of a histogram, and their sum.
Values: TypeAlias = dict[str, dict[Labels, list[float]]]

# The media type of Prometheus' own text format.
PLAIN = "text/plain; version=0.0.4"
# The prefixes of names.
OWN, VLLM = "latimer_", "vllm:"
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_DURATION = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LENGTH = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_OVERHEAD = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


class Row(NamedTuple):
    """A metric.

    Args:
        name: its name without a prefix; that of a counter without `_total`.
        text: its help.
        labels: the names of its labels.
        is_own: True if vLLM has no such metric.
        buckets: the upper bounds of a histogram.
        merge: what the numbers of two processes become.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    is_own: bool = False
    buckets: tuple[float, ...] = ()
    merge: Callable[[float, float], float] = add


_MODEL, _ENGINE = ("model_name",), ("model_name", "engine")
_own = partial(Row, is_own=True)
_histogram = partial(Row, kind="histogram", labels=_ENGINE)

# The histograms of all requests that have succeeded, then those of streams, in the order in which
# `Metrics.end` has their values.
_OF_ALL = (
    _histogram(
        "e2e_request_latency_seconds",
        text="Duration of a request that succeeded, from its arrival to its last byte.",
        buckets=_DURATION,
    ),
    _histogram(
        "request_queue_time_seconds",
        text="Wait of a request for a place on an engine.",
        buckets=_DURATION,
    ),
    _histogram(
        "adapter_overhead_seconds",
        text="Time of a request in Latimer: from its arrival to the engine, and from the engine's "
        "last token to the last byte.",
        buckets=_OVERHEAD,
        is_own=True,
    ),
    _histogram("request_prompt_tokens", text="Prompt tokens of a request.", buckets=_LENGTH),
    _histogram("request_generation_tokens", text="Generated tokens of a request.", buckets=_LENGTH),
)
_OF_STREAMS = (
    _histogram(
        "time_to_first_token_seconds",
        text="Time from the arrival of a streamed request to its first token.",
        buckets=_FIRST_TOKEN,
    ),
    _histogram(
        "request_prefill_time_seconds",
        text="Time of a streamed request on its engine before the first token.",
        buckets=_DURATION,
    ),
    _histogram(
        "request_decode_time_seconds",
        text="Time of a streamed request from its first token to its last.",
        buckets=_DURATION,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        text="Mean time between two tokens of a streamed request.",
        buckets=_BETWEEN_TOKENS,
    ),
)
_BETWEEN = _histogram(
    "inter_token_latency_seconds",
    text="Time between two tokens of a stream with one choice, as they arrive.",
    buckets=_BETWEEN_TOKENS,
)
# The counters of tokens, by the attributes of `Series` with their values.
_TOKENS: Mapping[str, Row] = {
    "prompt": Row("prompt_tokens", "counter", "Prompt tokens.", _ENGINE),
    "generated": Row("generation_tokens", "counter", "Generated tokens.", _ENGINE),
    "looked_up": Row(
        "prefix_cache_queries", "counter", "Prompt tokens that were looked up in a cache.", _ENGINE
    ),
    "cached": Row("prefix_cache_hits", "counter", "Prompt tokens that came from a cache.", _ENGINE),
    "reasoning": _own("reasoning_tokens", "counter", "Generated tokens of reasoning.", _ENGINE),
    "drafted": Row("spec_decode_num_draft_tokens", "counter", "Drafted tokens.", _ENGINE),
    "accepted": Row(
        "spec_decode_num_accepted_tokens", "counter", "Drafted tokens that were used.", _ENGINE
    ),
}
_FINISHED = Row(
    "request_success",
    "counter",
    "Choices by the reason of their end; error for a request that failed on an engine, and abort "
    "for one whose client disconnected.",
    (*_ENGINE, "finished_reason"),
)
_AFFINITY = _own(
    "affinity_requests",
    "counter",
    "Requests of models with several engines, by whether their engine had the prompt.",
    (*_ENGINE, "result"),
)
_REQUESTS = _own(
    "requests",
    "counter",
    "Requests by path and HTTP status; 499 if the client disconnected before the response.",
    ("model_name", "endpoint", "status"),
)
_GONE = _own(
    "client_disconnects", "counter", "Requests whose client disconnected before the end.", _MODEL
)
_REFUSED = _own(
    "limit_refusals",
    "counter",
    "Requests refused with a 429: by a limit of their key, or because the queue is full.",
    ("limit",),
)
_RUNNING = Row("num_requests_running", "gauge", "Calls that an engine runs.", _ENGINE)
_WAITING = Row("num_requests_waiting", "gauge", "Requests that wait for an engine.", _MODEL)
_CACHE = Row(
    "kv_cache_usage_perc",
    "gauge",
    "Share of the KV cache that running calls take, from 0 to 1; only of engines that report it.",
    _ENGINE,
    merge=max,
)
_STATE = _own(
    "engine_state", "gauge", "1 for the state of an engine.", (*_ENGINE, "state"), merge=max
)
_RETRIES = _own("engine_retries", "counter", "Calls sent again to another engine.", _MODEL)
_EJECTIONS = _own("engine_ejections", "counter", "Ejections of an engine that failed.", ("engine",))
_LOADS = _own("model_loads", "counter", "Loads of an engine's model.", ("engine",))
_EVICTIONS = _own(
    "model_evictions",
    "counter",
    "Unloads of an engine's model, for another one or because it was idle.",
    ("engine",),
)
_STORE_QUEUE = _own("store_queue_objects", "gauge", "Objects that wait for the store.", ())
_STORE_LOST = _own("store_lost_objects", "counter", "Objects that the store has not kept.", ())
_STORE_UP = _own("store_up", "gauge", "1 if the store works.", (), merge=min)
_BUILD = _own("build_info", "gauge", "Latimer's version.", ("version",), merge=max)

ROWS: tuple[Row, ...] = (
    _RUNNING, _WAITING, _CACHE, _STATE, *_OF_STREAMS, _BETWEEN, *_OF_ALL, *_TOKENS.values(),
    _FINISHED, _REQUESTS, _GONE, _REFUSED, _AFFINITY, _RETRIES, _EJECTIONS, _LOADS, _EVICTIONS,
    _STORE_QUEUE, _STORE_LOST, _STORE_UP, _BUILD,
)  # fmt: skip

_ROWS = {row.name: row for row in ROWS}
# The states of an engine in `Values` are the indices of this list, so that the worst is the most.
_FROM_BEST: tuple[State, ...] = (
    "ready", "unloaded", "draining", "loading", "unavailable", "failed",
)  # fmt: skip

# It reads a file.
_version = cache(version)

# The requests that wait for their histograms: about a millisecond of work.
_MOST_ROWS = 512
# The reasons that every model has from the start.
_REASONS = ("stop", "length", "tool_calls", "error", "abort")
_LIMITS = ("requests", "tokens", "concurrent", "queue")


class Histogram:
    """The values of a histogram: how many there are in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def copy(self) -> Histogram:
        """Return a histogram with the same values."""
        copy = Histogram(self.bounds)
        copy.counts, copy.total = [*self.counts], self.total
        return copy

    def numbers(self) -> list[float]:
        """Return the numbers of values in the buckets, and their sum; see `Values`."""
        return [*self.counts, self.total]

    def add(self, values: Iterable[float]) -> None:
        """Add values; many at once take a fifth of the time for each."""
        ordered = sorted(values)
        before = 0
        for index, bound in enumerate(self.bounds):
            # Most values are in the first buckets.
            if before == len(ordered):
                break
            upto = bisect_right(ordered, bound, before)
            self.counts[index] += upto - before
            before = upto
        self.counts[-1] += len(ordered) - before
        self.total += sum(ordered)

    def add_gaps(self, record: Record) -> None:
        """Add the times between the tokens of a stream; those of several choices are mixed."""
        arrivals = record.arrivals
        if arrivals and record.count == 1:
            self.add(map(sub, arrivals[1:], arrivals))


class Series:
    """The sums of the requests of one model on one engine.

    Attributes:
        rows: the values for each of the histograms `of_all`, which they do not have yet;
            `stream_rows` those for `of_streams`.
        shown: what a scrape has shown of generated tokens, which must not become less.
    """

    __slots__ = (
        "accepted", "affinity", "between", "cached", "drafted", "finished", "generated", "of_all",
        "of_streams", "prompt", "reasoning", "rows", "shown", "stream_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.of_all = [Histogram(row.buckets) for row in _OF_ALL]
        self.of_streams = [Histogram(row.buckets) for row in _OF_STREAMS]
        self.between = Histogram(_BETWEEN_TOKENS)
        self.rows: list[tuple[float, ...]] = []
        self.stream_rows: list[tuple[float, ...]] = []
        self.prompt = self.generated = self.cached = self.reasoning = 0
        self.drafted = self.accepted = 0
        self.finished: dict[str, int] = dict.fromkeys(_REASONS, 0)
        self.affinity: dict[str, int] = {}
        self.shown = 0

    @property
    def looked_up(self) -> int:
        """The number of prompt tokens that were looked up in a cache, which are all."""
        return self.prompt

    def add(self, record: Record, usage: Usage) -> None:
        """Add a request that has succeeded."""
        finished, party = self.finished, record.party
        prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
        self.prompt += prompt
        self.generated += generated
        for index, finish in enumerate(record.finishes):
            reason = record.reasons[index] or "stop"
            finished[reason] = finished.get(reason, 0) + 1
            if not index % record.choices_per_prompt:
                self.cached += finish.cached_tokens
            if finish.accepted_tokens or finish.rejected_tokens:
                self.drafted += finish.accepted_tokens + finish.rejected_tokens
                self.accepted += finish.accepted_tokens
        if "completion_tokens_details" in usage:
            self.reasoning += usage["completion_tokens_details"]["reasoning_tokens"]
        if party is not None and party.affinity:
            self.affinity[party.affinity] = self.affinity.get(party.affinity, 0) + 1
        begun_at, queued = record.begun_at, record.queued
        values: tuple[float, ...]
        values = record.ended - begun_at, queued, record.overhead, prompt, generated
        self.rows.append(values)
        if record.arrivals:
            first = record.arrivals[0]
            decode = record.arrivals[-1] - first
            between = decode / (generated - 1) if generated > 1 else 0.0
            # Before `begun`, the request waited for a load.
            prefill = first - record.begun - (queued - record.loading)
            values = first - begun_at, prefill, decode, between
            self.stream_rows.append(values)
            self.between.add_gaps(record)
        if len(self.rows) >= _MOST_ROWS:
            self.fold()

    def fold(self) -> None:
        """Add the rows to their histograms."""
        for rows, histograms in ((self.rows, self.of_all), (self.stream_rows, self.of_streams)):
            if rows:
                for histogram, column in zip(histograms, zip(*rows, strict=True), strict=True):
                    histogram.add(column)
                rows.clear()

    def copy(self) -> Series:
        """Return a series with the same values."""
        self.fold()
        copy = Series()
        copy.of_all = [one.copy() for one in self.of_all]
        copy.of_streams = [one.copy() for one in self.of_streams]
        copy.between = self.between.copy()
        for name in _TOKENS.keys() - {"looked_up"}:
            setattr(copy, name, getattr(self, name))
        copy.finished, copy.affinity = {**self.finished}, {**self.affinity}
        return copy


class Elsewhere(Protocol):
    """The metrics of other processes that serve the same port."""

    async def total(self, states: States) -> Values:
        """Return the values of all processes; this one has engines in these states."""


class Metrics(Observer):
    """The metrics of one app.

    Attributes:
        names: `vllm` for vLLM's names, where it has the metric.
        elsewhere: the other processes, if there are any.
    """

    keeps = False

    def __init__(self, names: Names = "latimer") -> None:
        self.names = names
        self.elsewhere: Elsewhere | None = None
        self._series: dict[tuple[str, str], Series] = {}
        self._requests: dict[tuple[str, str, int], int] = {}
        self._gone: dict[str, int] = {}
        self._refused = dict.fromkeys(_LIMITS, 0)

    def take(self, ended: Sequence[Record]) -> None:
        """Count requests."""
        requests = self._requests
        for record in ended:
            model = record.model
            if not record.is_detached and record.endpoint not in PROBES:
                key = model, record.endpoint, record.status
                requests[key] = requests.get(key, 0) + 1
            if record.is_left:
                self._gone[model] = self._gone.get(model, 0) + 1
            if record.usage is None:
                self._failed(record)
            else:
                engine = record.engine
                series = self._series.get((model, engine)) or self._new(model, engine)
                series.add(record, record.usage)

    def _new(self, model: str, engine: str) -> Series:
        return self._series.setdefault((model, engine), Series())

    def _failed(self, record: Record) -> None:
        """Count a request without usage: it was refused, or it failed."""
        if record.limit:
            self._refused[record.limit] += 1
        elif record.begun:
            series = self._new(record.model, record.engine)
            if record.is_left:
                series.finished["abort"] += 1
            elif record.failed >= 500:
                series.finished["error"] += 1
            # What was generated until then.
            series.generated += len(record.arrivals or ())
            series.between.add_gaps(record)

    def snapshot(self, service: Service, states: States) -> Snapshot:
        """Return the values now, with those of streams that run."""
        service.observe()
        for model in states:
            for engine in model.engines:
                # Series without values exist from the start.
                self._new(model.name or OTHER, engine.name)
        copies = {key: one.copy() for key, one in self._series.items()}
        for exchange in service.running:
            record = exchange.record
            if record is not None and record.arrivals:
                party = record.party
                name = party.engine if party is not None else ""
                copy = copies.get((exchange.model, name or engine_name(record.engine)))
                if copy is not None:
                    copy.generated += len(record.arrivals)
                    copy.between.add_gaps(record)
        for key, copy in copies.items():
            # Tokens that arrive together are one event, and a stop sequence removes some.
            one = self._series[key]
            one.shown = copy.generated = max(one.shown, copy.generated)
        store = None if service.store is None else service.store.status()
        return Snapshot(
            copies, {**self._requests}, {**self._gone}, {**self._refused}, states, store
        )


@dataclass(eq=False, slots=True)
class Snapshot:
    """The numbers of one process at one time.

    Args:
        series: by model and engine.
        requests: by model, path and status.
        gone: by model; `refused`: by limit.
    """

    series: Mapping[tuple[str, str], Series]
    requests: Mapping[tuple[str, str, int], int]
    gone: Mapping[str, int]
    refused: Mapping[str, int]
    states: States
    store: Status | None

    def values(self) -> Values:
        """Return the values of every metric of `ROWS`."""
        found = {row.name: numbers for row, numbers in self._of_series()}
        for row, values in (*self._of_states(), *self._of_requests()):
            found[row.name] = {(*map(str, key),): [value] for key, value in values.items()}
        return found

    def _of_requests(self) -> Iterator[tuple[Row, Mapping[tuple[Any, ...], float]]]:
        yield _REQUESTS, self.requests
        yield _GONE, {(model,): count for model, count in self.gone.items()}
        yield _REFUSED, {(limit,): count for limit, count in self.refused.items()}
        if self.store is not None:
            state, waiting, lost = self.store
            yield _STORE_QUEUE, {(): waiting}
            yield _STORE_LOST, {(): lost}
            yield _STORE_UP, {(): int(state == "ok")}
        yield _BUILD, {(_version("latimer"),): 1}

    def _of_series(self) -> Iterator[tuple[Row, dict[Labels, list[float]]]]:
        all_series = self.series.items()
        for index, row in enumerate(_OF_ALL):
            yield row, {key: one.of_all[index].numbers() for key, one in all_series}
        for index, row in enumerate(_OF_STREAMS):
            yield row, {key: one.of_streams[index].numbers() for key, one in all_series}
        yield _BETWEEN, {key: one.between.numbers() for key, one in all_series}
        for name, row in _TOKENS.items():
            yield row, {key: [getattr(one, name)] for key, one in all_series}
        for row, name in ((_FINISHED, "finished"), (_AFFINITY, "affinity")):
            counts: dict[Labels, list[float]] = {
                (*key, label): [count]
                for key, one in all_series
                for label, count in getattr(one, name).items()
            }
            yield row, counts

    def _of_states(self) -> Iterator[tuple[Row, Mapping[tuple[Any, ...], float]]]:
        engines = {
            (model.name or OTHER, engine.name): engine
            for model in self.states
            for engine in model.engines
        }
        yield _RUNNING, {key: engine.load.running for key, engine in engines.items()}
        yield _WAITING, {(model.name or OTHER,): model.waiting for model in self.states}
        caches = {key: engine.load.cache for key, engine in engines.items()}
        yield _CACHE, {key: cache for key, cache in caches.items() if cache is not None}
        yield _STATE, {key: _FROM_BEST.index(engine.state) for key, engine in engines.items()}
        pools = [one.pool for one in self.states if one.pool is not None]
        yield (
            _RETRIES,
            {(one.name,): one.pool.retries for one in self.states if one.pool is not None},
        )
        replicas = {one.name: one for pool in pools for one in pool.replicas}
        yield _EJECTIONS, {(name,): one.ejections for name, one in replicas.items()}
        loaders = {name: one.loader for name, one in replicas.items() if one.loader is not None}
        yield _LOADS, {(name,): one.loads for name, one in loaders.items()}
        yield _EVICTIONS, {(name,): one.unloads for name, one in loaders.items()}


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
        for row in ROWS:
            if row.name in self.values:
                prefix = VLLM if self.names == "vllm" and not row.is_own else OWN
                make = _histogram_of if row.kind == "histogram" else _numbers_of
                yield make(row, prefix + row.name, self.values[row.name])


def _numbers_of(row: Row, name: str, values: Mapping[Labels, list[float]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    metric: Metric = kind(name, row.text, labels=row.labels)
    for labels, (value,) in values.items():
        samples = [(labels, value)]
        if row is _STATE:
            samples = [
                ((*labels, one), int(index == value)) for index, one in enumerate(_FROM_BEST)
            ]
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
