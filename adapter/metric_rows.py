"""The table of the metrics: their names, labels and buckets, and the values of histograms.

`metrics.py` counts what they show. `vllm_metrics.py` has those that only vLLM's names have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ..backends.fleet.replica import State

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
BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LENGTH = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_OVERHEAD = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


class Row(NamedTuple):
    """A metric.

    Args:
        name: its name without a prefix; that of a counter without `_total`.
        text: its help.
        labels: the names of its labels.
        buckets: the upper bounds of a histogram.
        merge: what the numbers of two processes become.
        latimer, vllm: the prefix with Latimer's names, and with vLLM's; None to omit it there.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    merge: Callable[[float, float], float] = add
    latimer: str | None = OWN
    vllm: str | None = VLLM

    def full_name(self, names: Names) -> str | None:
        """Return the name with its prefix; None if it is omitted with these names."""
        prefix = self.vllm if names == "vllm" else self.latimer
        return None if prefix is None else prefix + self.name


MODEL, ENGINE = ("model_name",), ("model_name", "engine")
_own = partial(Row, vllm=OWN)
_any = partial(Row, latimer="", vllm="")
_histogram = partial(Row, kind="histogram", labels=ENGINE)
_GENERATION = ("generation",)

# The histograms of all requests that have succeeded, then those of streams, in the order in which
# `Series.add` has their values.
OF_ALL = (
    _histogram(
        "e2e_request_latency_seconds",
        text="Duration of a request that succeeded, from its arrival to its last byte.",
        buckets=_DURATION,
    ),
    _histogram(
        "request_queue_time_seconds",
        text="Wait of a request for a place on an engine, also if it fails.",
        buckets=_DURATION,
    ),
    _histogram(
        "adapter_overhead_seconds",
        text="Time of a request in Latimer: from its arrival to the engine, and from the engine's "
        "last token to the last byte.",
        buckets=_OVERHEAD,
        vllm=OWN,
    ),
    _histogram("request_prompt_tokens", text="Prompt tokens of a request.", buckets=_LENGTH),
    _histogram("request_generation_tokens", text="Generated tokens of a request.", buckets=_LENGTH),
    _histogram(
        "request_inference_time_seconds",
        text="Time of a request on its engine, without its wait.",
        buckets=_DURATION,
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        text="Prompt tokens of a request that no cache had.",
        buckets=_LENGTH,
    ),
    _histogram(
        "request_max_num_generation_tokens",
        text="Generated tokens of the longest choice of a request.",
        buckets=_LENGTH,
    ),
    _histogram("request_params_n", text="Choices for each prompt of a request.", buckets=_CHOICES),
)
MOST_TOKENS = _histogram(
    "request_params_max_tokens",
    text="Tokens that a request allows for each choice, if it sets a limit.",
    buckets=_LENGTH,
)
OF_STREAMS = (
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
        buckets=BETWEEN_TOKENS,
    ),
)
BETWEEN = _histogram(
    "inter_token_latency_seconds",
    text="Time between two tokens of a stream with one choice, as they arrive.",
    buckets=BETWEEN_TOKENS,
)
# The counters of tokens, by the attributes of `Series` with their values.
TOKENS: Mapping[str, Row] = {
    "prompt": Row("prompt_tokens", "counter", "Prompt tokens.", ENGINE),
    "generated": Row("generation_tokens", "counter", "Generated tokens.", ENGINE),
    "looked_up": Row(
        "prefix_cache_queries", "counter", "Prompt tokens that were looked up in a cache.", ENGINE
    ),
    "cached": Row("prefix_cache_hits", "counter", "Prompt tokens that came from a cache.", ENGINE),
    "reasoning": _own("reasoning_tokens", "counter", "Generated tokens of reasoning.", ENGINE),
    "drafted": Row("spec_decode_num_draft_tokens", "counter", "Drafted tokens.", ENGINE),
    "accepted": Row(
        "spec_decode_num_accepted_tokens", "counter", "Drafted tokens that were used.", ENGINE
    ),
}
PROMPT, CACHED = TOKENS["prompt"], TOKENS["cached"]
FINISHED = Row(
    "request_success",
    "counter",
    "Choices by the reason of their end; error for a request that failed on an engine or got none, "
    "and abort for one whose client disconnected.",
    (*ENGINE, "finished_reason"),
)
AFFINITY = _own(
    "affinity_requests",
    "counter",
    "Requests of models with several engines, by whether their engine had the prompt.",
    (*ENGINE, "result"),
)
REQUESTS = _own(
    "requests",
    "counter",
    "Requests by path and HTTP status; 499 if the client disconnected before the response.",
    ("model_name", "endpoint", "status"),
)
# The series of requests that every model has from the start: Prometheus sees no rise in one that
# begins at 40. They are a tenth of the lines of a model. 4xx other than 429 are faults of clients.
GENERATION = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses",
)  # fmt: skip
STATUSES = (200, 429, 500, 502, 503, 504)
GONE = _own(
    "client_disconnects", "counter", "Requests whose client disconnected before the end.", MODEL
)
REFUSED = _own(
    "limit_refusals",
    "counter",
    "Requests refused with a 429: by a limit of their key, or because the queue is full.",
    ("limit",),
)
# Only keys with a table have a name, so their number is that of the settings.
KEY_REQUESTS = _own(
    "key_requests",
    "counter",
    "Requests by the table of their API key and HTTP status.",
    ("key", "model_name", "status"),
)
# The first of the two numbers of a key is that of its prompts.
KEY_TOKENS = (
    _own(
        "key_prompt_tokens",
        "counter",
        "Prompt tokens of requests with an API key that has a table.",
        ("key", "model_name"),
    ),
    _own(
        "key_generation_tokens",
        "counter",
        "Generated tokens of requests with an API key that has a table.",
        ("key", "model_name"),
    ),
)
RUNNING = Row("num_requests_running", "gauge", "Calls that an engine runs.", ENGINE)
# `vllm_metrics` has it with the label `engine`, as vLLM.
WAITING = Row(
    "num_requests_waiting", "gauge", "Requests that wait for an engine.", MODEL, vllm=None
)
CACHE = Row(
    "kv_cache_usage_perc",
    "gauge",
    "Share of the KV cache that running calls take, from 0 to 1; only of engines that report it.",
    ENGINE,
    merge=max,
)
PREEMPTIONS = Row(
    "num_preemptions",
    "counter",
    "Calls that an engine interrupted for others, and continued; only in process.",
    ENGINE,
)
# The states of an engine in `Values` are the indices of this list, so that the worst is the most.
FROM_BEST: tuple[State, ...] = (
    "ready", "unloaded", "draining", "loading", "unavailable", "failed",
)  # fmt: skip
STATE = _own(
    "engine_state",
    "gauge",
    f"1 for the state of an engine: {', '.join(FROM_BEST)}.",
    (*ENGINE, "state"),
    merge=max,
)
RETRIES = _own(
    "engine_retries",
    "counter",
    "Calls sent again to another engine, by the engine that has not served them and the reason.",
    (*ENGINE, "reason"),
)
EJECTIONS = _own("engine_ejections", "counter", "Ejections of an engine that failed.", ("engine",))
LOADS = _own("model_loads", "counter", "Loads of an engine's model.", ("engine",))
EVICTIONS = _own(
    "model_evictions",
    "counter",
    "Unloads of an engine's model, for another one or because it was idle.",
    ("engine",),
)
STORE_QUEUE = _own("store_queue_objects", "gauge", "Objects that wait for the store.", ())
STORE_LOST = _own("store_lost_objects", "counter", "Objects that the store has not kept.", ())
STORE_UP = _own("store_up", "gauge", "1 if the store works.", (), merge=min)
LIMITS_UP = _own(
    "limits_up",
    "gauge",
    "1 if the store of the limits answers, as one in memory does.",
    (),
    merge=min,
)
BUILD = _own("build_info", "gauge", "Latimer's version.", ("version",), merge=max)

