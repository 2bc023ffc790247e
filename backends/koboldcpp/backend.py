"""The koboldcpp backend, which queues jobs and turns them into native calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..base import (
    Backend,
    Batch,
    Capabilities,
    Embedding,
    EmbeddingModel,
    Embeddings,
    Generation,
    Load,
    Model,
    NativeReply,
    Ranking,
    Scores,
    Special,
    TokenIds,
)
from ..errors import InvalidGrammar, NotServed, Unsupported, read_from
from ..grammar import has_tokens, with_gbnf
from ..queue import QUEUE
from ..speech.base import Transcriber
from ..streams import end_at_once
from . import tokens as tokens_of
from .embeddings import NO_RANKS, embed, embedding_model
from .run import Run, check_text, counted, input_of
from .server import SILENCE, Server
from .speech import KoboldSpeaker
from .transcription import transcriber
from .translate import CAPABILITIES, ENGINE, longest_call

if TYPE_CHECKING:
    from ..http import Client


class KoboldCpp(Backend):
    """A running koboldcpp.

    Args:
        url: the server's address (`http://127.0.0.1:5001`).
        key: the server's `--password`, if it has one.
        max_waiting: the largest number of waiting requests; others are rejected as busy.
        silence: seconds without an event after which the engine is asked if it still generates.
        client: as of `LlamaServer`.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        max_waiting: int = QUEUE,
        silence: float = SILENCE,
        client: Client | None = None,
    ) -> None:
        self.server = Server.at(url, key, max_waiting, silence, client)
        self._speaker = KoboldSpeaker(self.server)

    @property
    @override
    def capabilities(self) -> Capabilities:
        """The capabilities; before 1.115, `usage` comes from the tokenizer, inexactly."""
        if self.server.reports_tokens:
            return CAPABILITIES
        return replace(CAPABILITIES, inexact=CAPABILITIES.inexact | {"usage"})

    @override
    def model(self) -> Coroutine[Any, Any, Model]:
        return self.server.monitor.get()

    @override
    def known_model(self) -> Model | None:
        return self.server.monitor.known

    @override
    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run the choices one after the other, each in its turn."""
        server = self.server
        tokens_of.check(job)
        if job.prompt.suffix is not None:
            raise Unsupported("suffix", ENGINE, CAPABILITIES.refused["suffix"])
        server.turns.check(job.ticket)
        model = await server.monitor.get_for(job)
        if job.logprobs is not None and not server.reports_tokens:
            raise Unsupported(
                "logprobs",
                f"this {ENGINE}",
                "Versions before 1.115 do not return them. Update koboldcpp.",
            )
        with read_from(ENGINE, "its tokenizer"):
            prompt, max_tokens, tokens = await input_of(server, job, model)
        job = await _with_grammar(job)
        if max_tokens == 0:
            yield end_at_once(job, tokens or 0)
            return
        run = Run(server, job, model, prompt, max_tokens, tokens)
        await run.take()
        try:
            await run.measure()
            yield run.batches()
        except (Exception, asyncio.CancelledError):
            await run.fail()
            raise
        finally:
            run.leave()

    @override
    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        server = self.server
        server.turns.check(job.ticket)
        model = await server.monitor.get_for(job)
        with read_from(ENGINE, "its tokenizer"):
            prompt, count, tokens = await counted(server, job, model)
        job = await _with_grammar(job)
        room = model.context - count if job.max_tokens is None else job.max_tokens
        cap = longest_call(model.context)
        if job.max_tokens is not None and room > cap:
            raise Unsupported("oai_compat", ENGINE, f"A native response has at most {cap} tokens.")
        run = Run(server, job, model, prompt, min(room, cap), tokens)
        await run.take()
        try:
            await run.measure()
            yield await run.native(stream)
        finally:
            run.leave()

    @override
    async def speaker(self) -> KoboldSpeaker | None:
        return self._speaker if await self._speaker.speaks() else None

    @override
    async def embedding_model(self) -> EmbeddingModel | None:
        return await embedding_model(self.server)

    @override
    async def embed(self, job: Embedding) -> Embeddings:
        return await embed(self.server, job)

    @override
    async def rank(self, job: Ranking) -> Scores:
        """Raise `NotServed`, because koboldcpp has no rankings."""
        raise NotServed("rank", ENGINE, NO_RANKS)

    @override
    async def transcriber(self) -> Transcriber | None:
        return await transcriber(self.server)

    @override
    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """Return the ids of a text in which control tokens are always parsed."""
        if not parse_special:
            raise Unsupported("parse_special", ENGINE, CAPABILITIES.refused["parse_special"])
        check_text(text)
        # Its own `special` adds the BOS of the vocabulary to every model's text.
        adds_bos = add_special and (await self.model()).adds_bos
        return tuple((await self.server.token_count(text, adds_bos))["ids"])

    @override
    async def detokenize(self, ids: TokenIds) -> bytes:
        """Return the text of ids, without incomplete characters."""
        return await self.server.detokenize(ids)

    @override
    async def token_bytes(self) -> None:
        pass

    @override
    async def special_tokens(self) -> Sequence[Special]:
        """Return those of the template and of a fixed list."""
        return await self.server.special_tokens()

    @override
    def load(self) -> Load:
        turns = self.server.turns
        return Load(turns.taken, turns.waiting)

    @override
    def last_byte(self) -> float:
        return max(self.server.client.last_byte, self.server.calls.last_byte)

    @override
    async def health(self) -> None:
        """Ask the server at most twice a second."""
        await self.server.health()

    @override
    async def aclose(self) -> None:
        await self.server.aclose()


async def _with_grammar(job: Generation) -> Generation:
    """Return a job with its grammar as GBNF.

    Raises:
        InvalidGrammar: see `with_gbnf`; or it has tokens, at which koboldcpp fails or ends.
    """
    job = await with_gbnf(job)
    if job.grammar is not None and await has_tokens(job.grammar.text):
        reason = f"{ENGINE} does not support tokens, such as <[5]>; write their text in quotes"
        raise InvalidGrammar(job.grammar.param, reason)
    return job
