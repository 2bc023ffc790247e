"""A request's jobs run on a backend, and their events turned into one reply or one stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..backends import offload
from ..backends.base import Backend, Batch, Event, Finish, Generation, Piece, PromptTokens, Stream
from ..backends.errors import EngineError, LatimerError
from ..backends.streams import merged
from ..backends.turns import Party
from ..schemas.openai.common import FinishReason, Usage
from .choice import Choice, Delta, Echo
from .exchange import EVENT_STREAM, Exchange
from .frames import Frames
from .logprobs import Entry, mean
from .message import Form, MessageChoice
from .validation import note_inexact

AnyChoice: TypeAlias = Choice | MessageChoice
T = TypeVar("T")

# What showing a token with five alternatives costs, in bytes of JSON that cost as much to read.
TOKEN = 32
# What making a choice costs, counted alike.
CHOICE = 64


class Plan(NamedTuple):
    """What a request comes to.

    Args:
        jobs: one per prompt; choice j of job i has the index `i * choices + j`.
        choices: how many each prompt gets.
        usage: how the endpoint counts tokens.
        frames: how it streams.
        echoes: what of its prompt each job's choices show; empty where none shows anything.
        logprobs: how entries are shown, None where nobody asked for them.
        best: how many choices of each prompt are kept: those with the highest mean
            log-probability, best first (contract 2.8). None keeps all, in their order.
        form: how a chat's message is taken apart, None where all of it is content.
        strict: whether an answer that is only nearly right is refused.
        translate: turns an error of the jobs into the endpoint's own words.
    """

    jobs: Sequence[Generation]
    choices: int
    usage: Callable[[Sequence[Finish], int], Usage]
    frames: Frames | None = None
    echoes: Sequence[Echo] = ()
    logprobs: Callable[[Sequence[Entry]], Any] | None = None
    best: int | None = None
    form: Form | None = None
    strict: bool = False
    translate: Callable[[LatimerError], LatimerError] = lambda error: error


class Result(NamedTuple):
    """A choice that has ended.

    Args:
        score: its mean log-probability, where it is to be ranked.
        deltas: what adds up to its message, where that is taken apart.
    """

    text: str
    finish_reason: FinishReason
    logprobs: Any
    score: float
    deltas: Sequence[Mapping[str, Any]] = ()


async def fold(exchange: Exchange, backend: Backend, plan: Plan) -> tuple[list[Result], Usage]:
    """Run a plan to its end: the fold of the stream that would have been sent."""
    folds = await _prepared(plan, lambda: [_Fold(choice, plan) for choice in _made(plan)])
    size, tells_tokens = 0, plan.logprobs is not None or plan.best is not None

    def take(batch: Batch) -> None:
        for event in batch:
            if isinstance(event, PromptTokens):
                for one in folds[event.choice : event.choice + plan.choices]:
                    one.prompt(event)
            else:
                folds[event.choice].feed(event)

    try:
        async with _opened(backend, plan.jobs, plan.choices) as batches:
            async for batch in batches:
                if not tells_tokens and len(folds) == 1:
                    folds[0].read(batch)
                    continue
                if not tells_tokens:
                    for event in batch:
                        if isinstance(event, Piece):
                            folds[event.choice].pieces.append(event)
                        else:
                            take((event,))
                    continue
                size += _size(batch)
                # All tokens of a choice are shown when it ends.
                shows = any(not isinstance(event, Piece) for event in batch)
                await offload.run(size if shows else 0, take, batch)
        finishes = _finishes([one.choice for one in folds])
        _note(exchange, backend, plan, finishes)
        usage = plan.usage(finishes, plan.choices)
        await _count_reasoning(usage, [one.choice for one in folds], backend)
    except LatimerError as error:
        raise plan.translate(error) from error
    results = [one.result for one in folds if one.result is not None]
    return _best(results, plan), usage


async def stream(exchange: Exchange, backend: Backend, plan: Plan) -> None:
    """Run a plan and send it as it comes; one send for what arrived together.

    Errors before the first event are raised, to become a plain reply; later ones are an event.
    """
    frames = plan.frames
    assert frames is not None
    writer = await _prepared(plan, lambda: _Writer(frames, _made(plan), plan))
    choices = writer.choices
    late = plan.logprobs is not None and backend.capabilities.late_logprobs
    last = b""
    try:
        async with _opened(backend, plan.jobs, plan.choices) as batches:
            if late:
                batches = _all_at_once(batches)
            async for batch in batches:
                if plan.logprobs is None:
                    data = writer.write(batch)
                else:
                    data = await offload.run(_size(batch), writer.write, batch)
                if not exchange.started:
                    if late:
                        _note(exchange, backend, plan, _finishes(choices))
                    await exchange.start(200, EVENT_STREAM)
                if isinstance(batch[-1], Finish) and all(one.finish for one in choices):
                    # The end comes right behind it: one call of the kernel is enough for both.
                    last = data
                elif data:
                    await exchange.chunk(data)
        usage = plan.usage(_finishes(choices), plan.choices)
        await _count_reasoning(usage, choices, backend)
    except LatimerError as error:
        if not exchange.started:
            raise plan.translate(error) from error
        await exchange.chunk(last + frames.error(plan.translate(error)), more=False)
        return
    await exchange.chunk(last + frames.close(usage), more=False)


class _Fold:
    """A choice whose events are put together.

    Text is joined as bytes and fed at its end: nobody sees it before.
    """

    __slots__ = ("_plan", "_prompt", "choice", "pieces", "result")

    def __init__(self, choice: AnyChoice, plan: Plan) -> None:
        self.choice = choice
        self._plan = plan
        self._prompt = choice.start()
        self.pieces: list[Piece] = []
        self.result: Result | None = None

    def prompt(self, event: PromptTokens) -> None:
        self._prompt = self.choice.prompt(event)

    def read(self, batch: Sequence[Any]) -> None:
        """Take pieces, and the end behind them: most replies are no more than that."""
        if isinstance(batch[-1], Finish):
            self.pieces += batch[:-1]
            self.feed(batch[-1])
        else:
            self.pieces += batch

    def feed(self, event: Piece | Finish) -> None:
        if isinstance(event, Piece):
            self.pieces.append(event)
            return
        plan = self._plan
        delta = self.choice.take(self.pieces)
        rest, reason = self.choice.end(event)
        text = self._prompt.text + delta.text + rest.text
        shown, score = None, 0.0
        deltas = [*delta.deltas, *rest.deltas]
        if plan.logprobs is not None or plan.best is not None:
            generated = [*delta.entries, *rest.entries]
            generated += [entry for _, entries in deltas for entry in entries]
            if plan.logprobs is not None:
                shown = plan.logprobs([*self._prompt.entries, *generated])
            score = mean(generated, event.end)
        self.result = Result(text, reason, shown, score, [fields for fields, _ in deltas])


def _best(results: list[Result], plan: Plan) -> list[Result]:
    """The choices that are kept, best first for each prompt."""
    if plan.best is None:
        return results
    kept: list[Result] = []
    for start in range(0, len(results), plan.choices):
        candidates = results[start : start + plan.choices]
        kept += sorted(candidates, key=lambda result: -result.score)[: plan.best]
    return kept


class _Writer:
    """Events to frames, so that no choice appears before the one with the next lower index.

    The SDK's stream helper fails when index 1 comes before index 0 (contract 3.5).
    """

    def __init__(self, frames: Frames, choices: Sequence[AnyChoice], plan: Plan) -> None:
        self._frames = frames
        self.choices = choices
        self._plan = plan
        self._starts = [choice.start() for choice in choices]
        self._shown = 0
        self._waiting: dict[int, list[bytes]] = {}

    def write(self, batch: Batch) -> bytes:
        out: list[bytes] = []
        for event in batch:
            if isinstance(event, PromptTokens):
                for index in range(event.choice, event.choice + self._plan.choices):
                    self._place(index, self._delta(index, self.choices[index].prompt(event)), out)
            else:
                self._place(event.choice, self._frame(event), out)
        return b"".join(out)

    def _place(self, index: int, data: bytes, out: list[bytes]) -> None:
        """Put a choice's frame out, or aside until every choice before it has put something out.

        A choice can have had events that show nothing yet: half a character, or text that may
        still become a tool call or a stop sequence.
        """
        if index < self._shown:
            out.append(data)
            return
        held = self._waiting.setdefault(index, [])
        if data:
            held.append(data)
        while (waiting := self._waiting.get(self._shown)) is not None:
            begin = self._start(self._shown) + b"".join(waiting)
            if not begin:
                return
            out.append(begin)
            del self._waiting[self._shown]
            self._shown += 1

    def _start(self, index: int) -> bytes:
        return self._frames.start(index) + self._delta(index, self._starts[index])

    def _frame(self, event: Piece | Finish) -> bytes:
        index = event.choice
        choice = self.choices[index]
        if isinstance(event, Piece):
            return self._delta(index, choice.take((event,)))
        rest, reason = choice.end(event)
        show = self._plan.logprobs
        end = self._frames.end(index, reason, show(()) if show is not None else None)
        return self._delta(index, rest) + end

    def _delta(self, index: int, delta: Delta) -> bytes:
        text, entries, deltas = delta
        if deltas:
            show = self._plan.logprobs
            return b"".join(
                self._frames.delta(index, fields, None if show is None else show(own))
                for fields, own in deltas
            )
        if not text and not entries:
            return b""
        if self._plan.logprobs is None:
            return self._frames.text(index, text)
        return self._frames.logged(index, text, self._plan.logprobs(entries))


def _size(batch: Batch) -> int:
    """What showing the tokens of a batch costs, in bytes that cost as much."""
    return TOKEN * sum(len(event.tokens) for event in batch if not isinstance(event, Finish))


async def _prepared(plan: Plan, make: Callable[[], T]) -> T:
    """What is made for all choices of a plan before it runs."""
    count = len(plan.jobs) * plan.choices
    if count == 1 and not plan.jobs[0].stops:
        return make()
    # Each job has the same stops.
    stops = sum(map(len, plan.jobs[0].stops))
    return await offload.run(CHOICE * count + stops, make)


def _made(plan: Plan) -> list[AnyChoice]:
    if plan.form is not None:
        return [MessageChoice(plan.form) for _ in range(plan.choices)]
    if not plan.echoes:
        return [Choice(job.stops) for job in plan.jobs for _ in range(plan.choices)]
    return [
        Choice(job.stops, echo)
        for job, echo in zip(plan.jobs, plan.echoes, strict=True)
        for _ in range(plan.choices)
    ]


async def _count_reasoning(usage: Usage, choices: Sequence[AnyChoice], backend: Backend) -> None:
    """Tell how many tokens were thought; where the engine does not, its tokeniser does."""
    total = 0
    for choice in choices:
        if not isinstance(choice, MessageChoice):
            return
        count = choice.reasoning_tokens
        if count is None:
            thought = choice.reasoning
            count = len(await backend.tokenize(thought, add_special=False, parse_special=True))
            most = choice.finish.completion_tokens if choice.finish is not None else 0
            count = min(count, most)
        total += count
    if total:
        details = usage["completion_tokens_details"]
        usage["completion_tokens_details"] = {**details, "reasoning_tokens": total}


def _finishes(choices: Sequence[AnyChoice]) -> list[Finish]:
    finishes = [choice.finish for choice in choices if choice.finish is not None]
    if len(finishes) != len(choices):
        raise EngineError("The engine ended its answer before every choice was finished.")
    return finishes


def _note(exchange: Exchange, backend: Backend, plan: Plan, finishes: Sequence[Finish]) -> None:
    """Say in a header what of the answer is only nearly right; under `strict`, refuse."""
    names = {name for finish in finishes for name in finish.inexact}
    if names:
        note_inexact(exchange, names, backend.capabilities, plan.strict)


async def _all_at_once(batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
    events: list[Event] = []
    async for batch in batches:
        events += batch
    yield events


def _opened(backend: Backend, jobs: Sequence[Generation], choices: int) -> Stream:
    if len(jobs) == 1:
        return backend.open(jobs[0])
    party = Party()
    return merged(
        _shifted(backend.open(job._replace(party=party)), i * choices) for i, job in enumerate(jobs)
    )


@asynccontextmanager
async def _shifted(source: Stream, offset: int) -> AsyncIterator[AsyncIterator[Batch]]:
    """A job's stream with the indices that its choices have in the reply."""

    async def shift(batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
        async for batch in batches:
            yield [event._replace(choice=event.choice + offset) for event in batch]

    async with source as batches:
        yield shift(batches)
