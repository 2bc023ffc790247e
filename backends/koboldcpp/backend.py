"""koboldcpp as a backend: its queue, and the calls that a job comes to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ..base import (
    Batch,
    Capabilities,
    Generation,
    Model,
    NativeReply,
    Special,
    TokenIds,
)
from ..errors import Unsupported, read_from
from ..grammar import with_gbnf
from ..http import HttpUpstream
from ..streams import ended
from ..turns import QUEUE
from ..upstream import Upstream
from . import tokens as tokens_of
from .call import Run, payload_of
from .prompt import counted
from .server import Server, new_genkey
from .translate import CAPABILITIES, ENGINE, longest_call


class KoboldCpp:
    """A running koboldcpp.

    Args:
        upstream: its address (`http://127.0.0.1:5001`), or an `Upstream` of one's own.
        key: the server's own `--password`, where it has one.
        max_waiting: requests that may wait for their turn; beyond it they are refused as busy.
        silence: seconds without an event after which the engine is asked whether it still works.
    """

    def __init__(
        self,
        upstream: str | Upstream,
        key: str | None = None,
        max_waiting: int = QUEUE,
        silence: float = 5.0,
    ) -> None:
        if isinstance(upstream, str):
            upstream = HttpUpstream(upstream, {"Authorization": f"Bearer {key}"} if key else {})
        self.server = Server(upstream, max_waiting, silence)

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`; token counts of versions before 1.115 are the tokeniser's."""
        if self.server.tells_tokens:
            return CAPABILITIES
        return replace(CAPABILITIES, inexact=CAPABILITIES.inexact | {"usage"})

    def model(self) -> Coroutine[Any, Any, Model]:
        """See `Backend.model`."""
        return self.server.known.get()

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """See `Backend.open`; each choice takes a turn, one after the other."""
        server = self.server
        tokens_of.check(job)
        if job.prompt.suffix is not None:
            raise Unsupported("suffix", ENGINE, CAPABILITIES.refused["suffix"])
        server.turns.check(job.party)
        model = await server.known.get_for(job)
        if job.logprobs is not None and not server.tells_tokens:
            raise Unsupported("logprobs", f"this {ENGINE}", "Versions before 1.115 tell none.")
        with read_from(ENGINE, "questions to its tokeniser"):
            prompt, count, tokens = await counted(server, job, model)
        job = await with_gbnf(job)
        max_tokens = model.context - count if job.max_tokens is None else job.max_tokens
        if max_tokens == 0:
            yield ended(job, tokens)
            return
        run = Run(server, job, model, prompt, max_tokens, tokens)
        await run.take()
        try:
            yield run.batches()
        finally:
            # Shielded: a cancelled request must still abort its generation and give up its turn.
            await asyncio.shield(server.background(_leave(run)))

    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        """See `Backend.native`."""
        server = self.server
        server.turns.check(job.party)
        model = await server.known.get_for(job)
        with read_from(ENGINE, "questions to its tokeniser"):
            prompt, count, _tokens = await counted(server, job, model)
        job = await with_gbnf(job)
        room = model.context - count if job.max_tokens is None else job.max_tokens
        cap = longest_call(model.context)
        if job.max_tokens is not None and room > cap:
            raise Unsupported("oai_compat", ENGINE, f"One call generates at most {cap} tokens.")
        genkey = new_genkey()
        payload = await payload_of(job, 0, prompt, min(room, cap), model.context, genkey)
        path = "/api/extra/generate/stream" if stream else "/api/v1/generate"
        await server.turns.take(job.party)
        done = False
        try:
            await server.check_still(model)
            async with server.upstream.send("POST", path, payload) as reply:
                yield NativeReply(reply.status, reply.content_type, reply.chunks())
            done = True
        finally:
            try:
                if not done:
                    await asyncio.shield(server.background(server.abort(genkey)))
            finally:
                server.turns.release()

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """See `Backend.tokenize`; control tokens are always parsed here."""
        if not parse_special:
            raise Unsupported("parse_special", ENGINE, CAPABILITIES.refused["parse_special"])
        return tuple((await self.server.token_count(text, add_special))["ids"])

    async def detokenize(self, ids: TokenIds) -> bytes:
        """See `Backend.detokenize`; incomplete characters are left out by the engine."""
        return await self.server.detokenize(ids)

    async def pieces(self) -> None:
        """See `Backend.pieces`."""

    async def specials(self) -> Sequence[Special]:
        """See `Backend.specials`: what the template spells, as far as that is one token."""
        return await self.server.specials()

    async def health(self) -> None:
        """See `Backend.health`; it is asked twice a second at most."""
        await self.server.health()

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.server.aclose()


async def _leave(run: Run) -> None:
    try:
        await run.aclose()
    finally:
        run.release()
