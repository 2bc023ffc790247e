"""Create a response in the background, and follow its events (contract of responses, 9.6)."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import orjson

from ...backends import offload
from ...backends.errors import EngineError, EngineUnavailable, LatimerError
from ...backends.fleet.loading import REQUEST
from ...schemas.openai.responses import ResponseRequest
from ..errors import ShuttingDown, StoreUnavailable, printable, unexpected
from ..generation.frames import COMMENT, in_stream, padded
from ..generation.run import Plan
from ..generation.sinks import Answer, respond
from ..model_entry import ServedModel
from ..record import CANCELLED
from ..request import EVENT_STREAM, Exchange
from ..responses.background import Job
from ..responses.response import USABLE, BackgroundEncoder, Draft
from ..service import Service

log = logging.getLogger("latimer")


class Work(NamedTuple):
    """The work on a response.

    Args:
        show: see `Answer`.
        store: stores the response object at its end; None if it is not stored.
    """

    served: ServedModel
    plan: Plan
    draft: Draft
    show: Callable[..., Any] | None
    store: Callable[..., Awaitable[None]] | None


# Prepares a response once more, for the engine that serves it now.
Again: TypeAlias = Callable[[Exchange], Awaitable[Work]]


async def begin(
    exchange: Exchange,
    service: Service,
    request: ResponseRequest,
    work: Work,
    body: Mapping[str, Any],
    again: Again,
) -> None:
    """Start the work, and send the queued response, or its events as they are made.

    Args:
        body: the request's body, as it is stored.

    Raises:
        StoreUnavailable: the store is required, and does not take the response.
    """
    keepalive = work.served.policy.keepalive
    job = Job(exchange.key, exchange.request_id, work.draft.begun, body, exchange.size, keepalive)

    queued = orjson.dumps(job.reply)

    async def record(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            job.log.add(message["body"])

    recorder = exchange.detached(record)
    if service.observers.all:
        service.observers.recorded(recorder)
    service.background.start(job, _run(recorder, service, request, work, job, again))
    # A task that is cancelled before it has begun does nothing at all.
    await asyncio.sleep(0)
    try:
        await service.background.announce(job)
    except StoreUnavailable:
        await job.cancel(delete=True)
        raise
    if request.stream:
        await follow(exchange, job, -1)
    else:
        await exchange.reply(200, queued)


async def follow(exchange: Exchange, job: Job, after: int, pads: bool = False) -> None:
    """Send the events of a response after the one with a number, until the response ends.

    Args:
        pads: True to pad events that are not padded.
    """
    seen = after

    def fault(error: LatimerError) -> bytes:
        if not job.is_ending:
            job.log.add(job.fault(error))
        return job.log.after(seen)

    exchange.fault = fault
    await exchange.start(200, EVENT_STREAM)
    async with aclosing(job.log.read(after, job.keepalive)) as events:
        async for data in events:
            seen += data.count(b"\n\n")
            if pads:
                data = await offload.run(len(data), padded, data)
            await exchange.chunk(data or COMMENT)
    await exchange.chunk(b"", more=False)


def _once(fault: Callable[[LatimerError], bytes]) -> Callable[[LatimerError], bytes]:
    """Return a function that returns the last events the first time, and then nothing."""
    has_failed = False

    def first(error: LatimerError) -> bytes:
        nonlocal has_failed
        data = b"" if has_failed else fault(error)
        has_failed = True
        return data

    return first


async def _keep(exchange: Exchange, work: Work, job: Job, reply: Any) -> None:
    """Store the response that has ended, and end its job.

    Raises:
        StoreUnavailable: the store, which an answer needs, does not take it.
    """
    job.is_ending = True
    try:
        if work.store is not None and not job.is_deleted:
            await work.store(exchange, reply)
            job.is_stored = bool(reply["store"])
    except StoreUnavailable:
        if reply["status"] in USABLE:
            # The store is required, so the response fails.
            raise
    job.end(reply)


async def _run(
    exchange: Exchange,
    service: Service,
    request: ResponseRequest,
    work: Work,
    job: Job,
    again: Again,
) -> None:
    """Do the work; the last event is added when the response is stored.

    It is prepared once more if its engine was lost before the first event.
    """
    # The request that has begun the work ends before it.
    REQUEST.set(None)
    frames = BackgroundEncoder(work.draft)
    job.fault = _once(frames.error)
    job.log.add(frames.queued())
    lease = exchange.lease

    async def fail(error: LatimerError) -> None:
        if exchange.record is not None:
            exchange.record.fail(error)
        # The event says if the response is stored.
        await _keep(exchange, work, job, frames.failed(error))
        job.log.add(job.fault(error))

    async def respond_once() -> None:
        keep = partial(_keep, exchange, work, job)
        answer = Answer(frames.whole, work.show, keeps=True, store=keep)
        padded = in_stream(request.stream_options, frames)
        await respond(exchange, work.served, work.plan, answer, padded)

    try:
        try:
            await respond_once()
        except EngineUnavailable as error:
            if not service.may_repeat(error, request.model, exchange.grant):
                raise
            if exchange.record is not None:
                exchange.record.repeat(error, exchange.ticket is not None)
            exchange.draft = exchange.ticket = None
            work = await again(exchange)
            frames = BackgroundEncoder(work.draft)
            job.fault = _once(frames.error)
            await respond_once()
    except LatimerError as error:
        await fail(error)
    except asyncio.CancelledError:
        if job.is_cancelled:
            if exchange.record is not None:
                exchange.record.error_code = CANCELLED
            await _keep(exchange, work, job, work.draft.stopped("cancelled", frames.cut()))
        else:
            await fail(ShuttingDown())
    except Exception:
        log.error("response %s failed\n%s", job.id, printable(traceback.format_exc(), keep="\n"))
        await fail(EngineError(unexpected()[1]["error"]["message"]))
    finally:
        if lease is not None:
            lease.release()
        if exchange.record is not None:
            service.observers.ended(exchange, exchange.record)