# The names of `prometheus_client`, which all programs in Python have.
_PROCESS = (
    _any("process_virtual_memory_bytes", "gauge", "Virtual memory of Latimer.", ()),
    _any("process_resident_memory_bytes", "gauge", "Resident memory of Latimer.", ()),
    _any(
        "process_start_time_seconds", "gauge", "Start of Latimer, in seconds since 1970.", (),
        merge=min,
    ),
    _any("process_cpu_seconds", "counter", "CPU time of Latimer.", ()),
    _any("process_open_fds", "gauge", "Open files and connections of Latimer.", ()),
    _any("process_max_fds", "gauge", "Open files and connections that Latimer may have.", ()),
    _any("python_gc_objects_collected", "counter", "Objects that were collected.", _GENERATION),
    _any(
        "python_gc_objects_uncollectable", "counter", "Objects that cannot be collected.",
        _GENERATION,
    ),
    _any("python_gc_collections", "counter", "Collections of garbage.", _GENERATION),
    _any(
        "python_info", "gauge", "Python's version.",
        ("implementation", "major", "minor", "patchlevel", "version"), merge=max,
    ),
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    RUNNING, WAITING, CACHE, STATE, *OF_STREAMS, BETWEEN, *OF_ALL, MOST_TOKENS, *TOKENS.values(),
    PREEMPTIONS, FINISHED, REQUESTS, GONE, REFUSED, KEY_REQUESTS, *KEY_TOKENS, AFFINITY, RETRIES,
    EJECTIONS, LOADS, EVICTIONS, STORE_QUEUE, STORE_LOST, STORE_UP, LIMITS_UP, BUILD, *_PROCESS,
)  # fmt: skip


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
