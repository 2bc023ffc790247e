"""The metrics that only vLLM's names have: what its boards read, and Latimer shows in another way.

`DERIVED` are made of Latimer's own values when a page is written. `COUNTED` are those of
`prometheus-fastapi-instrumentator`, which vLLM serves for its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

from .metric_rows import (
    CACHED,
    ENGINE,
    FROM_BEST,
    GENERATION,
    PROMPT,
    RUNNING,
    STATE,
    WAITING,
    Histogram,
    Labels,
    Row,
    Values,
)
from .record import OTHER, Record

_vllm = partial(Row, latimer=None)
_http = partial(Row, latimer=None, vllm="")

_FEW = (0.1, 0.5, 1.0)
_MANY = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0,
    7.5, 10.0, 30.0, 60.0,
)  # fmt: skip

_REQUESTS = _http(
    "http_requests",
    "counter",
    "Requests by method, path and class of their HTTP status.",
    ("method", "status", "handler"),
)
_BY_PATH = _http(
    "http_request_duration_seconds",
    "histogram",
    "Duration of requests by method and path.",
    ("method", "handler"),
    buckets=_FEW,
)
_ALL = _http(
    "http_request_duration_highr_seconds",
    "histogram",
    "Duration of all requests.",
    (),
    buckets=_MANY,
)
COUNTED: tuple[Row, ...] = (_REQUESTS, _BY_PATH, _ALL)

# Another method is `OTHER`, since clients make them up.
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
# The instrumentator's name for the handler of an unknown path.
_NO_HANDLER = "none"
# The durations that wait for their histograms.
_MOST = 512


class Http:
    """The requests of an app, by method, path and status."""

    def __init__(self) -> None:
        # As for `REQUESTS`, a rise from the start can be seen.
        self._counts: dict[Labels, int] = dict.fromkeys(
            product(("POST",), ("2xx", "4xx", "5xx"), GENERATION), 0
        )
        self._waiting: dict[Labels, list[float]] = {}
        self._by_path: dict[Labels, Histogram] = {}
        self._all = Histogram(_MANY)

    def add(self, record: Record) -> None:
        """Add a request that has ended."""
        method = record.method if record.method in _METHODS else OTHER
        handler = record.endpoint if record.endpoint != OTHER else _NO_HANDLER
        labels = method, f"{record.status // 100}xx", handler
        self._counts[labels] = self._counts.get(labels, 0) + 1
        durations = self._waiting.setdefault((method, handler), [])
        durations.append(record.ended - record.begun_at)
        if len(durations) >= _MOST:
            self._fold()

    def _fold(self) -> None:
        for labels, durations in self._waiting.items():
            if durations:
                self._by_path.setdefault(labels, Histogram(_FEW)).add(durations)
                self._all.add(durations)
                durations.clear()

    def copy(self) -> Http:
        """Return the same numbers, which change no more."""
        self._fold()
        copy = Http()
        copy._counts = {**self._counts}
        copy._by_path = {labels: one.copy() for labels, one in self._by_path.items()}
        copy._all = self._all.copy()
        return copy

    def values(self) -> Values:
        """Return the values of `COUNTED`."""
        return {
            _REQUESTS.name: {labels: [count] for labels, count in self._counts.items()},
            _BY_PATH.name: {labels: one.numbers() for labels, one in self._by_path.items()},
            _ALL.name: {(): self._all.numbers()},
        }


_AWAKE, _OFFLOADED, _DISCARDED = "awake", "weights_offloaded", "discard_all"


def _waiting_of(values: Values) -> dict[Labels, list[float]]:
    """Return the waiting requests with the first engine of their model, since boards ask for one.

    They wait for any engine of it.
    """
    first: dict[str, str] = {}
    for model, engine in values[RUNNING.name]:
        first.setdefault(model, engine)
    return {
        (model, first[model]): numbers
        for (model,), numbers in values[WAITING.name].items()
        if model in first
    }


def _reasons_of(values: Values) -> dict[Labels, list[float]]:
    """Return the waiting requests by reason: for a place, or for an engine to be loaded."""
    serving = {
        model
        for (model, _), (state,) in values[STATE.name].items()
        if FROM_BEST[int(state)] in ("ready", "draining")
    }
    found: dict[Labels, list[float]] = {}
    for (model, engine), (count,) in _waiting_of(values).items():
        for reason in ("capacity", "deferred"):
            is_this = (reason == "capacity") == (model in serving)
            found[model, engine, reason] = [count if is_this else 0]
    return found


def _sleep_of(values: Values) -> dict[Labels, list[float]]:
    """Return the sleep state of engines that serve requests or can be loaded for them.

    The board shows an engine that has none as down.
    """
    found: dict[Labels, list[float]] = {}
    for labels, (state,) in values[STATE.name].items():
        name = FROM_BEST[int(state)]
        if name in ("ready", "draining", "unloaded", "loading"):
            is_awake = name in ("ready", "draining")
            found[*labels, _AWAKE] = [int(is_awake)]
            found[*labels, _OFFLOADED] = [0]
            found[*labels, _DISCARDED] = [int(not is_awake)]
    return found


def _sources_of(values: Values) -> dict[Labels, list[float]]:
    """Return the prompt tokens by their source; no engine gets them from elsewhere."""
    found: dict[Labels, list[float]] = {}
    for labels, (count,) in values[PROMPT.name].items():
        (cached,) = values[CACHED.name].get(labels, [0])
        found[*labels, "local_compute"] = [count - cached]
        found[*labels, "local_cache_hit"] = [cached]
        found[*labels, "external_kv_transfer"] = [0]
    return found


# Their rows, and how their values are made.
_MADE: Mapping[Row, Callable[[Values], dict[Labels, list[float]]]] = {
    _vllm(
        "num_requests_waiting",
        "gauge",
        "Requests that wait for any engine of a model, with the label of the first one.",
        ENGINE,
    ): _waiting_of,
    _vllm(
        "num_requests_waiting_by_reason",
        "gauge",
        "Requests that wait: capacity for a place, deferred for a model to be loaded.",
        (*ENGINE, "reason"),
    ): _reasons_of,
    _vllm(
        "engine_sleep_state",
        "gauge",
        "awake is 1 for an engine that serves, and discard_all for one that is not loaded.",
        (*ENGINE, "sleep_state"),
    ): _sleep_of,
    _vllm(
        "prompt_tokens_by_source",
        "counter",
        "Prompt tokens by their source: evaluated, or from a cache.",
        (*ENGINE, "source"),
    ): _sources_of,
    _vllm("prompt_tokens_cached", "counter", "Prompt tokens that came from a cache.", ENGINE): (
        lambda values: values[CACHED.name]
    ),
    _vllm(
        "prompt_tokens_cached_by_source",
        "counter",
        "Prompt tokens that came from a cache, all of them from that of the engine itself.",
        (*ENGINE, "source"),
    ): lambda values: {(*key, "device"): count for key, count in values[CACHED.name].items()},
}
DERIVED: tuple[Row, ...] = tuple(_MADE)


def derived(values: Values) -> Values:
    """Return the values of `DERIVED`."""
    return {row.name: make(values) for row, make in _MADE.items()}
