"""The choices of a job, each with one native call or several: prompt, text, token counts.

koboldcpp's stream sleeps 0.35 s before its first event and 0.15 s after its last, so a response
that is sent whole comes from the endpoint that answers whole. A stream can also show the text of
the generation before it, and it omits the final event if it sends all text before it notices the
end. So a stream's text has to be that of the call's own tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from ...schemas.native.koboldcpp import LastLogprobs, Perf, StreamEvent
from .. import offload
from ..base import Batch, Generation, Model, NativeReply, Piece, Text, TokenIds
from ..errors import (
    MALFORMED,
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    LatimerError,
    Refused,
    Unsupported,
    malformed,
    read_from,
    text_of,
    whole_of,
)
from ..queue import Ticket
from ..sse import EventParser
from . import characters
from . import tokens as tokens_of
from .call import STREAM, WHOLE, Call
from .server import Server, read_json
from .tokens import CallTokens
from .translate import (
    CAPABILITIES,
    ENGINE,
    ChoiceStream,
    FinishReason,
    longest_call,
    read_reason,
    to_native,
    with_media,
)


def is_whole(job: Generation, server: Server) -> bool:
    """Return True if the answers to a job come from the endpoint that answers whole.

    Only the reader of a stream can cut it. Older versions do not report how many tokens a whole
    response has.
    """
    return not (job.streamed or job.stops.by_reader) and server.reports_tokens


async def input_of(server: Server, job: Generation, model: Model) -> tuple[str, int, int | None]:
    """Return the prompt as text, the largest number of tokens to generate, and the prompt's tokens.

    The number of the prompt's tokens is None if the response will report it, which saves a call:
    for a whole response to a text that fits into the context with any tokens.
    """
    content, most = job.prompt.content, job.max_tokens
    if is_whole(job, server) and isinstance(content, Text) and not job.prompt.media and most:
        text = content.text
        # A token has at least one byte, but for a BOS and a space that the tokenizer may add.
        is_short = len(text) < model.context and len(text.encode()) + 2 + most <= model.context
        if text and is_short and content.parse_special:
            check_text(text)
            return text, most, None
    text, count, tokens = await counted(server, job, model)
    room = model.context - count
    return text, room if most is None else min(most, room), tokens


def check_text(text: str) -> None:
    """Raise `Unsupported` for a text that koboldcpp would cut."""
    if "\0" in text:
        hint = "It ends a prompt at a null character (U+0000). Remove that character."
        raise Unsupported("prompt", ENGINE, hint)


async def counted(server: Server, job: Generation, model: Model) -> tuple[str, int, int]:
    """Return the prompt as text, its number of tokens, and how many are the client's own.

    koboldcpp silently cuts the beginning of a prompt that does not fit, so its tokens are counted
    first.
    """
    content, is_own = job.prompt.content, False
    if isinstance(content, Text):
        if not content.parse_special:
            raise Unsupported("parse_special", ENGINE, CAPABILITIES.refused["parse_special"])
        is_own = bool(content.bos)
        text = await offload.run(len(content.text), with_media, job, content.text)
    else:
        # A BOS that the engine adds is one of the ids.
        is_own = model.adds_bos
        text = await _text_of(server, content, model)
    check_text(text)
    tokens = len((await server.token_count(text, False))["ids"])
    count = tokens + model.adds_bos
    if not count:
        raise EmptyPrompt
    wanted = 0 if job.clips else job.max_tokens or 0
    if count + wanted > model.context or count >= model.context:
        raise ContextExceeded(model.context, count, job.max_tokens or 0)
    return text, count, tokens + is_own


async def _text_of(server: Server, ids: TokenIds, model: Model) -> str:
    """Return the text of which koboldcpp makes exactly these token ids.

    koboldcpp puts a BOS in front of each prompt of a model that has one. So the ids begin with that
    BOS, and the text does not.
    """
    text = (await server.detokenize(ids)).decode()
    if model.adds_bos:
        if not text.startswith(model.bos_token):
            raise Unsupported(
                "prompt",
                ENGINE,
                "It puts a BOS in front of each prompt of this model. Begin the token ids with the "
                "BOS, or send text instead.",
            )
        text = text.removeprefix(model.bos_token)
    if tuple((await server.token_count(text, model.adds_bos))["ids"]) != ids:
        raise Unsupported(
            "prompt",
            ENGINE,
            "Its tokenizer does not preserve these token ids, or the model's vocabulary lacks one. "
            "Send text instead.",
        )
    return text


# The reasons of `/api/extra/perf`: no tokens left, the end token, a stop sequence.
STOP_REASONS: dict[int, FinishReason] = {0: "length", 1: "stop", 2: "length"}
# The facts of `/api/extra/perf` about the last generation that has ended.
FACTS = ("last_process", "last_eval", "last_token_count", "last_input_count")
# The number of idle checks, and the seconds between them. koboldcpp becomes idle a moment after it
# has closed the stream; a generation that still runs takes longer.
IDLE_CHECKS, CHECK_SECONDS = 20, 0.05
# Seconds for the engine to say what it has generated for a job that has no end.
NOTE_SECONDS = 1.0
# The bytes that count as a token if the engine does not say it, as in the limits of keys.
BYTES = 4
# Events to accept beyond one per requested token: text that was held back may have its own event.
SLACK = 8
# Tokens next to media that the engine leaves unused.
SPARE = 4
UNUSED = (
    "it ignored the images and audio of the request: it cannot read them, or its context is too "
    "small for them"
)
# The largest number of bytes to accept per token; all vocabularies stay far below it.
MOST_BYTES = 1024


@dataclass(slots=True)
class _Outcome:
    """The end of a call, filled in by the generator of its text when that ends.

    Args:
        reason: the engine's finish reason.
        last: its tokens, or None if they are not known.
        counted: the number of its tokens, where `last` is None.
        is_another: True if the stream was that of an earlier call, and nothing was read of it.
    """

    reason: FinishReason = "length"
    last: LastLogprobs | None = None
    counted: int = 0
    is_another: bool = False


class Run:
    """The consecutive calls of a job; each choice takes a turn in the queue.

    Args:
        prompt_tokens: their number without an added BOS; None to take it from the whole response.
    """

    def __init__(
        self,
        server: Server,
        job: Generation,
        model: Model,
        prompt: str,
        max_tokens: int,
        prompt_tokens: int | None,
    ) -> None:
        self.server = server
        self._job = job
        self.model = model
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._prompt_tokens = prompt_tokens
        # Whole responses have to list their tokens: to return them, or to count those before a cut.
        self._logs = job.logprobs is not None or bool(job.stops.texts)
        self._is_whole = is_whole(job, server)
        self._call: Call | None = None
        # For grammars: the number of the engine's generations after the last call, its payload, and
        # those of the choice so far with the tokens that were kept.
        self._generations = 0
        self._payload = b""
        self._kept: list[tuple[bytes, TokenIds]] = []
        self._ticket = job.ticket or Ticket()
        self._ticket.input = prompt_tokens or 0
        self._has_turn = False
        # The choice that runs, and the tokens of those before it.
        self._stream: ChoiceStream | None = None
        self._tokens = 0
        # The number of events of the call that runs; None if there is no such call.
        self._events: int | None = None

    async def take(self) -> None:
        """Wait for a turn.

        Raises:
            Busy: the queue is full and the request was not admitted before.
        """
        await self.server.turns.take(self._ticket)
        self._has_turn = True

    async def measure(self) -> None:
        """Count the prompt with its media, by a generation of one token; the next call reuses it.

        The engine drops media that it cannot read, and cuts the beginning of a text that does not
        fit next to them. Older versions do not report how many tokens they use.

        Raises:
            ContextExceeded: prompt, media and completion do not fit.
            Refused: the engine uses none of the media.
        """
        job, model, own = self._job, self.model, self._prompt_tokens
        if own is None or not (job.prompt.media and self.server.reports_tokens):
            return
        call = self._call = Call(self.server)
        payload = await payload_of(job, 0, self._prompt, 1, model.context, call.genkey)
        await call.start(WHOLE, payload, model)
        data = await call.read(1)
        with read_from(ENGINE, "a generation"):
            result = read_json(data, WHOLE)["results"][0]
            read_reason(result["finish_reason"], data)
            count = self._without_bos(result["prompt_tokens"])
        self._prompt_tokens = self._ticket.input = count
        if count <= own:
            raise Refused(job.prompt.media[0].param, ENGINE, UNUSED)
        room = model.context - (count + model.adds_bos) - SPARE
        wanted = job.max_tokens or 0
        if room < (1 if job.clips else max(wanted, 1)):
            # The error counts what the engine leaves unused, or its sum would seem to fit.
            raise ContextExceeded(model.context, model.context - room, wanted)
        self._max_tokens = min(self._max_tokens, room)

    def leave(self) -> None:
        """Give the turn to the next request, when the engine has ended the last call."""
        if self._has_turn:
            self._has_turn = False
            call, self._call = self._call, None
            self.server.pass_on(call)

    async def fail(self) -> None:
        """Give the turn to the next request, and note the tokens of a job that has no end.

        The engine says the text of the call meanwhile. If it does not, four bytes of a stream count
        as a token, and an event at least as one.
        """
        call, stream, ticket, prompt = (
            self._call,
            self._stream,
            self._job.ticket,
            self._prompt_tokens,
        )
        self.leave()
        ended = self._tokens + (stream.tokens if stream is not None else 0)
        running = max(self._events or 0, 0 if stream is None else stream.unended // BYTES)
        if ticket is None or not (ended or self._events is not None):
            return
        if stream is None and len(self._job.seeds) == 1:
            # The only choice has its end, which counts.
            return
        try:
            async with asyncio.timeout(NOTE_SECONDS):
                if call is not None and self._events is not None:
                    running = max(
                        running, await self._count(await self.server.generated(call.genkey))
                    )
                if prompt is None and ended + running:
                    content = self._job.prompt.content
                    is_own = isinstance(content, Text) and bool(content.bos)
                    prompt = await self._count(self._prompt) + is_own
        except (*MALFORMED, LatimerError, TimeoutError):
            pass
        finally:
            if ended + running:
                ticket.prompt += prompt or 0
                ticket.generated += ended + running

    async def _count(self, text: str) -> int:
        return len((await self.server.token_count(text, False))["ids"])

    async def batches(self) -> AsyncIterator[Batch]:
        """Yield the batches of all choices, one choice after the other.

        Raises:
            EngineError: the engine fails, or its response is malformed.
        """
        try:
            for choice in range(len(self._job.seeds)):
                if not self._has_turn:
                    await self.take()
                async with aclosing(self._batches_of(choice)) as batches:
                    async for batch in batches:
                        yield batch
                # Other requests must not wait for all choices of this one.
                self.leave()
        except MALFORMED as error:
            raise malformed(ENGINE, "a generation", error) from error

    async def _batches_of(self, choice: int) -> AsyncGenerator[Batch, None]:
        stream = ChoiceStream(self._job, choice, self._prompt_tokens or 0, self.model.eos_token)
        self._stream = stream
        tokens: list[CallTokens] | None = [] if self._job.logprobs is not None else None
        # Text waits for its tokens, unless the reader may cut it.
        shows = tokens is None or self._job.stops.by_reader
        ended = False
        self._kept = []
        whole = self._is_whole
        # One call generates at most 80 % of the context, or what `--genlimit` allows.
        while not ended and not stream.stopped and stream.tokens < self._max_tokens:
            before, start, outcome = stream.tokens, len(stream.text), _Outcome()
            parts = (self._whole if whole else self._streamed)(stream, outcome)
            async with aclosing(parts):
                async for data in parts:
                    if data and shows:
                        yield (Piece(choice, data),)
            if outcome.is_another:
                whole = True
                continue
            ended = outcome.reason == "stop" and not stream.stopped
            stream.end_call(outcome.last, outcome.counted, ended)
            self._events = None
            if tokens is not None:
                tokens.append(self._tokens_of(outcome.last, stream.text[start:], ended))
            if stream.tokens == before:
                break
            is_done = ended or stream.stopped or stream.tokens >= self._max_tokens
            if self._job.grammar is not None and (start or not is_done):
                await self._check_alone(is_first=not start)
        self._stream, self._tokens = None, self._tokens + stream.tokens
        yield self._last(stream, tokens, ended)

    async def _check_alone(self, is_first: bool) -> None:
        """Check that no other call ran between two calls of an answer with a grammar.

        The second call continues the grammar's state, which koboldcpp keeps only until another
        grammar is loaded. It begins no other call until a moment after a response.

        Raises:
            EngineError: a call of another client ran between them.
        """
        generations = (await self.server.perf()).get("total_gens")
        if not is_first and generations != self._generations + 1:
            raise EngineError(
                f"{ENGINE} ran a request of another client in the middle of an answer with a "
                "grammar. Send the request again."
            )
        self._generations = whole_of(generations)

    def _goes_on(self, stream: ChoiceStream, text: str, reason: FinishReason, tokens: int) -> bool:
        """Return True if another call continues the grammar of one that has ended."""
        return (
            self._job.grammar is not None
            and reason == "length"
            and stream.tokens + tokens < self._max_tokens
            and not stream.stopped
            and not any(stop in text for stop in self._job.stops.for_engine)
        )

    async def _to_character(
        self, last: LastLogprobs | None, text: bytes, is_sent: bool
    ) -> tuple[LastLogprobs, bytes]:
        """Return the tokens and the text of a call up to its last whole character.

        Another call continues it. The engine drops the bytes of a begun character, but its grammar
        expects the rest of it. So the calls of the choice are repeated up to there.

        Args:
            is_sent: True if the client has the text.

        Raises:
            EngineError: the engine generates other tokens, or a part of the text would be dropped.
        """
        if last is None:
            raise EngineError(f"{ENGINE} no longer returns its tokens.")
        ids = tuple(last["token_ids"])
        count = await characters.whole(self.server, ids)
        self._kept.append((self._payload, ids[:count]))
        if count == len(ids):
            return last, text
        shown = await self.server.detokenize(ids[:count])
        fits = shown == text if is_sent else text.startswith(shown)
        if not (count and fits and await self._repeat()):
            raise EngineError(
                f"{ENGINE} ended a call inside a character of an answer with a grammar, and its "
                "next call cannot continue it. Send a smaller 'max_tokens'."
            )
        tokens, content = last["tokens"][:count], last["content"][:count]
        return {"content": content, "tokens": tokens, "token_ids": [*ids[:count]]}, shown

    async def _repeat(self) -> bool:
        """Bring the grammar to the end of the kept tokens; return False if others are generated."""
        for payload, ids in self._kept:
            assert self._call is not None
            await self._call.end()
            call = self._call = Call(self.server)
            changed = {"max_length": len(ids), "genkey": call.genkey}
            again = await offload.run(len(payload), with_fields, payload, changed)
            await call.start(WHOLE, again, self.model)
            await call.read(len(ids))
            self._generations += 1
            last = await self.server.last_logprobs(call.genkey)
            if last is None or tuple(last["token_ids"]) != ids:
                return False
        return True

    def _tokens_of(self, last: LastLogprobs | None, text: bytes, ended: bool) -> CallTokens:
        if last is None:
            raise EngineError(f"{ENGINE} no longer returns its tokens.")
        control = frozenset({self.model.bos_token, self.model.eos_token} - {""})
        return tokens_of.read(last, text, ended, self._job.logprobs or 0, control)

    def _last(self, stream: ChoiceStream, tokens: list[CallTokens] | None, ended: bool) -> Batch:
        finish = stream.finish(ended)
        if tokens is None:
            return (finish,)
        inexact = ("logprobs",) if any(call.inexact for call in tokens) else ()
        finish = finish._replace(end=tokens[-1].end if tokens else None, inexact=inexact)
        all_tokens = [token for call in tokens for token in call.tokens]
        text = b"" if self._job.stops.by_reader else stream.text
        return Piece(stream.choice, text, all_tokens), finish

    async def _started(self, path: str, stream: ChoiceStream) -> tuple[Call, int]:
        """Start a call that continues the text; return it with its largest number of tokens."""
        if self._call is not None:
            # The engine has only one place, and this one may not have ended yet.
            await self._call.end()
        room = min(self._max_tokens - stream.tokens, longest_call(self.model.context))
        call = self._call = Call(self.server)
        prompt = self._prompt + stream.text.decode()
        payload = await payload_of(
            self._job, stream.choice, prompt, room, self.model.context, call.genkey,
            bool(stream.text), self._logs and path == WHOLE,
        )  # fmt: skip
        self._payload = payload if self._job.grammar is not None else b""
        self._events = 0
        if self.server.reports_tokens:
            await call.start(path, payload, self.model)
        else:
            # The number of generations before the call proves its end.
            await self.server.check_still(self.model)
            await call.start(path, payload)
        return call, room

    async def _whole(self, stream: ChoiceStream, outcome: _Outcome) -> AsyncGenerator[bytes, None]:
        """Yield the text of a call when the call has ended."""
        call, room = await self._started(WHOLE, stream)
        data = await call.read(room)
        reply = await offload.run(len(data), read_json, data, WHOLE)
        result = reply["results"][0]
        text, reason = text_of(result["text"]), read_reason(result["finish_reason"], data)
        counted = whole_of(result["completion_tokens"])
        _check_size(counted, len(text), room, 0)
        if self._prompt_tokens is None:
            stream.prompt_tokens = self._prompt_tokens = self._without_bos(result["prompt_tokens"])
        outcome.reason = reason
        outcome.counted = max(counted - (reason == "stop"), 0)
        if not counted:
            raise EngineError(f"{ENGINE} ended its response before it was finished.")
        if self._logs:
            outcome.last = await self.checked(result["logprobs"], text.encode(), reason, False)
            if outcome.last is None:
                raise EngineError(f"{ENGINE} returned the tokens of another text.")
        if self._goes_on(stream, text, reason, counted):
            last = outcome.last or await self.server.last_logprobs(call.genkey)
            outcome.last, kept = await self._to_character(last, text.encode(), False)
            text = kept.decode()
        yield stream.feed(text) + stream.rest()

    async def _streamed(
        self, stream: ChoiceStream, outcome: _Outcome
    ) -> AsyncGenerator[bytes, None]:
        """Yield the text of a call as it arrives."""
        call, room = await self._started(STREAM, stream)
        before, start = self.server.monitor.generations, len(stream.text)
        count = size = 0
        reason: FinishReason | None = None
        pauses = _Pauses(self, call, stream, start, room)
        async with aclosing(_events(call, stream, pauses.is_ended)) as events:
            async for event in events:
                part = text_of(event["token"])
                if part and not count:
                    if not await self._is_own(call, part):
                        outcome.is_another = True
                        return
                    pauses.has_begun = self.server.reports_tokens
                count, size = count + bool(part), size + len(part)
                self._events = count
                _check_size(count, size, room)
                yield stream.feed(part)
                if event["finish_reason"] is not None:
                    reason = read_reason(event["finish_reason"], part.encode())
                if stream.stopped:
                    break
        yield stream.rest()
        await call.abort()
        perf: Perf | None = None
        reason = reason or pauses.reason
        if reason is None and not stream.stopped:
            reason, perf = await self._idle_reason()
        outcome.reason = "length" if reason is None else reason
        text = stream.text[start:]
        if pauses.last is not None:
            outcome.last, is_proven = pauses.last, True
        elif self.server.reports_tokens:
            last = await self.server.last_logprobs(call.genkey)
            outcome.last = await self.checked(last, text, outcome.reason, stream.stopped)
            is_proven = outcome.last is not None
            # The text of the generation before may be empty.
            outcome.is_another = not (is_proven or text or perf)
            if outcome.last is not None:
                _check_size(len(outcome.last["tokens"]), 0, room, 0)
        else:
            is_proven = perf is None or await self._is_counted(perf, text, outcome.reason, before)
            ids = (await self.server.token_count(stream.text.decode(), False))["ids"]
            outcome.counted = len(ids) - stream.tokens
        if not is_proven and not outcome.is_another:
            raise EngineError(f"{ENGINE} ended its response before it was finished.")
        last = outcome.last
        if last and self._goes_on(stream, "", outcome.reason, len(last["tokens"])):
            outcome.last, _ = await self._to_character(last, text, True)

    def _without_bos(self, prompt_tokens: Any) -> int:
        """Return the number of the prompt's tokens from a reported one, which has an added BOS."""
        bos, content = self.model.bos_token, self._job.prompt.content
        has_bos = bool(bos) and self._prompt.startswith(bos)
        has_bos = has_bos or (isinstance(content, Text) and bool(content.bos))
        return whole_of(prompt_tokens) - (self.model.adds_bos and not has_bos)

    async def _is_own(self, call: Call, text: str) -> bool:
        """Return True if the first text of a stream is that of its own call.

        The stream begins after a fixed time, and sends the text of the generation before if its own
        has not begun.
        """
        server = self.server
        if not server.reports_tokens:
            return True
        try:
            return (await server.generated(call.genkey)).startswith(text)
        except EngineError:
            # The call's tokens decide at its end.
            return True

    async def _idle_reason(self) -> tuple[FinishReason, Perf]:
        """Return the finish reason of a stream that does not have one, and the engine's facts.

        Raises:
            EngineError: the engine still generates, or it reports no such reason.
        """
        for _ in range(IDLE_CHECKS):
            perf = await self.server.perf()
            if perf["idle"]:
                break
            await asyncio.sleep(CHECK_SECONDS)
        else:
            raise EngineError(f"{ENGINE} closed its response but is still generating.")
        reason = STOP_REASONS.get(whole_of(perf["stop_reason"], least=-(2**31)))
        if reason is None:
            raise EngineError(f"{ENGINE} ended its response without a finish reason.")
        return reason, perf

    async def native(self, stream: bool) -> NativeReply:
        """Start the only choice, and return the engine's own response."""
        server, model = self.server, self.model
        if self._call is not None:
            await self._call.end()
        call = self._call = Call(server)
        payload = await payload_of(
            self._job, 0, self._prompt, self._max_tokens, model.context, call.genkey
        )
        if stream and not server.reports_tokens:
            # The number of generations before the call proves its end.
            await server.check_still(model)
        response = await call.start(STREAM if stream else WHOLE, payload, model)
        body = self._native_events(call) if stream else call.chunks()
        return NativeReply(response.status, response.content_type, body)

    async def _native_events(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Yield the native events of a stream as they arrive, and check its end.

        Most streams have no final event, so one that the engine or a proxy has cut looks the same.

        Raises:
            EngineError: the stream has ended before its generation, or is that of another one.
        """
        before = self.server.monitor.generations
        parser, parts, is_whole = EventParser(), list[str](), False
        async with aclosing(call.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk
                with read_from(ENGINE, "a generation"):
                    for data in parser.feed(chunk):
                        event = read_json(data, STREAM)
                        parts.append(text_of(event["token"]))
                        is_whole = is_whole or event["finish_reason"] is not None
        if not is_whole:
            await self._check_whole(call, "".join(parts).encode(), before)

    async def _check_whole(self, call: Call, text: bytes, before: int | None) -> None:
        reason, perf = await self._idle_reason()
        if self.server.reports_tokens:
            # The tokens of a stop sequence may have no text.
            is_cut = bool(self._job.stops.texts)
            last = await self.server.last_logprobs(call.genkey)
            is_proven = await self.checked(last, text, reason, is_cut) is not None
        else:
            is_proven = await self._is_counted(perf, text, reason, before)
        if not is_proven:
            raise EngineError(f"{ENGINE} ended its response before it was finished.")

    async def checked(
        self, last: LastLogprobs | None, text: bytes, reason: FinishReason, is_cut: bool
    ) -> LastLogprobs | None:
        """Return the tokens of a generation if they make up its text, and None otherwise.

        Args:
            is_cut: True if the text is only the beginning.
        """
        if last is None:
            return None
        tokens, ids = last["tokens"], last["token_ids"]
        if not tokens or len(tokens) != len(ids):
            return None
        if reason == "stop":
            tokens, ids = tokens[:-1], ids[:-1]

        def fits(found: bytes) -> bool:
            return found.startswith(text) if is_cut else found == text

        if fits(joined(tokens)):
            return last
        if not self._job.preserved_tokens:
            control = {special.spelling for special in await self.server.special_tokens()}
            if fits(joined(tokens, control)):
                return last
        # Tokens inside a character are empty in the list, but detokenizing all ids restores them.
        return last if fits(await self.server.detokenize(tuple(ids))) else None

    async def _is_counted(
        self, perf: Perf, text: bytes, reason: FinishReason, before: int | None
    ) -> bool:
        """Return True if the last generation was this one and has as many tokens as the text.

        Args:
            before: the number of generations before the call, or None if unknown.
        """
        if before is None or whole_of(perf["total_gens"]) != before + 1:
            return False
        counted = len((await self.server.token_count(text.decode(), False))["ids"])
        return counted == whole_of(perf["last_token_count"]) - (reason == "stop")


class _Pauses:
    """The pauses of a stream, in one of which it may have ended.

    koboldcpp omits the final event of a stream whose last text it sends before it notices the end.
    When it closes the stream, the next generation may already have begun, and the tokens of this
    one are lost. So they are asked for in a pause, if the engine's facts show that a generation has
    ended. Its tokens prove it: they make up the text, and the engine still names their key.

    Attributes:
        has_begun: True if the stream has shown its own text.
        reason: the finish reason, when the stream has ended in a pause.
        last: its tokens then.
    """

    def __init__(self, run: Run, call: Call, stream: ChoiceStream, start: int, room: int) -> None:
        self._run, self._call, self._stream = run, call, stream
        self._start, self._room = start, room
        self._facts: tuple[Any, ...] | None = None
        self.has_begun = False
        self.reason: FinishReason | None = None
        self.last: LastLogprobs | None = None

    async def is_ended(self) -> bool:
        """Return True if the generation has ended and all of its text has arrived."""
        if not self.has_begun:
            return False
        perf = await self._run.server.perf()
        before, self._facts = self._facts, tuple(map(perf.get, FACTS))
        if self._facts == before:
            return False
        last = await self._run.server.last_logprobs(self._call.genkey)
        if last is None or not last["tokens"]:
            return False
        tokens = last["tokens"]
        reason: FinishReason | None = "length" if len(tokens) >= self._room else None
        if tokens[-1] == self._run.model.eos_token:
            reason = "stop"
        elif before is not None:
            # The facts have changed during this generation, so they are its own.
            reason = STOP_REASONS.get(whole_of(perf["stop_reason"], least=-(2**31)))
        if reason is None:
            return False
        text = self._stream.text[self._start :]
        self.last = await self._run.checked(last, text, reason, False)
        self.reason = None if self.last is None else reason
        return self.last is not None


async def _events(
    call: Call, stream: ChoiceStream, is_ended: Callable[[], Awaitable[bool]]
) -> AsyncGenerator[StreamEvent, None]:
    """Yield the events of a stream, the last one with its finish reason if it is sent."""
    parser = EventParser()
    async with aclosing(call.chunks(is_ended)) as chunks:
        async for chunk in chunks:
            for data in parser.feed(chunk):
                event = stream.parse(data)
                if event["finish_reason"] is not None:
                    call.mark_over()
                yield event
                if event["finish_reason"] is not None:
                    return


def _check_size(count: int, size: int, room: int, slack: int = SLACK) -> None:
    """Raise `EngineError` if a call has more tokens, or more text, than it may have."""
    most = room + slack
    if count > most or size > most * MOST_BYTES:
        raise EngineError(f"{ENGINE} sent more than the {room} tokens requested.")


def joined(tokens: Collection[str], control: Collection[str] = ()) -> bytes:
    """Return the text of tokens, without that of control tokens."""
    return "".join(text_of(token) for token in tokens if token not in control).encode()


def with_fields(payload: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a payload with other values of some fields."""
    return orjson.dumps({**orjson.loads(payload), **fields})


async def payload_of(
    job: Generation,
    choice: int,
    prompt: str,
    max_length: int,
    context: int,
    genkey: str,
    continued: bool = False,
    logs: bool = False,
) -> bytes:
    """Return the JSON payload of one call.

    Args:
        continued: True if it continues an earlier call of the same choice.
        logs: True if the response has to list its tokens.
    """

    def made() -> bytes:
        payload = to_native(job, choice, prompt, max_length, context, genkey)
        if job.grammar is not None and continued:
            payload["grammar_retain_state"] = True
        if logs:
            payload["logprobs"] = True
        return orjson.dumps(payload)

    return await offload.run(len(prompt) + sum(len(one.data) for one in job.prompt.media), made)
