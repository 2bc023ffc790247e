"""A library that speaks in a process of its own (`worker`)."""

from __future__ import annotations

import asyncio
import json
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from typing_extensions import override

from ..errors import EngineError, EngineSilent, LatimerError, Unspoken, Unsupported
from ..queue import QUEUE, AdmissionQueue
from .base import Pcm, Speaker, SpeakerFacts, Utterance, Voice, name_of
from .child import ended, message_of, reason_of, started

# Seconds for the end of an utterance that nobody waits for; then its process is killed. To load a
# model again takes longer than most sentences.
_PATIENCE = 10.0
# Seconds that a library may compute for an utterance; then its process is killed.
_LONGEST = 60.0


class LibrarySpeaker(Speaker):
    """A library with its model, which speaks one utterance after the other.

    The process starts with the first question for facts, and again after it has ended.

    Args:
        library: its name in `worker.CLASSES`.
        model: the model, as the library names it.
    """

    def __init__(self, library: str, model: str) -> None:
        self._library = library
        self._model = model
        self._facts: SpeakerFacts | None = None
        self._turns = AdmissionQueue(QUEUE)
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @override
    def known(self) -> SpeakerFacts:
        return self._facts or SpeakerFacts(name_of(self._library, self._model), ())

    @override
    async def facts(self) -> SpeakerFacts:
        """Return what it can do, once its model is loaded.

        Raises:
            EngineUnavailable: the library or its model cannot be loaded.
        """
        if self._facts is None:
            await self._started()
        assert self._facts is not None
        return self._facts

    @override
    @asynccontextmanager
    async def speak(self, utterance: Utterance) -> AsyncIterator[AsyncIterator[Pcm]]:
        await self._turns.take(utterance.ticket)
        reply: _Reply | None = None
        try:
            reply = _Reply(await self._started(), self._library)
            await reply.ask(utterance)
            yield reply.pieces()
        finally:
            if reply is None or reply.has_ended:
                self._turns.release()
            else:
                # The next utterance has its turn when this one has ended.
                task = asyncio.create_task(self._left(reply))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    @override
    async def aclose(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await ended(process)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _left(self, reply: _Reply) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                async for _ in reply.pieces():
                    pass
        except (LatimerError, TimeoutError):
            if not reply.has_ended:
                await ended(reply.process)
        finally:
            self._turns.release()

    async def _started(self) -> Process:
        async with self._starting:
            process = self._process
            if process is None or process.returncode is not None:
                process, loaded = await started(self._library, self._model)
                self._process, self._facts = process, _facts_of(loaded["facts"])
            return process


def _facts_of(fields: dict[str, Any]) -> SpeakerFacts:
    voices = [Voice(**voice) for voice in fields.pop("voices")]
    return SpeakerFacts(voices=voices, **fields)


class _Reply:
    """The messages of a process for one utterance.

    Attributes:
        has_ended: True when the process is free for the next one.
    """

    def __init__(self, process: Process, library: str) -> None:
        self.process = process
        self.has_ended = True
        self._library = library
        # The samples whose message was read, as their count of bytes and their rate.
        self._next: tuple[int, int] | None = None
        self._has_spoken = False
        # The seconds that the library may still compute.
        self._left = _LONGEST

    async def ask(self, utterance: Utterance) -> None:
        """Send an utterance."""
        assert self.process.stdin is not None
        job = {
            # A NUL would end the text for libraries in C.
            "text": utterance.text.replace("\0", " "), "voice": utterance.voice,
            "instructions": utterance.instructions,
        }  # fmt: skip
        self.has_ended = False
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            await self.process.stdin.drain()
        except ConnectionError:
            raise EngineError(f"{self._library} ended before it had the text.") from None

    async def pieces(self) -> AsyncGenerator[Pcm, None]:
        """Yield the audio; after a cancellation, the rest of it.

        Raises:
            EngineError: the library failed, or took too long and was ended.
            Unsupported: it does not speak so long a text.
            Unspoken: it has ended without any audio.
        """
        assert self.process.stdout is not None
        while not self.has_ended:
            if self._next is None:
                message = await self._message()
                if "size" not in message:
                    self.has_ended = True
                    if "is_input" in message:
                        raise Unsupported("input", self._library, f"It says: {reason_of(message)}")
                    if "error" in message:
                        reason = reason_of(message)
                        raise EngineError(f"{self._library} failed to speak: {reason}")
                    if not self._has_spoken:
                        raise Unspoken(self._library)
                    return
                self._next = message["size"], message["rate"]
            size, rate = self._next
            try:
                samples = await self.process.stdout.readexactly(size)
            except asyncio.IncompleteReadError:
                raise EngineError(f"{self._library} has ended within a sentence.") from None
            self._next = None
            self._has_spoken = True
            yield Pcm(samples, rate)

    async def _message(self) -> dict[str, Any]:
        """Return the next message; end the process if it has computed for too long."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await message_of(self.process, self._library)
        except TimeoutError:
            await ended(self.process)
            self.has_ended = True
            raise EngineSilent(
                f"{self._library} took more than {_LONGEST:.0f} seconds for a sentence."
            ) from None
        finally:
            self._left -= time.monotonic() - start
