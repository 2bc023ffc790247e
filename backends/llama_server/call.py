"""One native call of llama-server: the stream of one choice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from .. import offload
from ..base import Batch, Event, Generation, Model, Piece, Pushed, Stops, Text, Token, TokenIds
from ..connection import Connection
from ..errors import (
    MALFORMED,
    ContextExceeded,
    EngineError,
    EngineUnavailable,
    Unsupported,
    ids_of,
    malformed,
    read_from,
    whole_of,
)
from ..grammar import with_gbnf
from .prompt import check_biases, check_prompt, native_prompt, prompt_ids, text_prompt
from .scoring import score, speculative
from .server import Server, check_hides
from .tokens import TokenStream, pieces_of
from .translate import (
    ENGINE,
    ChoiceStream,
    NativePrompt,
    OtherModel,
    check_model,
    encoded,
    own_fields,
    size_of,
    to_error,
)

INSIDE = (
    "With images or audio it has no log-probability of a token that ends inside a character, and "
    "the answer has one. Omit it, or use the in-process engine."
)


def _hidden(job: Generation, model: Model) -> int:
    """Return the number of prompt tokens that are not from the client: a BOS."""
    content = job.prompt.content
    added = not content.bos if isinstance(content, Text) else job.prompt.suffix is not None
    return job.prompt.bos_count or int(model.adds_bos and added)


class Call:
    """The batches of one choice.

    A class rather than a generator for speed: every token passes here.
    """

    __slots__ = (
        "_begun", "_choice", "_chunk", "_closed", "_connection", "_context", "_end", "_job",
        "_names", "_payload", "_prompt", "_read", "_response", "_server", "_shows", "_stream",
        "_tokens",
    )  # fmt: skip

    _connection: Connection | None
    _prompt: TokenIds
    _read: Callable[[list[dict[str, Any]]], Awaitable[Batch]] | None

    def __init__(self, server: Server, job: Generation, choice: int) -> None:
        self._server = server
        self._job = job
        self._choice = choice
        self._closed = False
        self._connection = None

    async def __aenter__(self) -> Call:
        server, job = self._server, self._job
        server.turns.check(job.ticket)
        monitor = server.monitor
        model = monitor.model
        if (
            model is None
            or not monitor.is_verified
            or (job.fingerprint and job.fingerprint != model.fingerprint)
        ):
            model = await monitor.get_for(job)
        self._names = server.names
        if job.sampling.logit_bias:
            await check_biases(server, job)
        self._shows = job.logprobs is not None
        if job.prompt.is_cut and not self._shows and not (await server.facts()).speculative:
            # The server replaces the rest of a character, so its bytes come from the tokens' ids.
            self._job = job = replace(job, logprobs=0)
        prompt: NativePrompt | None
        if job.logprobs is None:
            prompt = text_prompt(job, model)
            if prompt is None:
                prompt = await native_prompt(server, job, model)
            careful = job.preserved_tokens or job.stops.by_reader
            vocabulary = (await server.facts()).vocabulary if careful else None
            self._stream = ChoiceStream(job, self._choice, _hidden(job, model), vocabulary)
            self._read = self._read_careful if job.stops.texts and not careful else None
        else:
            prompt = await self._prepare_tokens(model)
        self._context, self._end, self._begun = model.context, model.eos_token, False
        self._stream.context = model.context
        if job.grammar is not None:
            job = await with_gbnf(job)
        if server.turns.taken:
            await offload.give_way()
        self._payload = own_fields(job, self._choice, prompt, model.context)
        if isinstance(prompt, str) and len(prompt) <= offload.SMALL:
            data = encoded(self._payload)
        else:
            data = await offload.run(size_of(prompt), encoded, self._payload)
        if not server.turns.try_take(job.ticket):
            await server.turns.take(job.ticket)
        try:
            if monitor.model is not model:
                raise monitor.changed()
            response = await server.client.send("POST", "/completion", data)
        except BaseException as error:
            server.turns.release()
            if isinstance(error, EngineUnavailable):
                monitor.invalidate()
            raise
        self._response = response
        if response.status != 200:
            try:
                body = await response.aread()
                if response.status == 400:
                    await check_prompt(server, job)
                raise to_error(response.status, body, job, model.context)
            finally:
                await self.__aexit__()
        source = response.stream
        self._connection = source if isinstance(source, Connection) else None
        if self._connection is not None and not (job.streamed or job.stops.by_reader):
            # Nobody needs a text before the end, so its tokens are read together.
            self._connection.holds = True
        self._chunk = source.__anext__
        return self

    async def __aexit__(self, *error: object) -> None:
        if not self._closed:
            self._closed = True
            if self._connection is not None:
                # It refers to the reader, which refers to this object.
                self._connection.push = None
            if error and error[0] is not None and not self._stream.finished:
                self.note_tokens()
            # A bound method, which refers to this object.
            self._read = None
            self._server.turns.release()
            await self._response.aclose()

    def note_tokens(self) -> None:
        """Note the tokens of a call that has no end, or of one of several, as far as known."""
        ticket, connection = self._job.ticket, self._connection
        if ticket is None:
            return
        event = self._stream.event
        # Nobody has read what a plain response has sent.
        data = connection.unread if connection is not None and connection.holds else b""
        with suppress(*MALFORMED, EngineError):
            if events := self._stream.parser.feed(data):
                event = self._stream.parse(events)[-1]
            if event:
                ticket.generated += whole_of(event["tokens_predicted"])
                # The choices of a prompt share it.
                prompt = 0 if self._choice else self._stream.prompt_tokens(event)
                ticket.prompt += prompt
                if prompt and "timings" in event:
                    ticket.looked_up += prompt
                    ticket.cached += min(whole_of(event["timings"]["cache_n"]), prompt)

    @property
    def is_over(self) -> bool:
        """True if no batch follows, because all of the response was read."""
        connection = self._connection
        return self._stream.finished and connection is not None and connection.is_read

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Batch:
        stream = self._stream
        if self._choice in self._job.stops.ends and not stream.finished:
            return await self._interrupt()
        connection = self._connection
        if self._closed or (stream.finished and connection is not None and connection.is_read):
            raise StopAsyncIteration
        while True:
            try:
                chunk = await self._chunk()
            except StopAsyncIteration:
                if not stream.finished:
                    reason = f"{ENGINE} ended its response before it was finished."
                    raise EngineError(reason) from None
                raise
            data = stream.parser.feed(chunk)
            if not data:
                continue
            before = stream.event
            try:
                events = stream.parse(data)
                if not self._begun:
                    self._begun = True
                    if self._job.prompt.media:
                        self._begin(events[0])
                    if self._job.ticket is not None:
                        self._job.ticket.input = events[0]["tokens_evaluated"] - stream.bos_count
                batch = stream.feed(events) if self._read is None else await self._read(events)
                if events[-1]["stop"]:
                    check_model(events[-1], self._names)
                    if self._end and events[-1]["stop_type"] == "eos":
                        shown = (before, *events)[-2].get("content")
                        if shown and shown.endswith(self._end):
                            await check_hides(self._end, self._server.ask)
            except OtherModel as error:
                raise self._server.served(error.name) from error
            except MALFORMED as error:
                raise malformed(ENGINE, "a completion", error) from error
            if batch:
                return batch

    def push_to(self, receive: Callable[[Any], bool], as_text: bool) -> Pushed | None:
        """Push what needs no question to the server; see `base.Pushing`."""
        if self._connection is None or self._job.logprobs is not None:
            return None
        self._connection.push = receive
        return self._stream.push(as_text)

    async def _interrupt(self) -> Batch:
        """End a choice that its reader has cut; the server does not know the stop sequence."""
        await self.__aexit__()
        self._stream.finished = True
        with read_from(ENGINE, "a completion"):
            stream = self._stream if self._job.logprobs is None else self._tokens
            return (stream.stopped(),)

    def _begin(self, event: dict[str, Any]) -> None:
        """Read the length of a prompt with media, which only the server knows."""
        self._stream.check_room(event, self._context)
        if self._job.logprobs is not None:
            self._tokens.prompt_tokens = self._stream.prompt_tokens(event)

    async def _read_careful(self, events: list[dict[str, Any]]) -> Batch:
        """Read events of a job with stop sequences; the last one may need the vocabulary."""
        stream = self._stream
        # A faulty server sends more after its last event, which `feed` rejects.
        last = next((at for at, event in enumerate(events) if event["stop"]), len(events) - 1)
        batch: list[Event] = stream.feed(events[:last])
        if last == len(events) - 1 and stream.needs_vocabulary(events[last]):
            stream.vocabulary = (await self._server.facts()).vocabulary
        return batch + stream.feed(events[last:])

    async def _prepare_tokens(self, model: Model) -> NativePrompt:
        server, job = self._server, self._job
        facts = await server.facts()
        if facts.speculative:
            raise speculative()
        prompt: NativePrompt
        if job.prompt.media:
            prompt = await native_prompt(server, job, model)
            # The first event has the length of the prompt.
            self._prompt, count = (), 0
        else:
            prompt, count = await prompt_ids(server, job, model)
            self._prompt = prompt
            if len(self._prompt) >= model.context:
                raise ContextExceeded(model.context, len(prompt), job.max_tokens or 0)
        # The stream checks the events; its text is not used.
        self._stream = ChoiceStream(replace(job, stops=Stops()), self._choice, _hidden(job, model))
        self._tokens = TokenStream(job, self._choice, count, facts.vocabulary)
        self._read = self._read_tokens
        return prompt

    async def _read_tokens(self, events: list[dict[str, Any]]) -> Batch:
        """Read events with log-probabilities; score the tokens that have none."""
        self._stream.feed(events)
        stream = self._tokens
        start = len(self._prompt) + len(stream.ids)
        tokens = stream.feed(events)
        if stream.unsettled is not None:
            tokens += stream.settle(await self._all_ids())
        batch: list[Event] = []
        ids = (*self._prompt, *stream.ids)
        if not self._shows:
            batch += [
                Piece(self._choice, token.data, (), token.id in stream.preserved, 1)
                for token in tokens
            ]
        elif tokens:
            tokens = [
                token if token.logprob is not None else await self._scored(token, ids, start + at)
                for at, token in enumerate(tokens)
            ]
            batch += pieces_of(self._choice, tokens, stream.preserved)
        if stream.finish is not None:
            end = stream.finish.end
            if self._shows and end is not None and end.logprob is None:
                end = await self._scored(end, (*ids, end.id), len(ids))
            batch.append(stream.finish._replace(end=end))
        return batch

    async def _scored(self, token: Token, ids: TokenIds, at: int) -> Token:
        if self._job.prompt.media:
            # Only a prompt of ids can be followed by the tokens before this one, and forced.
            raise Unsupported("logprobs", ENGINE, INSIDE)
        found = (await score(self._server, ids[: at + 1], at, self._job.logprobs or 0))[0]
        return token._replace(logprob=found.logprob, top=found.top)

    async def _all_ids(self) -> list[int]:
        """Return all token ids of the answer, from the same request without streaming."""
        fields = {"stream": False, "return_tokens": True, "n_probs": 0}
        payload = {**self._payload, **fields, "response_fields": ["tokens"]}
        data = await offload.run(size_of(self._payload["prompt"]), encoded, payload)
        status, body = await self._server.call("/completion", data, None)
        if status != 200:
            raise to_error(status, body, self._job, self._context)
        reply = await offload.run(len(body), orjson.loads, body)
        return list(ids_of(reply["tokens"]))
