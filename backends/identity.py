"""The identity of an engine: checks that its model is still the same, and engines that start later.

Until an engine is ready, every call of a `LazyBackend` raises `EngineUnavailable`. The first call
after that finds the engine.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import override

from .base import (
    Backend,
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
from .errors import (
    Busy,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    ModelChanged,
    ModelLoading,
)
from .single_flight import MOMENT, SingleFlight

if TYPE_CHECKING:
    from .speech.base import Speaker, Transcriber

Identity = TypeVar("Identity")


def difference(
    model: Model, known: Model, own: Capabilities, others: Capabilities, than: str
) -> str:
    """Return how an engine's model differs from a known one; empty if it does not.

    Args:
        own, others: the capabilities of the engine, and those that belong to the known model.
        than: what the known model is, such as `that of the others`.
    """
    if known == model:
        return ""
    for what, here, there in (
        ("its chat template", model.template, known.template),
        ("its BOS token", (model.bos_token, model.adds_bos), (known.bos_token, known.adds_bos)),
        ("its end token", model.eos_token, known.eos_token),
        ("the media that it accepts", model.media, known.media),
        ("its size", _weights(model), _weights(known)),
        ("its set of LoRA adapters", model.adapters, known.adapters),
        ("what it can do", own, others),
    ):
        if here != there:
            return f"it serves another model ({model.name}): {what} is not {than}"
    if model.context < known.context:
        return f"its context is {model.context} tokens, less than {known.context}"
    return ""


def _weights(model: Model) -> tuple[int | None, ...]:
    """Return the sizes that distinguish models of one name."""
    return tuple(model.sizes.get(name) for name in ("n_vocab", "n_params", "size"))


class IdentityMonitor(ABC, Generic[Identity]):
    """The model at an engine's address, and checks that it is still the same.

    Args:
        address: the engine's address, for errors.
        read_model: asks the engine for everything about its model.
        forget: called when the engine has another model, so that no earlier answer is valid.
        holds: seconds for which a check is valid.

    Attributes:
        identity: what the engine reported at the last check; None if it is not known.
        model: the cached model; None if it is not known.
    """

    def __init__(
        self,
        address: str,
        read_model: Callable[[], Coroutine[Any, Any, Model]],
        forget: Callable[[], None],
        holds: float,
    ) -> None:
        self.address = address
        self.identity: Identity | None = None
        self.model: Model | None = None
        self._read_model = read_model
        self._forget = forget
        self._reading, self._checks = SingleFlight(), SingleFlight()
        self._holds = holds
        self._checked_at = -math.inf

    @property
    def is_verified(self) -> bool:
        """True if the engine was checked a moment ago and need not be asked."""
        return time.monotonic() - self._checked_at < self._holds

    def invalidate(self) -> None:
        """Require a new check, since the engine was unavailable."""
        self._checked_at = -math.inf

    async def check(self) -> None:
        """Ask the engine for its identity.

        Raises:
            EngineUnavailable: it is not reachable, not ready, or serves another model than before.
            EngineError: it is another kind of engine.
        """
        await self._checks.run(self._check)

    async def _check(self) -> None:
        await self._compare()
        self._checked_at = time.monotonic()

    @abstractmethod
    async def _compare(self) -> None:
        """Ask the engine, and compare its identity with the last one."""

    def lose(self, error: EngineUnavailable) -> None:
        """Clear everything that is known about the model, since the engine has another one."""
        self.identity = self.model = None
        self._forget()

    async def get(self) -> Model:
        """Return the model; ask the engine again unless it was checked a moment ago.

        Raises:
            EngineUnavailable: the engine is unavailable.
        """
        if self.model is not None and not self.is_verified:
            try:
                # A check that began before would hold for a moment, too.
                await self._checks.run(self._check, fresh=False)
            except EngineUnavailable:
                # If the check found another model, that one is read below.
                if self.model is not None:
                    raise
        while self.model is None:
            await self._reading.run(self._learn)
        return self.model

    async def _learn(self) -> None:
        if self.model is None:
            model = await self._read_model()
            # Another event loop may have read it meanwhile.
            self.model = self.model or model

    @property
    def known(self) -> Model | None:
        """The model, if it was checked a moment ago."""
        return self.model if self.is_verified else None

    async def get_for(self, job: Generation | Embedding | Ranking) -> Model:
        """Return the model, if it is the one that a job was made for.

        Raises:
            ModelChanged: the engine serves another model now.
        """
        model = self.model
        if model is None or not self.is_verified:
            model = await self.get()
        if job.fingerprint and job.fingerprint != model.fingerprint:
            raise self.changed()
        return model

    def check_is(self, model: Model | None) -> None:
        """Raise `ModelChanged` if another model was found since, before anything is sent."""
        if self.model is not model:
            raise self.changed()

    def changed(self, now: str = "", before: str = "") -> ModelChanged:
        """Return the error for a request that was made for another model than the engine's."""
        names = f" ({now} instead of {before})" if now else ""
        return ModelChanged(
            f"The engine at {self.address} has loaded another model{names}. Send the request again."
        )


