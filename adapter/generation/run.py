"""Run the jobs of a request on a backend, in one loop for every kind of response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from time import perf_counter
from typing import Any, Protocol

from ...backends import offload
from ...backends.base import (
    Backend,
    Batch,
    Event,
    Finish,
    Generation,
    Piece,
    Pushing,
    Stream,
)
from ...backends.errors import EngineError, LatimerError, RequestError
from ...backends.queue import Ticket
from ...backends.streams import AT_ONCE, merge_streams
from ...schemas.openai.common import Usage
from ..limits.leases import Lease
from ..record import Record
from .choice import NO_ECHO, Choice, Echo, MessageFormat

# The cost of making a choice, in bytes of JSON that take as long to parse.
CHOICE = 64

_FINISH, _REASON = attrgetter("finish"), attrgetter("reason")


@dataclass(slots=True)
class Plan:
    """The jobs of a request, and the rules for its choices.

    Args:
        jobs: one per prompt; choice j of job i has the index `i * choices + j`.
        choices: the number of choices per prompt.
        usage: counts the tokens as the endpoint does.
        echoes: the echo of each job's choices; empty if no choice needs one.
        form: how to split a choice into parts; None if all of it is content.
        translate: turns an error of the jobs into the endpoint's error.
        ticket: the request as engines know it; None to make one if there are several jobs.
        lease: what the request has of the limits of its key, and then a ticket; None without
            limits.
    """

    jobs: Sequence[Generation]
    choices: int
    usage: Callable[[Sequence[Finish], int], Usage]
    echoes: Sequence[Echo] = ()
    form: MessageFormat | None = None
    translate: Callable[[LatimerError], LatimerError] = lambda error: error
    ticket: Ticket | None = None
    lease: Lease | None = None


class Sink(Protocol):
    """A consumer of events: it sends them (`sinks.StreamSink`) or joins them (`sinks.JsonSink`).

    Attributes:
        at_once: True to take all events as one batch, when the last one has arrived.
        pushes: True if it can take events without waiting; see `attach`.
        holds: True if it has something to release at its end; see `close`.
    """

    at_once: bool
    pushes: bool = False
    holds: bool = False

    def begin(self, choices: Sequence[Choice], per_prompt: int) -> None:
        """Take the choices that the events belong to, and the number of choices per prompt."""
        ...

    def attach(
        self, batches: Pushing, lease: Lease | None, arrived: Callable[[float], None] | None
    ) -> None:
        """Take what the batches push, and count it as `run` counts what it takes.

        Args:
            lease: counts the tokens.
            arrived: notes the time of each batch.
        """
        return

    async def take(self, batch: Batch) -> None:
        """Take the events that arrived together."""
        ...

    async def finish(self, finishes: Sequence[Finish], usage: Usage) -> Mapping[str, Any] | None:
        """Take the end of every choice; return the response object if one was made."""
        ...

    async def fail(self, error: LatimerError) -> bool:
        """Send the error if the response has started; return False if it has not."""
        ...

    def close(self) -> None:
        """Release what the sink holds; nothing follows."""
        return


async def run(backend: Backend, plan: Plan, sink: Sink, record: Record | None = None) -> None:
    """Run a plan to its end.

    Args:
        record: what is measured of the request.

    Raises:
        LatimerError: an error occurred before the response started.
    """
    # All jobs have the same stop sequences.
    job, lease = plan.jobs[0], plan.lease
    stops, is_one = job.stops, len(plan.jobs) == 1
    if is_one and plan.choices == 1 and not stops.texts:
        # Most requests are no more than that.
        choices = [Choice((), plan.echoes[0] if plan.echoes else NO_ECHO, plan.form)]
    else:
        choices = await _choices(backend, plan)
    cuts = plan.form is not None and stops.by_reader
    arrivals = None if record is None else record.arrivals
    arrived = None if arrivals is None else arrivals.append
    try:
        sink.begin(choices, plan.choices)
        if record is not None:
            record.begun, record.max_tokens = perf_counter(), job.max_tokens or 0
            if len(choices) > 1:
                record.count, record.choices_per_prompt = len(choices), plan.choices
        if is_one:
            job.ticket = plan.ticket
            stream = backend.open(job)
        else:
            if job.streamed:
                await _check(backend, plan)
            stream = _merged(backend, plan)
        async with stream as batches:
            if sink.pushes and not cuts and hasattr(batches, "push_to"):
                sink.attach(batches, lease, arrived)  # type: ignore[arg-type]
            events: list[Event] = []
            async for batch in batches:
                if lease is not None:
                    # An event is a token, but for a piece that joins many, and for an end.
                    lease.generated += len(batch)
                    if job.is_joined and type(batch[-1]) is not Finish:
                        lease.generated += sum(map(_more, batch))
                if cuts:
                    _read(batch, choices, plan)
                if arrived is not None:
                    arrived(perf_counter())
                if sink.at_once:
                    events += batch
                else:
                    await sink.take(batch)
                if type(batch[-1]) is Finish and getattr(batches, "is_over", False):
                    # Most responses save the step that only says so.
                    break
            if record is not None:
                record.last = perf_counter()
                if arrivals and not isinstance(batch[0], Piece):
                    # The last batch was the end alone.
                    arrivals.pop()
            if sink.at_once:
                await sink.take(events)
        finishes: list[Finish] = [*filter(None, map(_FINISH, choices))]
        if len(finishes) != len(choices):
            raise EngineError("The engine ended its response before every choice was finished.")
        usage = plan.usage(finishes, plan.choices)
        if plan.form is not None:
            await _count_reasoning(usage, choices, backend)
        reply = await sink.finish(finishes, usage)
        if record is not None:
            # The response itself is released.
            record.prompt_tokens = usage["prompt_tokens"]
            record.completion_tokens = usage["completion_tokens"]
            if "completion_tokens_details" in usage:
                record.reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
            record.finishes, record.reasons = finishes, [*map(_REASON, choices)]
            if record.keeps:
                record.reply = reply
    except BaseException as error:
        if plan.ticket is not None:
            _note_tokens(plan.ticket, plan, choices)
        if not isinstance(error, LatimerError):
            raise
        if await sink.fail(plan.translate(error)):
            if record is not None:
                record.fail(error)
            return
        if lease is not None:
            # The client has got nothing.
            lease.generated = 0
        # Raised by a frame that holds it in a variable, it would hold the whole request.
        raise plan.translate(error) from None
    finally:
        if sink.holds:
            sink.close()
    if lease is not None:
        lease.settle(usage["total_tokens"])


def _note_tokens(ticket: Ticket, plan: Plan, choices: Sequence[Choice]) -> None:
    """Note the tokens of a request that was cut, as far as its engine has counted them."""
    lease, ends = plan.lease, [*filter(None, map(_FINISH, choices))]
    if plan.choices == 1:
        # Engines note the tokens of the jobs that were cut, and the others have ended.
        ticket.prompt += sum(end.prompt_tokens for end in ends)
        ticket.generated += sum(end.completion_tokens for end in ends)
    if lease is not None:
        lease.generated = max(ticket.generated, lease.generated - len(ends))
        lease.prompt = ticket.prompt or (len(plan.jobs) == 1 and ticket.input) or lease.prompt


def _more(event: Event) -> int:
    """Return the tokens of an event beyond one."""
    return event.token_count - 1 if isinstance(event, Piece) and event.token_count else 0


async def _choices(backend: Backend, plan: Plan) -> list[Choice]:
    """Return the choices of a plan."""
    late = backend.capabilities.late_logprobs
    # In bytes of JSON.
    cost = CHOICE * len(plan.jobs) * plan.choices + sum(map(len, plan.jobs[0].stops.texts))
    if cost <= offload.SMALL:
        return _made(plan, late)
    return await offload.run(cost, _made, plan, late)


def _made(plan: Plan, late_logprobs: bool) -> list[Choice]:
    echoes = plan.echoes or (NO_ECHO,) * len(plan.jobs)
    late = late_logprobs and plan.jobs[0].stops.by_reader and plan.jobs[0].logprobs is not None
    return [
        Choice(job.stops.texts, echo, plan.form, late)
        for job, echo in zip(plan.jobs, echoes, strict=True)
        for _ in range(plan.choices)
    ]


async def _count_reasoning(usage: Usage, choices: Sequence[Choice], backend: Backend) -> None:
    """Add the number of reasoning tokens to the usage.

    The engine's tokenizer counts them if the engine does not report their number.
    """
    total = 0
    for choice in choices:
        count = choice.reasoning_tokens
        if count is None:
            reasoning = choice.reasoning
            count = len(await backend.tokenize(reasoning, add_special=False, parse_special=True))
            most = choice.finish.completion_tokens if choice.finish is not None else 0
            count = min(count, most)
        total += count
    if total:
        details = usage["completion_tokens_details"]
        usage["completion_tokens_details"] = {**details, "reasoning_tokens": total}


def _read(batch: Batch, choices: Sequence[Choice], plan: Plan) -> None:
    """Parse the pieces of choices with parts, and let the engine end those that a stop cuts."""
    for event in batch:
        if isinstance(event, Piece):
            end = choices[event.choice].read(event)
            if end is not None:
                job, choice = divmod(event.choice, plan.choices)
                plan.jobs[job].stops.ends[choice] = end


def _merged(backend: Backend, plan: Plan) -> Stream:
    """Return the streams of several jobs as one."""
    ticket = plan.ticket or Ticket()
    streams = (
        _shifted(backend.open(replace(job, ticket=ticket)), i, plan)
        for i, job in enumerate(plan.jobs)
    )
    # A fleet takes a call only with its first token, which another prompt need not wait for.
    return merge_streams(streams, ticket, accepted=1 if backend.is_pooled else None)


async def _check(backend: Backend, plan: Plan) -> None:
    """Raise the first error of the prompts before the stream begins."""
    for i, job in enumerate(plan.jobs):
        with naming(i, len(plan.jobs)):
            await backend.check(job)
        if i % AT_ONCE == AT_ONCE - 1:
            await offload.give_way()


@contextmanager
def naming(index: int, count: int) -> Iterator[None]:
    """Name the prompt that an error is about, if there are several."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt" and count > 1:
            raise error.about(f"prompt[{index}]") from None
        raise


@asynccontextmanager
async def _shifted(source: Stream, job: int, plan: Plan) -> AsyncIterator[AsyncIterator[Batch]]:
    """Yield a job's stream with the indices that its choices have in the response."""
    offset = job * plan.choices

    async def shift(batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
        async for batch in batches:
            yield [event._replace(choice=event.choice + offset) for event in batch]

    with naming(job, len(plan.jobs)):
        async with source as batches:
            yield shift(batches)
