"""Speech and transcription of a model of several engines, by those that have them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import cached_property
from typing import Generic, TypeVar

from typing_extensions import override

from ..base import Backend
from ..errors import EngineError, EngineUnavailable
from ..speech.base import (
    Pcm,
    Recording,
    Segment,
    Speaker,
    SpeakerFacts,
    Transcriber,
    TranscriberFacts,
    Utterance,
)
from .replica import Replica

T = TypeVar("T")
P = TypeVar("P")


class Able(Generic[T]):
    """The engines of a pool that speak, or those that transcribe.

    Args:
        pool: the pool, whose engines may change.
        ask: returns what speaks or transcribes for an engine, or None.
    """

    def __init__(self, pool: Speaking, ask: Callable[[Backend], Awaitable[T | None]]) -> None:
        self._pool = pool
        self._ask = ask
        # What the engines had when they last answered.
        self._known: dict[Replica, T] = {}
        self._running: Counter[Replica] = Counter()

    async def exist(self) -> bool:
        """Ask the engines that are ready; return True if one has it, or had it when it answered."""
        replicas = self._pool.replicas
        self._known = {one: value for one, value in self._known.items() if one in replicas}
        await asyncio.gather(*(self._look(one) for one in replicas if one.state == "ready"))
        return bool(self._known)

    async def _look(self, replica: Replica) -> None:
        try:
            value = await self._ask(replica.backend)
        except EngineError:
            # The pool finds out why it does not answer.
            return
        if value is None:
            self._known.pop(replica, None)
        else:
            self._known[replica] = value

    def known(self) -> Sequence[T]:
        """Return what engines had when they last answered; this asks nothing."""
        return [self._known[one] for one in self._pool.replicas if one in self._known]

    async def found(self) -> dict[Replica, T]:
        """Return what the engines have that are ready, with the least busy first.

        Raises:
            EngineUnavailable: none of those is ready that have it.
        """
        await self.exist()
        ready = [one for one in self._pool.replicas if one in self._known and one.state == "ready"]
        if not ready:
            names = ", ".join(one.name for one in self._known)
            raise EngineUnavailable(f"The engines that can do this are not ready: {names}.")
        ready.sort(key=self._running.__getitem__)
        return {one: self._known[one] for one in ready}

    async def parts(
        self,
        call: Callable[[T], AbstractAsyncContextManager[AsyncIterator[P]]],
        can: Callable[[T], Awaitable[bool]] | None = None,
    ) -> AsyncGenerator[P, None]:
        """Yield what the least busy engine returns; another one is called if it cannot be reached.

        Args:
            can: returns False for an engine that cannot serve this call.

        Raises:
            EngineUnavailable: no engine can be reached, or one was lost after its first part.
        """
        lost = EngineUnavailable("No engine that is ready can do this.")
        for replica, value in (await self.found()).items():
            has_begun = False
            try:
                if can is not None and not await can(value):
                    continue
                self._running[replica] += 1
                try:
                    async with call(value) as parts:
                        async for part in parts:
                            has_begun = True
                            yield part
                finally:
                    self._running[replica] -= 1
                return
            except EngineUnavailable as error:
                if has_begun:
                    raise
                lost = error
        raise lost


async def _facts(asks: Sequence[Callable[[], Awaitable[T]]]) -> T:
    """Return the first answer; raise the last error if all engines were just lost."""
    for ask in asks[:-1]:
        with suppress(EngineUnavailable):
            return await ask()
    return await asks[-1]()


class PoolSpeaker(Speaker):
    """The speech of a pool's engines: each sentence is spoken by the least busy of them.

    Args:
        engines: those that speak.
    """

    def __init__(self, engines: Able[Speaker]) -> None:
        self._engines = engines

    @override
    def known(self) -> SpeakerFacts:
        speakers = self._engines.known()
        return speakers[0].known() if speakers else SpeakerFacts("speech", ())

    @override
    async def facts(self) -> SpeakerFacts:
        """Return what an engine can do; the others speak for it if they have the voice."""
        return await _facts([one.facts for one in (await self._engines.found()).values()])

    @override
    @asynccontextmanager
    async def speak(self, utterance: Utterance) -> AsyncIterator[AsyncIterator[Pcm]]:
        async def has_voice(speaker: Speaker) -> bool:
            return utterance.voice in [one.name for one in (await speaker.facts()).voices]

        parts = self._engines.parts(lambda speaker: speaker.speak(utterance), has_voice)
        async with aclosing(parts) as pieces:
            yield pieces

    @override
    async def aclose(self) -> None:
        """Release nothing: the pool closes its engines."""


class PoolTranscriber(Transcriber):
    """The transcription of a pool's engines: each recording is heard by the least busy of them.

    Args:
        engines: those that transcribe.
    """

    def __init__(self, engines: Able[Transcriber]) -> None:
        self._engines = engines

    @override
    def known(self) -> TranscriberFacts:
        transcribers = self._engines.known()
        return transcribers[0].known() if transcribers else TranscriberFacts("transcription")

    @override
    async def facts(self) -> TranscriberFacts:
        """Return what an engine can do."""
        return await _facts([one.facts for one in (await self._engines.found()).values()])

    @override
    @asynccontextmanager
    async def transcribe(self, recording: Recording) -> AsyncIterator[AsyncIterator[Segment]]:
        parts = self._engines.parts(lambda transcriber: transcriber.transcribe(recording))
        async with aclosing(parts) as segments:
            yield segments

    @override
    async def aclose(self) -> None:
        """Release nothing: the pool closes its engines."""


class Speaking(Backend):
    """The part of a pool that speaks and transcribes.

    Attributes:
        replicas: the engines.
    """

    replicas: list[Replica]

    @cached_property
    def _speakers(self) -> Able[Speaker]:
        return Able(self, lambda backend: backend.speaker())

    @cached_property
    def _transcribers(self) -> Able[Transcriber]:
        return Able(self, lambda backend: backend.transcriber())

    @override
    async def speaker(self) -> Speaker | None:
        return PoolSpeaker(self._speakers) if await self._speakers.exist() else None

    @override
    async def transcriber(self) -> Transcriber | None:
        return PoolTranscriber(self._transcribers) if await self._transcribers.exist() else None
