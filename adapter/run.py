"""A request's jobs run on a backend, and their events turned into one reply or one stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..backends.base import Backend, Batch, Event, Finish, Generation, Piece, Stream
from ..backends.errors import EngineError, LatimerError
from ..backends.streams import merged
from ..schemas.openai.common import FinishReason, Usage
from .choice import Choice
from .exchange import EVENT_STREAM, Exchange
from .frames import Frames


class Plan(NamedTuple):
    """What a request comes to.

    Args:
        jobs: one per prompt; choice j of job i has the index `i * choices + j`.
        usage: how the endpoint counts tokens.
        frames: how it streams.
        translate: turns an error of the jobs into the endpoint's own words.
    """

    jobs: Sequence[Generation]
    choices: int
    usage: Callable[[Sequence[Finish], int], Usage]
    frames: Frames | None
    translate: Callable[[LatimerError], LatimerError] = lambda error: error


class Result(NamedTuple):
    """A choice that has ended."""

    text: str
    finish_reason: FinishReason


async def fold(backend: Backend, plan: Plan) -> tuple[list[Result], Usage]:
    """Run a plan to its end: the fold of the stream that would have been sent."""
    choices = _choices(plan)
    parts: list[list[bytes]] = [[] for _ in choices]
    results: list[Result | None] = [None] * len(choices)
    try:
        async with _opened(backend, plan.jobs, plan.choices) as batches:
            async for batch in batches:
                for event in batch:
                    index = event.choice
                    if isinstance(event, Piece):
                        parts[index].append(event.data)
                    else:
                        text = choices[index].feed(b"".join(parts[index]))
                        rest, reason = choices[index].end(event)
                        results[index] = Result(text + rest, reason)
        usage = plan.usage(_finishes(choices), plan.choices)
    except LatimerError as error:
        raise plan.translate(error) from error
    return [result for result in results if result is not None], usage


async def stream(exchange: Exchange, backend: Backend, plan: Plan) -> None:
    """Run a plan and send it as it comes; one send for what arrived together.

    Errors before the first event are raised, to become a plain reply; later ones are an event.
    """
    frames = plan.frames
    assert frames is not None
    choices = _choices(plan)
    writer = _Writer(frames, choices)
    try:
        async with _opened(backend, plan.jobs, plan.choices) as batches:
            async for batch in batches:
                data = writer.write(batch)
                if not exchange.started:
                    await exchange.start(200, EVENT_STREAM)
                if data:
                    await exchange.chunk(data)
        usage = plan.usage(_finishes(choices), plan.choices)
    except LatimerError as error:
        if not exchange.started:
            raise plan.translate(error) from error
        await exchange.chunk(frames.error(plan.translate(error)), more=False)
        return
    await exchange.chunk(frames.close(usage), more=False)


class _Writer:
    """Events to frames, so that no choice appears before the one with the next lower index.

    The SDK's stream helper fails when index 1 comes before index 0 (contract 3.5).
    """

    def __init__(self, frames: Frames, choices: Sequence[Choice]) -> None:
        self._frames = frames
        self._choices = choices
        self._shown = 0
        self._waiting: dict[int, list[bytes]] = {}

    def write(self, batch: Batch) -> bytes:
        out: list[bytes] = []
        for event in batch:
            index = event.choice
            data = self._frame(event)
            if index > self._shown:
                self._waiting.setdefault(index, []).append(data)
                continue
            if index == self._shown:
                out.append(self._frames.start(index))
                self._shown += 1
            out.append(data)
            while self._shown in self._waiting:
                out.append(self._frames.start(self._shown))
                out += self._waiting.pop(self._shown)
                self._shown += 1
        return b"".join(out)

    def _frame(self, event: Event) -> bytes:
        index = event.choice
        choice = self._choices[index]
        if isinstance(event, Piece):
            text = choice.feed(event.data)
            return self._frames.text(index, text) if text else b""
        rest, reason = choice.end(event)
        end = self._frames.end(index, reason)
        return self._frames.text(index, rest) + end if rest else end


def _choices(plan: Plan) -> list[Choice]:
    return [Choice(job.stops) for job in plan.jobs for _ in range(plan.choices)]


def _finishes(choices: Sequence[Choice]) -> list[Finish]:
    finishes = [choice.finish for choice in choices if choice.finish is not None]
    if len(finishes) != len(choices):
        raise EngineError("The engine ended its answer before every choice was finished.")
    return finishes


def _opened(backend: Backend, jobs: Sequence[Generation], choices: int) -> Stream:
    if len(jobs) == 1:
        return backend.open(jobs[0])
    return merged([_shifted(backend.open(job), i * choices) for i, job in enumerate(jobs)])


@asynccontextmanager
async def _shifted(source: Stream, offset: int) -> AsyncIterator[AsyncIterator[Batch]]:
    """A job's stream with the indices that its choices have in the reply."""

    async def shift(batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
        async for batch in batches:
            yield [event._replace(choice=event.choice + offset) for event in batch]

    async with source as batches:
        yield shift(batches)
