"""The consecutive native calls of a job: text, token counts, continuation, abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing

import orjson

from ...schemas.native.koboldcpp import LastLogprobs
from .. import offload
from ..base import Batch, Generation, Model, Piece
from ..errors import MALFORMED, EngineError, LatimerError, malformed, text_of
from ..sse import EventParser
from ..turns import Party
from ..upstream import Reply
from . import tokens as tokens_of
from . import whole
from .server import Server, new_genkey
from .tokens import CallTokens
from .translate import ENGINE, ChoiceStream, longest_call, to_error, to_native

# Events to accept beyond one per requested token: text that was held back may have its own event.
SLACK = 8
# The largest number of bytes to accept per token; all vocabularies stay far below it.
MOST_BYTES = 1024


class Run:
    """The consecutive calls of a job; each choice takes a turn in the queue."""

    def __init__(
        self,
        server: Server,
        job: Generation,
        model: Model,
        prompt: str,
        max_tokens: int,
        prompt_tokens: int,
    ) -> None:
        self._server = server
        self._job = job
        self._model = model
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._prompt_tokens = prompt_tokens
        self._room, self._genkey = 0, ""
        self._generations: int | None = None
        self._exchange: AbstractAsyncContextManager[Reply] | None = None
        self._running = False
        self._party = job.party or Party()
        self._has_turn = False

    async def take(self) -> None:
        """Wait for a turn.

        Raises:
            Busy: the queue is full and the request was not admitted before.
        """
        await self._server.turns.take(self._party)
        self._has_turn = True

    def release(self) -> None:
        """Give the turn to the next request."""
        if self._has_turn:
            self._has_turn = False
            self._server.turns.release()

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
                self.release()
        except MALFORMED as error:
            raise malformed(ENGINE, "a generation", error) from error

    async def _batches_of(self, choice: int) -> AsyncGenerator[Batch, None]:
        end = self._model.eos_token
        stream = ChoiceStream(self._job, choice, self._prompt_tokens, end)
        tokens: list[CallTokens] | None = [] if self._job.logprobs is not None else None
        ended = False
        # One call generates at most 80 % of the context, or what `--genlimit` allows.
        while not ended and not stream.stopped and stream.tokens < self._max_tokens:
            before, start = stream.tokens, len(stream.text)
            reason = None
            async with aclosing(self._call(stream)) as call:
                async for text, finish_reason in call:
                    reason = finish_reason
                    data = stream.feed(text)
                    if data and tokens is None:
                        yield (Piece(choice, data),)
                    if stream.stopped:
                        break
            rest = stream.rest()
            if rest and tokens is None:
                yield (Piece(choice, rest),)
            await self.aclose()
            if reason is None and not stream.stopped:
                reason = await whole.finish_reason(
                    self._server, self._genkey, stream.text[start:], self._generations,
                    bool(self._job.preserved_tokens),
                )  # fmt: skip
            ended = reason == "stop" and not stream.stopped
            last = await self._count(stream, ended)
            if tokens is not None:
                tokens.append(self._tokens_of(last, stream.text[start:], ended))
            if stream.tokens == before:
                break
        yield self._last(stream, tokens, ended)

    def _tokens_of(self, last: LastLogprobs | None, text: bytes, ended: bool) -> CallTokens:
        if last is None:
            raise EngineError(f"{ENGINE} no longer returns its tokens.")
        control = frozenset({self._model.bos_token, self._model.eos_token} - {""})
        return tokens_of.read(last, text, ended, self._job.logprobs or 0, control)

    def _last(self, stream: ChoiceStream, tokens: list[CallTokens] | None, ended: bool) -> Batch:
        finish = stream.finish(ended)
        if tokens is None:
            return (finish,)
        inexact = ("logprobs",) if any(call.inexact for call in tokens) else ()
        finish = finish._replace(end=tokens[-1].end if tokens else None, inexact=inexact)
        all_tokens = [token for call in tokens for token in call.tokens]
        return Piece(stream.choice, stream.text, all_tokens), finish

    async def _call(self, stream: ChoiceStream) -> AsyncGenerator[tuple[str, str | None], None]:
        """Yield the text of one call as it arrives, with the finish reason if it is sent."""
        room = min(self._max_tokens - stream.tokens, longest_call(self._model.context))
        prompt = self._prompt + stream.text.decode()
        self._room, self._genkey = room, new_genkey()
        payload = await payload_of(
            self._job, stream.choice, prompt, room, self._model.context, self._genkey,
            bool(stream.text),
        )  # fmt: skip
        await self._server.check_still(self._model)
        self._generations = self._server.watch.generations
        exchange = self._server.upstream.send("POST", "/api/extra/generate/stream", payload)
        reply = await exchange.__aenter__()
        self._exchange = exchange
        if reply.status != 200:
            raise to_error(reply.status, await reply.read())
        self._running = True
        parser = EventParser()
        count, size, most = 0, 0, room + SLACK
        async for chunk in self._chunks(reply):
            for data in parser.feed(chunk):
                event = stream.parse(data)
                self._running = event["finish_reason"] is None
                text = text_of(event["token"])
                count, size = count + bool(text), size + len(text)
                if count > most or size > most * MOST_BYTES:
                    raise EngineError(f"{ENGINE} sent more than the {room} tokens requested.")
                yield text, event["finish_reason"]
                if not self._running:
                    return
        self._running = False

    async def _chunks(self, reply: Reply) -> AsyncIterator[bytes]:
        """Yield the stream's chunks; raise an error if the engine goes idle before its end."""
        idle = 0
        chunks = reply.chunks()
        while True:
            # A task, since a cancelled read cannot be resumed.
            reading = asyncio.ensure_future(anext(chunks, b""))
            try:
                while not (await asyncio.wait([reading], timeout=self._server.silence))[0]:
                    idle = idle + 1 if (await self._server.perf())["idle"] else 0
                    if idle >= 2:
                        raise EngineError(f"{ENGINE} became idle without sending a response.")
                chunk = await reading
            finally:
                reading.cancel()
            if not chunk:
                return
            yield chunk

    async def _count(self, stream: ChoiceStream, ended: bool) -> LastLogprobs | None:
        last = await self._server.last_logprobs(self._genkey)
        if last is not None and len(last["tokens"]) > self._room + SLACK:
            raise EngineError(f"{ENGINE} generated more than the {self._room} tokens requested.")
        counted = 0
        if last is None:
            text = stream.text.decode()
            counted = len((await self._server.token_count(text, False))["ids"]) - stream.tokens
        stream.end_call(last, counted, ended)
        return last

    async def aclose(self) -> None:
        """End the open call, if any; aborting by key is half a second faster than closing."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        try:
            if self._running:
                await self._server.abort(self._genkey)
        except LatimerError:
            pass  # The engine is gone, so nothing runs there.
        finally:
            await exchange.__aexit__(None, None, None)


async def payload_of(
    job: Generation,
    choice: int,
    prompt: str,
    max_length: int,
    context: int,
    genkey: str,
    continued: bool = False,
) -> bytes:
    """Return the JSON payload of one call.

    Args:
        continued: True if it continues an earlier call of the same choice.
    """

    def made() -> bytes:
        payload = to_native(job, choice, prompt, max_length, context, genkey)
        if "grammar" in payload and continued:
            payload["grammar_retain_state"] = True
        return orjson.dumps(payload)

    return await offload.run(len(prompt) + sum(len(one.data) for one in job.prompt.media), made)
