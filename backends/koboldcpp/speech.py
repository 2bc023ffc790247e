"""Speech of koboldcpp through its native `POST /api/extra/tts`.

koboldcpp speaks a text as a whole, with one of OuteTTS, Kokoro and Qwen3-TTS, and does not report
which. It cannot be stopped, so a text keeps its turn until it is spoken.
"""

from __future__ import annotations

import asyncio
import io
import time
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson

from ...schemas.native.koboldcpp import SpeechPayload
from ..errors import EngineError, EngineUnavailable, read_from, text_of
from ..speech.base import Pcm, SpeakerFacts, Utterance, Voice
from .server import Server
from .translate import ENGINE, to_error

PATH, VOICES = "/api/extra/tts", "/v1/audio/voices"
# The name of its model, which it does not report.
NAME = "koboldcpp/tts"
NOT_STARTED = f"{ENGINE} has no model that speaks. Start it with --ttsmodel."
# Seconds for which its voices are known, and whether it speaks.
HOLDS = 30.0
# Without a seed, the same text has another audio each time.
SEED = 1


class KoboldSpeaker:
    """The speech of a running koboldcpp.

    Args:
        server: the server, whose queue is shared with its other calls.
        owns: True to close the connections with the speaker.
    """

    def __init__(self, server: Server, owns: bool = False) -> None:
        self._server = server
        self._owns = owns
        self._facts: SpeakerFacts | None = None
        self._read_at = 0.0

    async def speaks(self) -> bool:
        """Return True if the server has a model that speaks."""
        return await self._known() is not None

    def known(self) -> SpeakerFacts:
        """See `Speaker.known`."""
        return self._facts or SpeakerFacts(NAME, ())

    async def facts(self) -> SpeakerFacts:
        """Return the voices that the server lists.

        Kokoro has other voices than those; koboldcpp uses five of its own for the first five names.

        Raises:
            EngineUnavailable: it has no model that speaks.
        """
        found = await self._known()
        if found is None:
            raise EngineUnavailable(NOT_STARTED)
        return found

    async def _known(self) -> SpeakerFacts | None:
        if time.monotonic() - self._read_at > HOLDS or not self._read_at:
            self._facts = await self._read()
            self._read_at = time.monotonic()
        return self._facts

    async def _read(self) -> SpeakerFacts | None:
        with read_from(ENGINE, "/api/extra/version"):
            version = await self._server.ask("GET", "/api/extra/version")
            if not version.get("tts"):
                return None
        with read_from(ENGINE, VOICES):
            names = map(text_of, (await self._server.ask("GET", VOICES))["voices"])
            voices = [Voice(name) for name in dict.fromkeys(names)]
            if not voices:
                raise ValueError("no voices")
        # Qwen3-TTS follows instructions; the other models ignore them.
        return SpeakerFacts(
            NAME, voices, takes_instructions=True, inexact=frozenset({"instructions"})
        )

    @asynccontextmanager
    async def speak(self, utterance: Utterance) -> AsyncIterator[AsyncIterator[Pcm]]:
        """See `Speaker.speak`; the audio is one piece."""
        server = self._server
        await server.turns.take(utterance.ticket)
        # A cancelled caller does not end the call, so its turn lasts as long as koboldcpp speaks.
        data = await asyncio.shield(server.background(self._asked(payload_of(utterance))))
        pcm = read_wav(data)

        async def pieces() -> AsyncIterator[Pcm]:
            yield pcm

        yield pieces()

    async def _asked(self, payload: SpeechPayload) -> bytes:
        body = orjson.dumps(payload)
        server = self._server

        async def work() -> bytes:
            async with await server.client.send("POST", PATH, body) as response:
                data = await response.aread()
                if response.status != 200:
                    raise to_error(response.status, data)
                return data

        try:
            return await server.once_free(work)
        finally:
            server.turns.release()

    async def aclose(self) -> None:
        """See `Speaker.aclose`."""
        if self._owns:
            await self._server.aclose()


def payload_of(utterance: Utterance) -> SpeechPayload:
    """Return the body of a call.

    koboldcpp takes a text in brackets at the beginning for an instruction, unless the call has one,
    and ends a text at a null character.
    """
    text = utterance.text.replace("\0", " ").strip()
    if text.startswith("["):
        text = f"({text[1:]}"
    payload: SpeechPayload = {"input": text, "voice": utterance.voice, "seed": SEED}
    if utterance.instructions:
        payload["instruction"] = utterance.instructions.replace("\0", " ")
    return payload


def read_wav(data: bytes) -> Pcm:
    """Return the samples of a response.

    Raises:
        EngineError: it is empty, because koboldcpp has failed, or is not 16-bit mono.
    """
    if not data:
        raise EngineError(f"{ENGINE} failed to speak a text; its console may say why.")
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate, count, *_ = file.getparams()
            if (channels, width) != (1, 2) or not 8_000 <= rate <= 192_000:
                raise ValueError(f"{channels} channels of {8 * width} bits at {rate} Hz")
            return Pcm(file.readframes(count), rate)
    except (wave.Error, EOFError, ValueError) as error:
        raise EngineError(f"{ENGINE} sent an invalid WAV file: {error!s:.200}.") from None


def speaker_at(url: str, key: str | None = None) -> KoboldSpeaker:
    """Return the speaker of a koboldcpp at an address, which needs no model for text.

    Args:
        key: its `--password`, if it has one.
    """
    return KoboldSpeaker(Server.at(url, key), owns=True)
