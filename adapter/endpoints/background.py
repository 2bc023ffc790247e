"""Create a response in the background, and follow its events (contract of responses, 9.6)."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from ...backends.errors import EngineError, LatimerError
from ...backends.fleet.loading import REQUEST
from ...schemas.openai.responses import ResponseRequest, ResponseStreamOptions
from ..errors import ShuttingDown, StoreUnavailable, printable, unexpected
from ..generation.frames import in_stream
from ..generation.keepalive import COMMENT
from ..generation.run import Plan
from ..generation.sinks import Answer, respond
from ..request import EVENT_STREAM, Exchange
from ..responses.background import Job
from ..responses.response import USABLE, BackgroundEncoder, Draft
from ..service import ServedModel, Service

log = logging.getLogger("latimer")

StreamOptions: TypeAlias = ResponseStreamOptions | None


@dataclass(slots=True)
class Work:
    """The work on a response.

    Args:
        show: see `Answer`.
        store: stores the response object at its end; None if it is not stored.
        body: the request's body, as it is stored.
    """

    served: ServedModel
    plan: Plan
    draft: Draft
    show: Callable[..., Any] | None
    store: Callable[..., Awaitable[None]] | None
    body: Mapping[str, Any]


async def begin(exchange: Exchange, service: Service, request: ResponseRequest, work: Work) -> None:
    """Start the work, and send the queued response, or its events as they are made."""
    keepalive = work.served.policy.keepalive
    job = Job(
        exchange.key, exchange.request_id, work.draft.begun, work.body, exchange.size, keepalive
    )

    async def record(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            job.log.add(message["body"])

    recorder = exchange.detached(record)
    if service.observers:
        service.recorded(recorder)
    service.background.start(job, _run(recorder, service, request.stream_options, work, job))
    # A task that is cancelled before it has begun does nothing at all.
    await asyncio.sleep(0)
    await service.background.announce(job)
    if request.stream:
        await follow(exchange, job, -1)
    else:
        await exchange.reply(200, orjson.dumps(job.reply))


async def follow(exchange: Exchange, job: Job, after: int) -> None:
    """Send the events of a response after the one with a number, until the response ends."""
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


async def _run(
    exchange: Exchange, service: Service, options: StreamOptions, work: Work, job: Job
) -> None:
    """Do the work; the last event is added when the response is stored."""
    # The request that has begun the work ends before it.
    REQUEST.set(None)
    frames = BackgroundEncoder(work.draft)
    job.fault = _once(frames.error)
    job.log.add(frames.queued())

    async def keep(reply: Any) -> None:
        job.is_ending = True
        try:
            if work.store is not None and not job.is_deleted:
                await work.store(exchange, reply)
                job.is_stored = bool(reply["store"])
        except StoreUnavailable:
            if reply["status"] in USABLE:
                # The store is required, so the response fails.
                raise
            reply["store"] = False
        job.end(reply)

    answer = Answer(frames.whole, work.show, keeps=True, store=keep)
    padded = in_stream(options, frames)
    lease = exchange.lease
    try:
        await respond(exchange, work.served, work.plan, answer, padded)
    except asyncio.CancelledError:
        if job.is_cancelled:
            await keep(work.draft.stopped("cancelled", frames.cut()))
        else:
            job.log.add(job.fault(ShuttingDown()))
            await keep(dict(frames.failed(ShuttingDown())))
    except Exception:
        log.error("response %s failed\n%s", job.id, printable(traceback.format_exc(), keep="\n"))
        error = EngineError(unexpected()[1]["error"]["message"])
        job.log.add(job.fault(error))
        await keep(dict(frames.failed(error)))
    finally:
        if lease is not None:
            lease.release()
        if exchange.record is not None:
            service.ended(exchange)