# Seconds that a call waits for the result of another call, before the engine was ready.
PATIENCE = 5.0


class LazyBackend(Backend):
    """A backend that is found when its engine answers.

    One call at a time asks the engine for its model; the others wait for the result.

    Args:
        find: returns the backend, always the same one for the same engine. It is called until the
            model is known, and again when another engine answers.
        engine: the engine's name in messages until it is found.
        loads_here: as in `Backend`, until it is found.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[Backend]],
        engine: str = "engine",
        *,
        loads_here: bool = False,
    ) -> None:
        self.loads_here = loads_here
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
    @override
    def capabilities(self) -> Capabilities:
        """The capabilities; empty until the backend is found."""
        return self._unknown if self._backend is None else self._backend.capabilities

    @override
    async def model(self) -> Model:
        """Return the model, once the engine is ready.

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
                self.loads_here = self._backend.loads_here
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

    @override
    def known_model(self) -> Model | None:
        if self._backend is None or self._failure is not None or not self._was_ready:
            return None
        return self._backend.known_model()

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
        if not self._was_ready and not isinstance(error, ModelLoading):
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

    @override
    def open(self, job: Generation) -> Stream:
        return (self._backend or self._found()).open(job)

    @override
    def native(self, job: Generation, stream: bool) -> AbstractAsyncContextManager[NativeReply]:
        return self._found().native(job, stream)

    @override
    async def check(self, job: Generation) -> None:
        await self._found().check(job)

    @override
    async def embedding_model(self) -> EmbeddingModel | None:
        return await (await self._ready()).embedding_model()

    @override
    async def speaker(self) -> Speaker | None:
        return await (await self._ready()).speaker()

    @override
    async def transcriber(self) -> Transcriber | None:
        return await (await self._ready()).transcriber()

    @override
    async def embed(self, job: Embedding) -> Embeddings:
        return await self._found().embed(job)

    @override
    async def rank(self, job: Ranking) -> Scores:
        return await self._found().rank(job)

    @override
    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        backend = await self._ready()
        return await backend.tokenize(text, add_special=add_special, parse_special=parse_special)

    @override
    async def detokenize(self, ids: TokenIds) -> bytes:
        return await (await self._ready()).detokenize(ids)

    @override
    async def token_bytes(self) -> Sequence[bytes] | None:
        return await (await self._ready()).token_bytes()

    @override
    async def special_tokens(self) -> Sequence[Special]:
        return await (await self._ready()).special_tokens()

    @override
    def load(self) -> Load | None:
        return None if self._backend is None else self._backend.load()

    @override
    def last_byte(self) -> float:
        return 0.0 if self._backend is None else self._backend.last_byte()

    @override
    async def health(self) -> None:
        await (await self._ready()).health()

    @override
    async def aclose(self) -> None:
        if self._backend is not None:
            await self._backend.aclose()
