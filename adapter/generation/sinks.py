"""Send a request's events as one response or as a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

import orjson
from typing_extensions import override

from ...backends import offload
from ...backends.base import Batch, Finish, Generation, Piece, Pushing
from ...backends.errors import EngineError, LatimerError
from ...backends.http import read_whole
from ...backends.queue import Ticket
from ...schemas.openai.common import CompletionTokensDetails, FinishReason, Usage
from ..admission import ticket_of
from ..errors import DONE, StoreUnavailable, error_event
from ..limits.leases import Lease
from ..model_entry import ServedModel
from ..request import EVENT_STREAM, Exchange
from ..validation import note_inexact
from .choice import Choice, Delta
from .frames import ChunkEncoder
from .keepalive import EARLY, SENDING, KeepAlive
from .logprobs import Entry, mean
from .run import CHOICE, Plan, Sink, run

_INEXACT, _TEXT, _DATA = attrgetter("inexact"), attrgetter("text"), attrgetter("data")
# The cost of formatting a token with five alternatives, in bytes of JSON that take as long to
# parse.
TOKEN = 32
# The cost of parsing a piece of a choice with parts, and each byte of it, in the same.
PIECE, BYTE = 64, 8


class Result(NamedTuple):
    """A finished choice.

    Args:
        deltas: all deltas of the choice, with those of an echoed prompt; none if the frames of a
            stream keep them.
        score: the mean log-probability, which ranks choices.
        stop: the stop sequence that ended it, or None.
    """

    deltas: Sequence[Delta]
    finish_reason: FinishReason
    logprobs: Any = None
    score: float = 0.0
    stop: str | None = None

    @property
    def text(self) -> str:
        """The text of a choice that has only content."""
        return "".join(map(_TEXT, self.deltas))


@dataclass(slots=True)
class Answer:
    """The format of a response.

    Args:
        whole: makes the response object.
        show: formats the tokens; None if the request does not ask for them.
        best: the number of choices to keep for each prompt: those with the highest mean
            log-probability, best first (contract 2.8). None keeps all, in their order.
        keeps: True if the response object of a stream is made too, for its frames or an observer.
        store: stores the response object before the response ends, and may change it; None if it
            is not stored.
    """

    whole: Callable[[Sequence[Result], Usage], Mapping[str, Any]]
    show: Callable[[Sequence[Entry]], Any] | None = None
    best: int | None = None
    keeps: bool = False
    store: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None

    def result(
        self,
        prompt: Sequence[Delta],
        deltas: Sequence[Delta],
        reason: FinishReason,
        end: Finish,
        stop: str | None,
    ) -> Result:
        """Return the choice with these deltas, after those of an echoed prompt."""
        everything = [*prompt, *deltas] if prompt else deltas
        if self.show is None and self.best is None:
            return Result(everything, reason, stop=stop)
        generated = [entry for delta in deltas for entry in delta.entries]
        shown = None
        if self.show is not None:
            shown = self.show([*chain.from_iterable(one.entries for one in prompt), *generated])
        return Result(everything, reason, shown, mean(generated, end.end), stop)


class JsonSink(Sink):
    """A sink that sends a plain response.

    The response equals the joined chunks of the same request's stream. The bytes of a choice are
    joined and decoded when the choice ends.

    Attributes:
        is_live: True to get the text while it is generated, although the response is sent whole.
    """

    at_once = False
    is_live = False
    _size = 0
    # True if the choices have parts, and no tokens are shown.
    _splits = False

    def __init__(self, exchange: Exchange, served: ServedModel, answer: Answer) -> None:
        self._exchange = exchange
        self._served = served
        self._answer = answer
        self._needs_tokens = answer.show is not None or answer.best is not None

    @override
    def begin(self, choices: Sequence[Choice], per_prompt: int) -> None:
        self._choices, self._per_prompt = choices, per_prompt
        self._results: list[Result | None] = [None] * len(choices)
        # By the index of a choice: what it begins with, or the prompt that an engine has reported;
        # and what has arrived. Before that, a choice with parts reads what it begins with.
        self._prompts: dict[int, Sequence[Delta]] = {}
        for index, choice in enumerate(choices):
            if self._needs_tokens or not choice.is_bare:
                self._prompts[index] = choice.start()
                self._splits = not self._needs_tokens and not choice.is_content
        self._pieces: defaultdict[int, list[Piece]] = defaultdict(list)

    @override
    async def take(self, batch: Batch) -> None:
        if self._needs_tokens:
            self._size += cost_of(batch)
            # The tokens of a choice are formatted when it ends.
            shows = any(not isinstance(event, Piece) for event in batch)
            await offload.run(self._size if shows else 0, self._take, batch)
        elif self._splits:
            for event in batch:
                pieces = self._pieces[event.choice]
                if isinstance(event, Piece):
                    pieces.append(event)
                else:
                    self._size += PIECE * len(pieces) + BYTE * sum(map(len, map(_DATA, pieces)))
                    await offload.run(self._size, self._end, event)
        elif len(self._choices) > 1:
            self._take(batch)
        else:
            # Pieces, then the finish. Most responses are no more than that.
            pieces, last = self._pieces[0], batch[-1]
            if isinstance(last, Finish):
                pieces += batch[:-1]  # type: ignore[arg-type]
                self._end(last)
            else:
                pieces += batch  # type: ignore[arg-type]

    def _take(self, batch: Batch) -> None:
        for event in batch:
            if isinstance(event, Piece):
                self._pieces[event.choice].append(event)
            elif isinstance(event, Finish):
                self._end(event)
            else:
                for index in range(event.choice, event.choice + self._per_prompt):
                    self._prompts[index] = self._choices[index].prompt(event)

    def _end(self, event: Finish) -> None:
        index = event.choice
        choice, pieces = self._choices[index], self._pieces[index]
        if choice.is_bare and not self._needs_tokens:
            self._results[index] = Result(*choice.whole(pieces, event))
            return
        if self._splits:
            deltas, reason = choice.whole(pieces, event)
        else:
            deltas = choice.take(pieces)
            rest, reason = choice.end(event)
            deltas = [*deltas, *rest] if rest else deltas
        prompt = self._prompts[index]
        self._results[index] = self._answer.result(prompt, deltas, reason, event, choice.stop)

    @override
    async def finish(self, finishes: Sequence[Finish], usage: Usage) -> Mapping[str, Any]:
        if any(map(_INEXACT, finishes)):
            note_approximated(self._exchange, self._served, finishes)
        answer, results = self._answer, [*filter(None, self._results)]
        if answer.best is not None:
            results = _best(results, answer.best, self._per_prompt)
        cost, store = _cost(answer, results, usage), answer.store
        is_small = cost <= offload.SMALL
        if is_small:
            reply = answer.whole(results, usage)
        else:
            reply = await offload.run(cost, answer.whole, results, usage)
        if store is not None:
            await store(reply)
        if len(self._exchange.recent) > 1:
            await offload.give_way()
        body = orjson.dumps(reply) if is_small else await offload.run(cost, orjson.dumps, reply)
        await self._exchange.reply(200, body)
        return reply

    @override
    async def fail(self, error: LatimerError) -> bool:
        """Leave the error to the caller: the response starts at its end."""
        return False


class StreamSink(Sink):
    """A sink that sends a stream, with one send for each batch of events.

    No choice appears before the one with the next lower index: the stream helper of OpenAI's SDK
    fails if index 1 comes before index 0 (contract 3.5).

    Most tokens of a real engine arrive alone, and pass `push` where they arrive.

    Attributes:
        comments: the comments of the stream, which are sent between two frames.
    """

    holds = True
    # Reads what is pushed, as texts or as events. The rest is counted and noted as `run` does it.
    _translate: Callable[[Any], Batch | Sequence[str] | None] | None = None
    _gets_texts = False
    _lease: Lease | None = None
    _arrived: Callable[[float], None] | None = None
    # True if the client reads too slowly: only `take` waits for it.
    _is_full = False

    def __init__(
        self, exchange: Exchange, served: ServedModel, answer: Answer, frames: ChunkEncoder
    ) -> None:
        self.at_once = answer.show is not None and served.capabilities.late_logprobs
        self._exchange = exchange
        self._write = exchange.write or exchange.chunk
        self._served = served
        self._answer = answer
        self._frames = frames
        self.pushes = exchange.pushes and not self.at_once
        self._choices: Sequence[Choice] = ()
        self._per_prompt = 1
        self._starts: list[Sequence[Delta]] = []
        self._kept: list[list[Delta]] = []
        self._results: list[Result | None] = []
        # The number of choices in the stream, the number of finished choices, and the frames of
        # choices that wait for a lower index.
        self._shown = self._ended = 0
        self._waiting: dict[int, list[bytes]] = {}
        self._last = b""
        # True if the stream is the text of one choice: most are no more than that.
        self._is_text = False
        self.comments = KeepAlive(exchange, served.backend, frames)
        # A response that is sent in one piece needs its end before its head. One in the background
        # has readers of its own, which get comments.
        is_silent = self.at_once or exchange.is_detached
        self._silence = 0 if is_silent else served.policy.keepalive
        if frames.begins_early and not is_silent:
            self.comments.first, self._silence = partial(frames.start, 0), EARLY

    @override
    def begin(self, choices: Sequence[Choice], per_prompt: int) -> None:
        self._choices = self._frames.choices = choices
        self._per_prompt = per_prompt
        self._starts = [choice.start() for choice in choices]
        self._is_text = (
            self._frames.is_plain
            and self._answer.show is None
            and (self._frames.keeps or not self._answer.keeps)
            and len(choices) == 1
            and choices[0].is_content
        )
        if self._answer.keeps:
            self._results = [None] * len(choices)
            if not self._frames.keeps:
                self._kept = [list(deltas) for deltas in self._starts]
        if self._silence:
            self.comments.begin(self._silence)

    @override
    def close(self) -> None:
        self.comments.end()
        self._translate = None

    @override
    def attach(
        self, batches: Pushing, lease: Lease | None, arrived: Callable[[float], None] | None
    ) -> None:
        self._lease, self._arrived = lease, arrived
        pushed = batches.push_to(self.push, self._is_text and self._choices[0].is_bare)
        if pushed is not None:
            self._translate, self._gets_texts = pushed

    def push(self, data: object) -> bool:
        """Send the events in data that has just arrived, if the stream has begun.

        Returns:
            False to leave the data to `take`, and to what it waits for: the head of the response, a
            comment, or a slow client.
        """
        send = self._exchange.push
        if (
            send is None
            or self._translate is None
            or not self._shown
            or self._is_full
            or self.comments.writing is not None
        ):
            return False
        batch: Any = self._translate(data)
        if not batch:
            return batch is not None
        if self._answer.show is not None and cost_of(batch) > offload.SMALL:
            return False
        if self._lease is not None:
            self._lease.generated += len(batch)
        if self._arrived is not None:
            self._arrived(perf_counter())
        if self._gets_texts:
            out = self._frames.texts(0, batch)
        elif self._is_text:
            # As in `_written`, without a call for each token.
            out = self._frames.texts(0, self._choices[0].texts(batch))
        else:
            out = self._written(batch)
        if out:
            self.comments.idle = 0
            self._is_full = not send(out)
        return True

    @override
    async def take(self, batch: Batch) -> None:
        if self._answer.show is None:
            data = self._written(batch)
        else:
            data = await offload.run(cost_of(batch), self._written, batch)
        exchange, comments = self._exchange, self.comments
        if comments.writing is not None:
            await comments.settle()
        if not exchange.started:
            if self.at_once:
                self._note()
            comments.idle = SENDING
            if len(exchange.recent) > 1:
                await offload.give_way()
            await exchange.start(200, EVENT_STREAM)
            comments.idle = 0
        if self._ended == len(self._choices):
            # The end of the stream follows immediately. One system call sends both.
            self._last += data
        elif data:
            comments.idle = SENDING
            await self._write(data)
            comments.idle, self._is_full = 0, False

    @override
    async def finish(self, finishes: Sequence[Finish], usage: Usage) -> Mapping[str, Any] | None:
        reply, cost = None, 0
        if self._answer.keeps:
            results = [*filter(None, self._results)]
            cost = _cost(self._answer, results, usage)
            if cost <= offload.SMALL:
                reply = self._answer.whole(results, usage)
            else:
                reply = await offload.run(cost, self._answer.whole, results, usage)
            if self._answer.store is not None:
                await self._answer.store(reply)
        if cost <= offload.SMALL:
            end = self._frames.close(usage, reply)
        else:
            end = await offload.run(cost, self._frames.close, usage, reply)
        if self.comments.writing is not None:
            await self.comments.settle()
        self.comments.idle = SENDING
        await self._write(self._last + end, False)
        return reply

    @override
    async def fail(self, error: LatimerError) -> bool:
        await self.comments.settle()
        if not self._exchange.started:
            return False
        failed = self._frames.failed(error)
        if failed is not None and self._answer.store is not None:
            # The store itself can be the reason.
            with suppress(StoreUnavailable):
                await self._answer.store(failed)
            # A comment can begin meanwhile.
            await self.comments.settle()
        self.comments.idle = SENDING
        await self._write(self._last + self._frames.error(error), False)
        return True

    def _note(self) -> None:
        """Name the inexact parts of choices that have all ended before the response starts."""
        finishes = [one.finish for one in self._choices if one.finish is not None]
        if any(map(_INEXACT, finishes)):
            note_approximated(self._exchange, self._served, finishes)

    def _written(self, batch: Batch) -> bytes:
        out: list[bytes] = []
        if self._is_text:
            # Pieces, then the finish.
            last = batch[-1]
            ends = isinstance(last, Finish)
            pieces: Any = batch[:-1] if ends else batch
            data = self._frames.texts(0, self._choices[0].texts(pieces))
            if isinstance(last, Finish):
                data += self._end(last)
            if self._shown:
                return data
            self._place(0, data, out)
            return b"".join(out)
        for event in batch:
            index = event.choice
            if index >= self._shown and index not in self._waiting:
                self._wait(index)
            if isinstance(event, Piece):
                data = self._framed(index, self._choices[index].take((event,)))
            elif isinstance(event, Finish):
                data = self._end(event)
            else:
                for each in range(index, index + self._per_prompt):
                    self._place(each, self._framed(each, self._choices[each].prompt(event)), out)
                continue
            # Most tokens belong to a choice that has started, which saves a call for each.
            if index < self._shown:
                out.append(data)
            else:
                self._place(index, data, out)
        return b"".join(out)

    def _end(self, event: Finish) -> bytes:
        index = event.choice
        choice = self._choices[index]
        rest, reason = choice.end(event)
        self._ended += 1
        data = self._framed(index, rest) if rest else b""
        data += self._frames.end(index, reason)
        if self._answer.keeps and self._is_text:
            # The frames have the texts.
            self._results[index] = Result((), reason, None, 0.0, choice.stop)
        elif self._answer.keeps:
            deltas = self._kept[index] if self._kept else ()
            self._results[index] = self._answer.result((), deltas, reason, event, choice.stop)
        return data

    def _framed(self, index: int, deltas: Sequence[Delta]) -> bytes:
        if self._kept:
            self._kept[index] += deltas
        if len(deltas) == 1:
            return self._frames.delta(index, deltas[0])
        return b"".join([self._frames.delta(index, delta) for delta in deltas])

    def _place(self, index: int, data: bytes, out: list[bytes]) -> None:
        """Write a choice's frame, or hold it until every choice before it has a frame.

        Events of a choice can show nothing yet: half a character, or text that may still become a
        tool call or a stop sequence.
        """
        if index < self._shown:
            out.append(data)
            return
        if index not in self._waiting:
            self._wait(index)
        if data:
            self._waiting[index].append(data)
        while (waiting := self._waiting.get(self._shown)) is not None:
            begin = self._frames.start(self._shown) + b"".join(waiting)
            if not begin:
                return
            out.append(begin)
            del self._waiting[self._shown]
            self._shown += 1

    def _wait(self, index: int) -> None:
        """Hold what a choice begins with, whose frames are made before all others."""
        begin = partial(self._frames.delta, index)
        self._waiting[index] = [*map(begin, self._starts[index])]


def respond(
    exchange: Exchange,
    served: ServedModel,
    plan: Plan,
    answer: Answer,
    frames: ChunkEncoder | None,
    sink: JsonSink | StreamSink | None = None,
) -> Awaitable[None]:
    """Run a plan and send the response.

    Args:
        frames: the frames of a stream; None for a plain response.
        sink: what sends it; None for a response of text.
    """
    if exchange.hides_cache and not served.backend.capabilities.own_caches:
        plan.usage = partial(_without_cached, plan.usage)
    record = exchange.record
    if answer.store is not None or (record is not None and record.keeps):
        answer.keeps = True
    if exchange.lease is not None:
        plan.lease = exchange.lease
        plan.ticket = plan.ticket or Ticket()
    if served.is_pooled:
        plan.ticket = ticket_of(exchange, served, plan.ticket)
    # To check the class of an instance of a protocol is a call.
    made: Any = sink
    if frames is None:
        made = made or JsonSink(exchange, served, answer)
        joins = not made.is_live
    else:
        exchange.fault = frames.error
        made = made or StreamSink(exchange, served, answer, frames)
        joins = made.at_once
        if plan.ticket is None:
            plan.ticket = made.comments.ticket
        else:
            made.comments.ticket = plan.ticket
        frames.ticket = plan.ticket
    if joins:
        # The engine may yield texts whole, because the response is sent at the end.
        is_joined = plan.form is None
        for job in plan.jobs:
            job.streamed, job.is_joined = False, is_joined
    if record is not None:
        record.asked, record.engine = served.name, served.backend.capabilities.engine
        record.ticket = plan.ticket = plan.ticket or Ticket()
        streams = frames is not None and (exchange.wants_stream or not exchange.is_detached)
        if streams and not made.at_once and plan.jobs[0].prompt.logprobs is None:
            # A plain response may get its tokens together, and the tokens of a prompt are others.
            record.arrivals = []
    return run(served.backend, plan, made, record)


def cost_of(batch: Batch) -> int:
    """Return the cost of formatting the tokens of a batch, in bytes of JSON."""
    return TOKEN * sum(len(event.tokens) for event in batch if not isinstance(event, Finish))


def _cost(answer: Answer, results: Sequence[Result], usage: Usage) -> int:
    """Return the cost of making a plain response, in bytes of JSON."""
    shown = TOKEN * usage["total_tokens"] if answer.show is not None else 0
    return CHOICE * len(results) + shown


def note_approximated(exchange: Exchange, served: ServedModel, finishes: Sequence[Finish]) -> None:
    """Name the inexact parts of the response in a header; under `strict`, reject the request."""
    names = set(chain.from_iterable(map(_INEXACT, finishes)))
    note_inexact(exchange, names, served.capabilities, served.policy.strict)


def _best(results: list[Result], count: int, per_prompt: int) -> list[Result]:
    """Return the choices to keep, best first for each prompt."""
    kept: list[Result] = []
    for start in range(0, len(results), per_prompt):
        candidates = results[start : start + per_prompt]
        kept += sorted(candidates, key=lambda result: -result.score)[:count]
    return kept


_PROMPT, _COMPLETION = attrgetter("prompt_tokens"), attrgetter("completion_tokens")
_CACHED = attrgetter("cached_tokens")
_ACCEPTED, _REJECTED = attrgetter("accepted_tokens"), attrgetter("rejected_tokens")

_NO_DETAILS: CompletionTokensDetails = {
    "reasoning_tokens": 0,
    "audio_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}


def usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Return the token counts of all choices; each prompt counts once (contract 2.2)."""
    prompt = sum(map(_PROMPT, finishes[::choices_per_prompt]))
    completion = sum(map(_COMPLETION, finishes))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def detailed_usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Return the token counts with the details of chat responses (contract 3.3).

    Tokens that the engine drafts by itself are no predictions of the client.
    """
    usage = usage_of(finishes, choices_per_prompt)
    usage["prompt_tokens_details"] = {
        "cached_tokens": sum(map(_CACHED, finishes[::choices_per_prompt])),
        "cache_write_tokens": 0,
        "audio_tokens": 0,
    }
    usage["completion_tokens_details"] = _NO_DETAILS
    return usage


def predicted_usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Return the detailed token counts of a request that predicts its answer."""
    usage = detailed_usage_of(finishes, choices_per_prompt)
    usage["completion_tokens_details"] = {
        **_NO_DETAILS,
        "accepted_prediction_tokens": sum(map(_ACCEPTED, finishes)),
        "rejected_prediction_tokens": sum(map(_REJECTED, finishes)),
    }
    return usage


