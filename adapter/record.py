"""The measurements of a request, for its observers.

The path of a request notes a few times, and keeps what it has made anyway. Observers
(`observers.Observer`) do the rest after its end, for several requests together. So a token costs no
call more, and a request a few. A record holds nothing that is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from ..backends.base import Finish
from ..backends.errors import LatimerError, reason_label
from ..backends.queue import Ticket, Try
from ..schemas.openai.common import FinishReason

# The paths of operators, whose requests are neither logged nor counted.
PROBES = frozenset({"/health", "/ready", "/metrics"})
# The endpoint of requests for paths that no route has, and the model of those for no model or for
# a name that no model has. Clients make up both.
OTHER = "other"
# The engine of a request of a fleet that got none.
NO_ENGINE = "none"
# The code of a background response that its client has cancelled or deleted.
CANCELLED = "cancelled"
# The status of a request whose client disconnected before the response.
GONE = 499

# Names of kinds of engines in metrics and logs, instead of those in messages.
_KINDS = {"llama.cpp in process": "llama_cpp", "llama-server": "llama_server"}


@cache
def engine_name(kind: str) -> str:
    """Return the name of a kind of engines in metrics."""
    return _KINDS.get(kind, kind)


@cache
def _words_of(status: int) -> str:
    """Return the words of an HTTP status as a code."""
    try:
        words = HTTPStatus(status).phrase
    except ValueError:
        return f"status_{status}"
    return words.lower().replace(" ", "_").replace("-", "_")


class Trace(NamedTuple):
    """The span of a request that runs (`traces.Traces`).

    Args:
        span: the span.
        offset: the difference between the time since 1970 and that of `time.perf_counter`.
        trace_id: the id of its trace, as 32 hexadecimal digits.
        headers: the lines of HTTP headers which tell an engine that the span is the parent.
    """

    span: Any
    offset: float
    trace_id: str
    headers: bytes


class _Facts:
    """The facts of every request, which `observers._completed` sets; see `Record`.

    They are slots. As attributes of an instance, they would exceed those that Python keeps without
    a dictionary, and the observers would take about a tenth more time.
    """

    __slots__ = (
        "begun_at", "cached_tokens", "client", "end_user", "ended", "endpoint", "has_table",
        "is_left", "key", "method", "model", "overhead", "path", "queued", "request_id", "status",
    )  # fmt: skip

    begun_at: float
    cached_tokens: int | None
    client: str
    end_user: str
    ended: float
    endpoint: str
    has_table: bool
    is_left: bool
    key: str
    method: str
    model: str
    overhead: float
    path: str
    queued: float
    request_id: str
    status: int


class Record(_Facts):
    """The measurements of a request; times are those of `time.perf_counter`, 0 if unknown.

    Attributes:
        keeps: True to get the response object of a stream too, as a plain response would have it.
        method, path, client: of the request; the client is its address, if it is known.
        request_id: the id that its response names.
        forwarded: the headers that its calls of engines have too, by their fields in logs.
        endpoint: the path of its route, with the names of parameters.
        model: the first name of its model; `OTHER` without one.
        asked: the name of the model in the request; empty if the request got to none.
        engine: the name of its engine in a fleet, or `NO_ENGINE`; without a fleet, its kind.
        ticket: the request as the queue of its engine knows it.
        tries: the engines that have not served it before; see `Ticket`.
        key: the name of its API key's table, or a hash of the key; empty without a key.
        has_table: True if the key has a table.
        end_user: the end user that it names.
        begun_at: the time at which it arrived.
        loads_at: the time at which it began to wait for a model to be loaded.
        loading: the seconds of that wait, which ends before `begun`.
        begun: the time at which the engine gets its jobs.
        queued: the seconds that it waited for a load, and for a place on an engine.
        overhead: the seconds that it was in Latimer: before `begun`, but for `loading`, and after
            `last`.
        arrivals: the times at which tokens of a stream arrived; those that arrive together have
            one. None for plain responses.
        counted: the index of the last of these which the times between tokens have in the metrics.
        last: the time at which the engine's last events arrived.
        ended: the time of its end.
        status: the status of the response, or `GONE`.
        is_stream: True if the response is a stream, or was to be one.
        is_left: True if the client disconnected before the end.
        is_detached: True for work that outlives its request.
        count: the number of its choices.
        max_tokens: the tokens that it allows for each choice; 0 if it sets no limit.
        prompt_tokens, completion_tokens: as in its usage, if it has succeeded; else the first is
            None.
        reasoning_tokens: the same; None if its usage has no such number.
        cached_tokens: the tokens of its prompts that the engine's cache had; None without choices.
        finishes, reasons: the ends of its choices, and their finish reasons, if it has succeeded.
        choices_per_prompt: how many of these each prompt has.
        reply: the response object, if `keeps` is set.
        failed: the status of the error that ended it, also in a stream; 0 without one.
        error_code: the code of this error. An error without a code and a field has the words of its
            status, such as `not_found`.
        param: the field at fault, if the error names one.
        limit: the limit that it exceeded: `requests`, `tokens` or `concurrent` of its key, or the
            `queue`.
        trace: its span; None if it has none.
    """

    # Most requests leave most of these values as they are.
    keeps = is_stream = is_detached = False
    asked = engine = error_code = limit = param = ""
    ticket: Ticket | None = None
    loads_at = loading = begun = last = 0.0
    arrivals: list[float] | None = None
    failed = max_tokens = completion_tokens = counted = 0
    count = choices_per_prompt = 1
    prompt_tokens: int | None = None
    reasoning_tokens: int | None = None
    finishes: Sequence[Finish] = ()
    reasons: Sequence[FinishReason | None] = ()
    reply: Mapping[str, Any] | None = None
    trace: Trace | None = None
    forwarded: Mapping[str, str] | None = None
    tries: tuple[Try, ...] = ()

    def begin(self, asked: str, engine: str, ticket: Ticket | None) -> None:
        """Note that the engine gets the request's jobs now."""
        self.asked, self.engine, self.ticket, self.begun = asked, engine, ticket, perf_counter()

    def succeed(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Note the tokens of a request without choices, whose engine has finished now."""
        self.last = perf_counter()
        self.prompt_tokens, self.completion_tokens = prompt_tokens, completion_tokens

    def note_wait(self, since: float) -> None:
        """Note that it has waited for a model until now, unless the engine has its jobs."""
        if not self.begun:
            self.loads_at = self.loads_at or since
            self.loading += perf_counter() - since

    def repeat(self, error: LatimerError, is_pooled: bool) -> None:
        """Note that an engine has not served the request, which is prepared and sent again.

        Args:
            is_pooled: True if its model has several engines.
        """
        ticket, self.ticket = self.ticket, None
        engine, earlier = "", tuple[Try, ...]()
        if ticket is not None and ticket.engine:
            engine, earlier = ticket.engine, ticket.tries
        elif self.engine:
            engine = NO_ENGINE if is_pooled else engine_name(self.engine)
        if engine:
            now = monotonic()
            begun = now + self.begun - perf_counter() if self.begun and not earlier else 0.0
            self.tries += (*earlier, Try(engine, reason_label(error), begun, now))

    @property
    def partial(self) -> tuple[int, int]:
        """The tokens that were evaluated and generated for a request without usage, as far known.

        Tokens that arrive together have one time, so an engine knows better how many there are.
        """
        ticket, arrived = self.ticket, len(self.arrivals or ())
        return (0, arrived) if ticket is None else (ticket.prompt, max(ticket.generated, arrived))

    def fail(self, error: Exception) -> None:
        """Note the error that ended the request; the error itself would keep all of it.

        An error of other software has a status only if it is Starlette's: else it is a 500, and its
        attributes can be anything.
        """
        self.failed, self.param, self.error_code, self.limit, words = 500, "", "", "", ""
        if isinstance(error, LatimerError):
            self.failed, self.limit = error.status, getattr(error, "limit", "")
            self.param, self.error_code = error.param or "", error.code or ""
            words = getattr(error, "log_code", "")
        elif isinstance(error, HTTPException):
            self.failed = error.status_code
        if not (self.error_code or self.param):
            # OpenAI's errors for invalid JSON, and for an unknown path or object, have neither.
            self.error_code = words or _words_of(self.failed)
