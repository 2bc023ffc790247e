"""The llama-server backend, which turns a job into native calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from typing_extensions import override

from .. import offload
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
    Stream,
    TokenIds,
)
from ..errors import check_ids
from ..grammar import with_gbnf
from ..http import ConnectionPool, HttpClient
from ..queue import QUEUE, Ticket
from ..streams import end_at_once, merge_streams
from .call import Call
from .embeddings import embed, embedding_model, rank
from .prompt import check_biases, native_prompt, prompt_ids
from .router import RouterClient
from .scoring import prompt_tokens, speculative
from .server import Server
from .translate import CAPABILITIES, size_of, to_native

if TYPE_CHECKING:
    from ..http import Client

TIMEOUT = 60.0


class LlamaServer(Backend):
    """A running llama-server.

    Args:
        url: the server's address (`http://127.0.0.1:8080`).
        key: the server's `--api-key`, if it has one.
        timeout: seconds of silence within a response after which it counts as lost. The first token
            may take ten times as long, and at least ten minutes.
        max_waiting: the largest number of requests that wait for a slot; others are rejected as
            busy.
        model: the name of one of its models, if it runs in router mode.
        build: the server's version, which it may not know (`b0-unknown`).
        client: sends the requests instead of Latimer's own connections: a connection pool of
            httpcore2, or a transport or a client of httpx2. Its user closes it.
    """

    capabilities: Capabilities = CAPABILITIES

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeout: float = TIMEOUT,
        max_waiting: int = QUEUE,
        client: Client | None = None,
        model: str | None = None,
        build: str = "",
    ) -> None:
        if client is None:
            client = ConnectionPool(url, timeout, max(10 * timeout, 600.0), "/health")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        own = HttpClient(url, headers, client)
        if model is not None:
            own = RouterClient(url, model, headers, client)
        self.server = Server(own, max_waiting)
        self.server.monitor.build = build

    @override
    def model(self) -> Coroutine[Any, Any, Model]:
        return self.server.monitor.get()

    @override
    def known_model(self) -> Model | None:
        return self.server.monitor.known

    @override
    def open(self, job: Generation) -> Stream:
        """Run each choice as a native call; the calls wait for free slots."""
        if job.ticket is None and (len(job.seeds) > 1 or job.prompt.logprobs is not None):
            job = replace(job, ticket=Ticket())
        if job.prompt.logprobs is not None:
            return self._scored(job)
        if job.max_tokens == 0:
            return self._nothing(job)
        if len(job.seeds) == 1:
            return Call(self.server, job, 0)
        calls = [Call(self.server, job, choice) for choice in range(len(job.seeds))]
        # Others may be cut later, and the request has used the tokens of all.
        return merge_streams(calls, job.ticket or Ticket(), accepted=1, ended=Call.note_tokens)

    @asynccontextmanager
    async def _nothing(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job of no tokens without the server, which would generate one token."""
        model = await self.server.monitor.get_for(job)
        _ids, count = await prompt_ids(self.server, job, model)
        yield end_at_once(job, count)

    @asynccontextmanager
    async def _scored(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job that scores its prompt before it generates."""
        server = self.server
        server.turns.check(job.ticket)
        model = await server.monitor.get_for(job)
        ids, count = await prompt_ids(server, job, model)
        facts = await server.facts()
        if facts.speculative:
            raise speculative()
        first = await prompt_tokens(server, job, ids, count, facts)
        rest = replace(job, prompt=replace(job.prompt, logprobs=None))
        async with self._nothing(rest) if job.max_tokens == 0 else self.open(rest) as batches:
            yield _after(first, batches)

    @override
    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        server = self.server
        server.turns.check(job.ticket)
        model = await server.monitor.get_for(job)
        if job.sampling.logit_bias:
            await check_biases(server, job)
        prompt = await native_prompt(server, job, model)
        payload = to_native(await with_gbnf(job), 0, prompt, model.context, stream)
        del payload["response_fields"]
        data = await offload.run(size_of(prompt), orjson.dumps, payload)
        await server.turns.take(job.ticket)
        try:
            server.monitor.check_is(model)
            async with await server.client.send("POST", "/completion", data) as response:
                yield NativeReply(response.status, response.content_type, aiter(response.stream))
        finally:
            server.turns.release()

    @override
    async def embedding_model(self) -> EmbeddingModel | None:
        return await embedding_model(self.server)

    @override
    async def embed(self, job: Embedding) -> Embeddings:
        return await embed(self.server, job)

    @override
    async def rank(self, job: Ranking) -> Scores:
        return await rank(self.server, job)

    @override
    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        return await self.server.tokenize(
            text, add_special=add_special, parse_special=parse_special
        )

    @override
    async def detokenize(self, ids: TokenIds) -> bytes:
        """Use the vocabulary, as `/detokenize` breaks characters."""
        vocabulary = (await self.server.facts()).vocabulary

        def text() -> bytes:
            check_ids("prompt", ids, len(vocabulary))
            return b"".join(vocabulary.shown(ids))

        return await offload.run(len(ids), text)

    @override
    async def token_bytes(self) -> Sequence[bytes]:
        return (await self.server.facts()).vocabulary.pieces

    @override
    async def special_tokens(self) -> Sequence[Special]:
        """Read the vocabulary on the first call."""
        return await self.server.special_tokens()

    @override
    def load(self) -> Load:
        turns = self.server.turns
        return Load(turns.taken, turns.waiting)

    @override
    def last_byte(self) -> float:
        return max(self.server.client.last_byte, self.server.monitor.client.last_byte)

    @override
    async def health(self) -> None:
        """Ask the server at most twice a second."""
        await self.server.health()

    @override
    async def aclose(self) -> None:
        await self.server.aclose()


async def _after(first: Batch, batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
    if first:
        yield first
    async for batch in batches:
        yield batch