def _without_cached(
    usage: Callable[[Sequence[Finish], int], Usage], finishes: Sequence[Finish], choices: int
) -> Usage:
    """Return token counts without those in a prompt cache that has prompts of other API keys.

    A client could guess such a prompt token by token: each right one would count.
    """
    found = usage(finishes, choices)
    if "prompt_tokens_details" in found:
        found["prompt_tokens_details"] = {**found["prompt_tokens_details"], "cached_tokens": 0}
    return found


async def pass_native(
    exchange: Exchange, served: ServedModel, job: Generation, stream: bool
) -> None:
    """Send the engine's native response: its status, its content type, its body as it arrives.

    Raises:
        EngineError: the status is not a final HTTP status.
    """
    # The response has the times and numbers of the cache.
    job.reuses = not exchange.hides_cache
    if served.is_pooled:
        job.ticket = ticket_of(exchange, served, job.ticket)
    if exchange.record is not None:
        exchange.record.begin(served.name, served.capabilities.engine, job.ticket)
        exchange.record.is_stream = stream
    async with served.backend.native(job, stream) as reply:
        if exchange.lease is not None:
            # Only the engine's own response says what it has used.
            exchange.lease.generated = exchange.lease.tokens - exchange.lease.prompt
        if not 200 <= reply.status <= 599:
            raise EngineError(f"The engine responded with the invalid HTTP status {reply.status}.")
        content_type = reply.content_type.encode("latin-1")
        if not stream:
            # The body is read first, so that a truncated one becomes an error response.
            body = await read_whole(reply.status, reply.body)
            await exchange.reply(reply.status, body, content_type)
            return
        exchange.fault = _last_event
        await exchange.start(reply.status, content_type)
        try:
            async for chunk in reply.body:
                await exchange.chunk(chunk)
        except LatimerError as error:
            await exchange.chunk(_last_event(error), more=False)
            return
    await exchange.chunk(b"", more=False)


def _last_event(error: LatimerError) -> bytes:
    """Return the event that ends a stream with an error; the engines' own have no `[DONE]`."""
    return error_event(error).removesuffix(DONE)
