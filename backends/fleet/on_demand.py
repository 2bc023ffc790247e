"""A backend whose engine is loaded when a request needs it.

A request keeps the engine loaded from its first call until its end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from typing_extensions import override

from ..base import (
    Backend,
    Batch,
    Capabilities,
    Embedding,
    EmbeddingModel,
    Embeddings,
    Generation,
    Model,
    NativeReply,
    Ranking,
    Scores,
    Special,
    TokenIds,
)
from ..patience import REQUEST
from .loading import EngineLoader


class Usable(Hashable, Protocol):
    """An engine that requests use while it is loaded (`machine.Member`)."""

    loader: EngineLoader

    @property
    def is_ready(self) -> bool:
        """True if a request can use it now."""
        ...

    async def take(self) -> None:
        """Wait until the engine is loaded."""
        ...

    def release(self) -> None:
        """Let another engine take its memory."""
        ...


class OnDemand(Backend):
    """The backend of an engine that is loaded when a request needs it.

    Args:
        member: the engine.

    Attributes:
        known: its model, as it was last loaded; None before its first load.
    """

    def __init__(self, member: Usable) -> None:
        self.member = member
        self.known: Model | None = None
        self._embeds: EmbeddingModel | None = None

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def _backend(self) -> Backend:
        return self.member.loader.backend

    @asynccontextmanager
    async def _loaded(self) -> AsyncIterator[Backend]:
        """Load the engine, and keep it loaded until the end of the request, or of the context."""
        member, request = self.member, REQUEST.get()
        if request is None or request.held is None:
            await member.take()
            try:
                yield self._backend
            finally:
                member.release()
            return
        if member not in request.held:
            await member.take()
            if request.held is None or member in request.held:
                # Another call of the request keeps it loaded, or the request has ended.
                member.release()
            else:
                request.held[member] = member.release
        yield self._backend

    @override
    async def model(self) -> Model:
        """Return the model; a request loads it."""
        async with self._loaded() as backend:
            self.known = await backend.model()
            return self.known

    @override
    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        async with self._loaded() as backend, backend.open(job) as batches:
            yield batches

    @override
    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        async with self._loaded() as backend, backend.native(job, stream) as reply:
            yield reply

    @override
    async def embedding_model(self) -> EmbeddingModel | None:
        """Return the last known facts, unless the engine is loaded."""
        if self.member.is_ready:
            async with self._loaded() as backend:
                self._embeds = await backend.embedding_model()
        return self._embeds

    @override
    async def embed(self, job: Embedding) -> Embeddings:
        async with self._loaded() as backend:
            return await backend.embed(job)

    @override
    async def rank(self, job: Ranking) -> Scores:
        async with self._loaded() as backend:
            return await backend.rank(job)

    @override
    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        async with self._loaded() as backend:
            return await backend.tokenize(
                text, add_special=add_special, parse_special=parse_special
            )

    @override
    async def detokenize(self, ids: TokenIds) -> bytes:
        async with self._loaded() as backend:
            return await backend.detokenize(ids)

    @override
    async def token_bytes(self) -> Sequence[bytes] | None:
        async with self._loaded() as backend:
            return await backend.token_bytes()

    @override
    async def special_tokens(self) -> Sequence[Special]:
        async with self._loaded() as backend:
            return await backend.special_tokens()

    @override
    async def health(self) -> None:
        """Check that the engine is loaded or can be loaded; this loads nothing."""
        self.member.loader.check()

    @override
    async def aclose(self) -> None:
        await self.member.loader.aclose()
