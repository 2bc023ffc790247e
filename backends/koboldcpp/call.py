"""The consecutive native calls of a job: prompt, text, token counts, continuation, abort.

koboldcpp omits the final event if it sends all text before it notices the end of the generation. A
broken connection looks the same, and the facts about the last generation may be about another one.
So the text has to be proven complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from typing import Literal

import orjson

from ...schemas.native.koboldcpp import LastLogprobs, Perf
from .. import offload
from ..base import Batch, Generation, Model, Piece, Text, TokenIds
from ..errors import (
    MALFORMED,
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    LatimerError,
    Unsupported,
    malformed,
    text_of,
    whole_of,
)
from ..http import Response
from ..queue import Ticket
from ..sse import EventParser
from . import tokens as tokens_of
from .server import Server, new_genkey
from .tokens import CallTokens
from .translate import (
    CAPABILITIES,
    ENGINE,
    ChoiceStream,
    longest_call,
    to_error,
    to_native,
    with_media,
)


async def counted(server: Server, job: Generation, model: Model) -> tuple[str, int, int]:
    """Return the prompt as text, and its number of tokens with a BOS and without.

    koboldcpp silently cuts the beginning of a prompt that does not fit, so its tokens are counted
    first.
    """
    content = job.prompt.content
    if isinstance(content, Text):
        if not content.parse_special:
            raise Unsupported("parse_special", ENGINE, CAPABILITIES.refused["parse_special"])
        text = await offload.run(len(content.text), with_media, job, content.text)
    else:
        text = await _text_of(server, content)
    tokens = len((await server.token_count(text, False))["ids"])
    count = tokens + model.adds_bos
    if not count:
        raise EmptyPrompt
    if count + (job.max_tokens or 0) > model.context or count >= model.context:
        raise ContextExceeded(model.context, tokens, job.max_tokens or 0)
    return text, count, tokens


async def _text_of(server: Server, ids: TokenIds) -> str:
    """Return the text of token ids, if koboldcpp tokenizes it to the same ids."""
    text = (await server.detokenize(ids)).decode()
    if tuple((await server.token_count(text, False))["ids"]) != ids:
        raise Unsupported(
            "prompt", ENGINE, "Its tokenizer does not preserve these token ids. Send text instead."
        )
    return text


FinishReason = Literal["stop", "length"]

STOP_REASONS: dict[int, FinishReason] = {0: "length", 1: "stop", 2: "length"}
# The number of idle checks, and the seconds between them. koboldcpp becomes idle a moment after it
# has closed the stream; a generation that still runs takes longer.
LOOKS, LOOK_SECONDS = 20, 0.05


async def prove_finish_reason(
    server: Server, genkey: str, text: bytes, before: int | None, shows_control: bool
) -> FinishReason:
    """Return the finish reason of a generation whose stream does not have one.

    Args:
        genkey: the key of the call.
        text: the text that the call has sent.
        before: the number of generations before the call, or None if unknown.
        shows_control: True if control tokens are part of the text.

    Raises:
        EngineError: nothing proves that the text is complete.
    """
    perf = await _idle(server)
    reason = STOP_REASONS.get(whole_of(perf["stop_reason"], least=-(2**31)))
    if reason is None:
        raise EngineError(f"{ENGINE} ended its response without a finish reason.")
    if server.reports_tokens:
        last = await server.last_logprobs(genkey)
        proven = last is not None and await _is_of(last, text, reason, server, shows_control)
    else:
        proven = await _is_counted(perf, text, reason, before, server)
    if not proven:
        raise EngineError(f"{ENGINE} ended its response before it was finished.")
    return reason


async def _idle(server: Server) -> Perf:
    """Wait until the engine is idle, and return its facts about the last generation."""
    for _ in range(LOOKS):
        perf = await server.perf()
        if perf["idle"]:
            return perf
        await asyncio.sleep(LOOK_SECONDS)
    raise EngineError(f"{ENGINE} closed its response but is still generating.")


async def _is_of(
    last: LastLogprobs, text: bytes, reason: FinishReason, server: Server, shows_control: bool
) -> bool:
    """Return True if the tokens of a generation make up the text."""
    tokens, ids = last["tokens"], last["token_ids"]
    if not tokens or len(tokens) != len(ids):
        return False
    if reason == "stop":
        tokens, ids = tokens[:-1], ids[:-1]
    if joined(tokens) == text:
        return True
    if not shows_control:
        control = {special.spelling for special in await server.special_tokens()}
        if joined(tokens, control) == text:
            return True
    # Tokens inside a character are empty in the list, but detokenizing all ids restores them.
    return await server.detokenize(tuple(ids)) == text


def joined(tokens: Collection[str], control: Collection[str] = ()) -> bytes:
    """Return the text of tokens, without that of control tokens."""
    return "".join(text_of(token) for token in tokens if token not in control).encode()


async def _is_counted(
    perf: Perf, text: bytes, reason: FinishReason, before: int | None, server: Server
) -> bool:
    """Return True if the last generation was this one and has as many tokens as the text."""
    if before is None or whole_of(perf["total_gens"]) != before + 1:
        return False
    counted = len((await server.token_count(text.decode(), False))["ids"])
    return counted == whole_of(perf["last_token_count"]) - (reason == "stop")


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
        self._response: Response | None = None
        self._running = False
        self._party = job.party or Ticket()
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
        # Text waits for its tokens, unless the reader may cut it.
        shows = tokens is None or self._job.stops.by_reader
        ended = False
        # One call generates at most 80 % of the context, or what `--genlimit` allows.
        while not ended and not stream.stopped and stream.tokens < self._max_tokens:
            before, start = stream.tokens, len(stream.text)
            reason = None
            async with aclosing(self._call(stream)) as call:
                async for text, finish_reason in call:
                    reason = finish_reason
                    data = stream.feed(text)
                    if data and shows:
                        yield (Piece(choice, data),)
                    if stream.stopped:
                        break
            rest = stream.rest()
            if rest and shows:
                yield (Piece(choice, rest),)
            await self.aclose()
            if reason is None and not stream.stopped:
                reason = await prove_finish_reason(
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
        text = b"" if self._job.stops.by_reader else stream.text
        return Piece(stream.choice, text, all_tokens), finish

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
        self._generations = self._server.monitor.generations
        path = "/api/extra/generate/stream"
        response = self._response = await self._server.client.send("POST", path, payload)
        if response.status != 200:
            raise to_error(response.status, await response.aread())
        self._running = True
        parser = EventParser()
        count, size, most = 0, 0, room + SLACK
        async for chunk in self._chunks(response):
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

    async def _chunks(self, response: Response) -> AsyncIterator[bytes]:
        """Yield the stream's chunks; raise an error if the engine goes idle before its end."""
        idle = 0
        chunks = aiter(response.stream)
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
        response, self._response = self._response, None
        if response is None:
            return
        try:
            if self._running:
                await self._server.abort(self._genkey)
        except LatimerError:
            pass  # The engine is gone, so nothing runs there.
        finally:
            await response.aclose()


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
