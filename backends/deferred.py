"""A backend for an engine that may start later than Latimer.

Until the engine is ready, every call raises `EngineUnavailable`. The first call after that finds
the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from .base import (
    Backend,
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
    Stream,
    TokenIds,
)
from .errors import Busy, EngineError, EngineSilent, EngineUnavailable, LatimerError

# Seconds for which all calls raise the last failure, so that many calls cost one connection.
MOMENT = 0.1
# Seconds that a call waits for the result of another call, before the engine was ready.
PATIENCE = 5.0


class Deferred:
    """A backend that is found when its engine answers.

    One call at a time asks the engine for its model; the others wait for the result.

    Args:
        find: returns the backend, always the same one for the same engine. It is called until the
            model is known, and again when another engine answers.
        engine: the engine's name in messages until it is found.
    """

    def __init__(self, find: Callable[[], Awaitable[Backend]], engine: str = "engine") -> None:
        self._find = find
        self._unknown = Capabilities(engine, frozenset())
        self._backend: Backend | None = None
        self._must_find = True
        self._was_ready = False
        self._is_asking = False
        self._answered = asyncio.Event()
        self._failure: EngineError | None = None
        self._failed_at = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`; they are empty until the backend is found."""
        return self._unknown if self._backend is None else self._backend.capabilities

    async def model(self) -> Model:
        """See `Backend.model`.

        Raises:
            EngineUnavailable: the engine is not reachable, loads its model, or is not known.
        """
        backend = self._backend
        if backend is not None and self._failure is None and self._was_ready:
            try:
                return await backend.model()
            except LatimerError as error:
                raise self._lost(error) from error
        while self._is_asking:
            await self._wait()
        if self._failure is not None:
            self._raise_recent(self._failure)
        self._is_asking = True
        try:
            if self._backend is None or self._must_find:
                self._backend = await self._find()
                self._must_find = False
            model = await self._backend.model()
        except LatimerError as error:
            raise self._lost(error) from error
        finally:
            self._is_asking = False
            self._answered.set()
        self._failure = None
        self._was_ready = True
        return model

    async def _wait(self) -> None:
        """Wait for the result of another call, up to `PATIENCE` before the engine was ready."""
        self._answered.clear()
        try:
            async with asyncio.timeout(None if self._was_ready else PATIENCE):
                await self._answered.wait()
        except TimeoutError:
            raise EngineUnavailable("The engine has not responded yet.") from None

    def _lost(self, error: LatimerError) -> LatimerError:
        """Return the error for a failed call; note if another engine may answer now."""
        self._must_find = not isinstance(error, EngineUnavailable | EngineSilent | Busy)
        return self._failed(error)

    def _failed(self, error: LatimerError) -> LatimerError:
        """Return the error for a failed call; `EngineUnavailable` before the engine was ready."""
        if not self._was_ready:
            error = EngineUnavailable(error.message)
        if isinstance(error, EngineError):
            self._failure, self._failed_at = error, time.monotonic()
        return error

    def _raise_recent(self, failure: EngineError) -> None:
        """Raise the last failure again for `MOMENT` seconds."""
        if time.monotonic() - self._failed_at < MOMENT:
            # A new error, since an error that is raised again grows its traceback each time.
            raise type(failure)(failure.message)

    async def _ready(self) -> Backend:
        """Return the backend, once its engine has been ready."""
        if self._backend is None or not self._was_ready:
            await self.model()
        assert self._backend is not None
        return self._backend

    def _found(self) -> Backend:
        """Return the backend for a job, which follows a call of `model`."""
        if self._backend is None:
            raise EngineUnavailable("The engine is not ready yet.")
        return self._backend

    def open(self, job: Generation) -> Stream:
        """See `Backend.open`."""
        return self._found().open(job)

    def native(self, job: Generation, stream: bool) -> AbstractAsyncContextManager[NativeReply]:
        """See `Backend.native`."""
        return self._found().native(job, stream)

    async def embedding_model(self) -> EmbeddingModel | None:
        """See `Backend.embedding_model`."""
        return await (await self._ready()).embedding_model()

    async def embed(self, job: Embedding) -> Embeddings:
        """See `Backend.embed`."""
        return await self._found().embed(job)

    async def rank(self, job: Ranking) -> Scores:
        """See `Backend.rank`."""
        return await self._found().rank(job)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """See `Backend.tokenize`."""
        backend = await self._ready()
        return await backend.tokenize(text, add_special=add_special, parse_special=parse_special)

    async def detokenize(self, ids: TokenIds) -> bytes:
        """See `Backend.detokenize`."""
        return await (await self._ready()).detokenize(ids)

    async def pieces(self) -> Sequence[bytes] | None:
        """See `Backend.pieces`."""
        return await (await self._ready()).pieces()

    async def specials(self) -> Sequence[Special]:
        """See `Backend.specials`."""
        return await (await self._ready()).specials()

    async def health(self) -> None:
        """See `Backend.health`."""
        await (await self._ready()).health()

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        if self._backend is not None:
            await self._backend.aclose()
