"""A library that transcribes in a process of its own (`worker`)."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from typing_extensions import override

from ...schemas.limits import HEARING_SECONDS
from ..errors import EngineError, Refused
from ..queue import QUEUE, AdmissionQueue
from .base import Recording, Segment, Transcriber, TranscriberFacts, Word, name_of
from .child import ended, message_of, reason_of, started

# The fields of a recording that are sent before its samples.
_SENT = ("language", "prompt", "temperature", "words", "translate")
# The bytes of samples that are written in one turn.
_PIECE = 1 << 18


class LibraryTranscriber(Transcriber):
    """A library with its model, which transcribes one recording after the other.

    The process starts with the first question for facts, and again after it has ended. To end a
    transcription it is killed, because libraries cannot be interrupted.

    Args:
        library: its name in `worker.CLASSES`.
        model: the model, as the library names it.
        longest: the seconds that a transcription may take, without its wait for a turn.
        offline: see `started`.
    """

    def __init__(
        self,
        library: str,
        model: str,
        longest: float = HEARING_SECONDS.maximum,
        *,
        offline: bool = False,
    ) -> None:
        self._library = library
        self._offline = offline
        self._longest = longest
        self._model = model
        self._facts: TranscriberFacts | None = None
        self._turns = AdmissionQueue(QUEUE)
        self._starting = asyncio.Lock()
        self._process: Process | None = None

    @override
    def known(self) -> TranscriberFacts:
        return self._facts or TranscriberFacts(name_of(self._library, self._model))

    @override
    async def facts(self) -> TranscriberFacts:
        """Return what it can do, once its model is loaded.

        Raises:
            EngineUnavailable: the library or its model cannot be loaded.
        """
        async with self._starting:
            # While the process is busy, another one would not be used again.
            if self._facts is None:
                await self._load()
        assert self._facts is not None
        return self._facts

    @override
    @asynccontextmanager
    async def transcribe(self, recording: Recording) -> AsyncIterator[AsyncIterator[Segment]]:
        await self._turns.take(recording.ticket)
        try:
            process = await self._started()
            # It is busy until its last message.
            self._process = None
            segments = self._segments(process, recording)
            try:
                yield segments
            finally:
                await segments.aclose()
                if self._process is not process:
                    await ended(process)
        finally:
            self._turns.release()

    @override
    async def aclose(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await ended(process)

    async def _started(self) -> Process:
        """Return the process, which has loaded its model.

        Raises:
            EngineUnavailable: it cannot be loaded.
        """
        async with self._starting:
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._load()
            return process

    async def _load(self) -> Process:
        self._process, loaded = await started(self._library, self._model, offline=self._offline)
        self._facts = TranscriberFacts(**loaded["facts"])
        return self._process

    async def _segments(
        self, process: Process, recording: Recording
    ) -> AsyncGenerator[Segment, None]:
        """Yield the segments.

        Raises:
            Refused: the recording takes too long.
            EngineError: the library has failed.
        """
        until = asyncio.get_running_loop().time() + self._longest
        try:
            async with asyncio.timeout_at(until):
                await self._send(process, recording)
            while True:
                async with asyncio.timeout_at(until):
                    message = await message_of(process, self._library)
                if "end" in message:
                    self._process = process
                    return
                if "error" in message:
                    # It has read all of the recording, and waits for the next one.
                    self._process = process
                    reason = reason_of(message)
                    raise EngineError(f"{self._library} failed to transcribe: {reason}")
                yield _segment_of(message["segment"])
        except TimeoutError:
            reason = f"the recording takes more than {self._longest:g} s. Send it in parts."
            raise Refused("file", self._library, reason) from None

    async def _send(self, process: Process, recording: Recording) -> None:
        samples = recording.samples
        job = {name: getattr(recording, name) for name in _SENT}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({**job, "size": len(samples)}).encode() + b"\n")
            for start in range(0, len(samples), _PIECE):
                process.stdin.write(samples[start : start + _PIECE])
                await process.stdin.drain()
        except ConnectionError:
            raise EngineError(f"{self._library} ended before it had the recording.") from None


def _segment_of(fields: dict[str, Any]) -> Segment:
    words = tuple(Word(**word) for word in fields.pop("words"))
    return Segment(words=words, **fields)
