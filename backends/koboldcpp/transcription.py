"""koboldcpp as a transcriber, through its native `POST /api/extra/transcribe`.

It has a Whisper model (`--whispermodel`), reads WAV only, and returns the text without times. An
answer with an empty text is also how it reports most failures.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from typing_extensions import override

from .. import offload
from ..errors import EngineError, EngineUnavailable, read_from, text_of
from ..speech.base import Recording, Segment, Transcriber, TranscriberFacts
from ..speech.pieces import cut, joined, wav_of
from ..speech.whisper import LANGUAGES
from .server import Server
from .translate import ENGINE

PATH = "/api/extra/transcribe"
# The name of its model, which it does not report.
NAME = "koboldcpp/whisper"
NOT_STARTED = f"{ENGINE} has no Whisper model. Start it with --whispermodel."
# Seconds for which it is known that the engine has one.
HOLDS = 30.0
# Seconds of a recording in a call. The engine cuts longer ones at every thirtieth second, within a
# word. A call cannot be cancelled, and the engine does nothing else meanwhile.
PIECE = 30.0
# Seconds that a call has at least: the engine hears nothing in a second or less, so shorter ones
# are continued with silence. In less than `SHORTEST` nothing is said.
LEAST, SHORTEST = 1.5, 0.1


class KoboldTranscriber(Transcriber):
    """The Whisper model of a koboldcpp. Chat and other jobs take turns with the calls.

    Args:
        server: the server, whose queue is shared with its other calls.
        owns: True to close the connections with the transcriber.
    """

    def __init__(self, server: Server, owns: bool = False) -> None:
        self._server = server
        self._owns = owns
        self._checked_at = -HOLDS

    @override
    def known(self) -> TranscriberFacts:
        return TranscriberFacts(NAME, takes_language=True, takes_prompt=True, languages=LANGUAGES)

    @override
    async def facts(self) -> TranscriberFacts:
        """Return what every Whisper model can do there; its name is not reported.

        Raises:
            EngineUnavailable: the engine has none, or cannot be reached.
        """
        if time.monotonic() - self._checked_at > HOLDS:
            version = await self._server.ask("GET", "/api/extra/version")
            with read_from(ENGINE, "/api/extra/version"):
                if not version.get("transcribe"):
                    raise EngineUnavailable(NOT_STARTED)
            self._checked_at = time.monotonic()
        return self.known()

    @override
    @asynccontextmanager
    async def transcribe(self, recording: Recording) -> AsyncIterator[AsyncIterator[Segment]]:
        async with aclosing(self._segments(recording)) as segments:
            yield segments

    @override
    async def aclose(self) -> None:
        if self._owns:
            await self._server.aclose()

    async def _segments(self, recording: Recording) -> AsyncGenerator[Segment, None]:
        before = ""
        for samples in cut(recording.samples, PIECE):
            if len(samples) < 32_000 * SHORTEST:
                continue
            samples += bytes(max(0, int(32_000 * LEAST) - len(samples)))
            text = (await self._text_of(samples, recording)).strip()
            yield Segment(joined(before, text), language=recording.language)
            before = text or before

    async def _text_of(self, samples: bytes, recording: Recording) -> str:
        """Return the text of a piece, in a turn of the engine."""
        size = len(samples)
        data = await offload.run(size, lambda: b64encode(wav_of(samples)).decode())
        payload = {
            "audio_data": data,
            "prompt": recording.prompt,
            "langcode": recording.language or "auto",
            "suppress_non_speech": False,
        }
        server = self._server
        await server.turns.take(recording.ticket)
        # A cancelled caller does not end the call, so its turn lasts as long as the engine works.
        return await asyncio.shield(server.background(self._asked(payload, len(data))))

    async def _asked(self, payload: dict[str, object], size: int) -> str:
        server = self._server
        try:
            count = await self._count()
            reply = await server.once_free(lambda: server.ask("POST", PATH, payload, size))
            with read_from(ENGINE, PATH):
                text = text_of(reply["text"])
            if not text and await self._count() == count:
                # The engine counts what it has transcribed, also if there was nothing to hear.
                raise EngineError(f"{ENGINE} failed to transcribe the recording.")
            return text
        finally:
            server.turns.release()

    async def _count(self) -> object:
        """Return the number of recordings that the engine has transcribed."""
        perf: dict[str, object] = {**await self._server.perf()}
        return perf.get("total_transcribe_gens")


def transcriber_at(url: str, key: str | None = None) -> KoboldTranscriber:
    """Return the transcriber of a koboldcpp at an address, which needs no model for text.

    Args:
        key: its `--password`, if it has one.
    """
    return KoboldTranscriber(Server.at(url, key), owns=True)


async def transcriber(server: Server) -> Transcriber | None:
    """Return the transcriber of a koboldcpp with a text model; None if it has no Whisper model."""
    await server.monitor.get()
    identity = server.monitor.identity
    return KoboldTranscriber(server) if identity is not None and identity.transcribes else None
