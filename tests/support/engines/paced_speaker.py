"""A speaker without a model, for tests of timing: it can wait, fail, and count its pieces."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from latimer.backends.speech.base import Pcm, SpeakerFacts, Utterance, Voice

# Samples for each character: 50 ms at 24 kHz.
PER_CHARACTER = 1_200


class PacedSpeaker:
    """A speaker that plays a square wave, in pieces of 0.1 seconds.

    Args:
        rate: samples a second.
        length: samples for each character.
        pause: seconds before each sentence.
        error: raised by the utterance with the number `fails_at`.

    Attributes:
        spoken: the utterances so far; `running` is the number of those that have not ended.
        pieces: the number of pieces so far.
        most: the largest number of utterances at the same time.
        closed: the number of calls of `aclose`.
    """

    def __init__(
        self,
        *,
        rate: int = 24_000,
        length: int = PER_CHARACTER,
        pause: float = 0.0,
        error: Exception | None = None,
        fails_at: int = 0,
    ) -> None:
        self.rate = rate
        self.length = length
        self.pause = pause
        self.error = error
        self.fails_at = fails_at
        self.spoken: list[Utterance] = []
        self.running = self.most = self.pieces = self.closed = 0

    def known(self) -> SpeakerFacts:
        """Return two voices."""
        return SpeakerFacts("tone", [Voice("low"), Voice("high")])

    async def facts(self) -> SpeakerFacts:
        """Return the same."""
        return self.known()

    @asynccontextmanager
    async def speak(self, utterance: Utterance) -> AsyncIterator[AsyncIterator[Pcm]]:
        """Play the tone of a text."""
        number = len(self.spoken)
        self.spoken.append(utterance)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.pause:
                await asyncio.sleep(self.pause)
            if self.error is not None and number == self.fails_at:
                raise self.error
            yield self._pieces(utterance)
        finally:
            self.running -= 1

    async def _pieces(self, utterance: Utterance) -> AsyncIterator[Pcm]:
        samples = tone(utterance, self.length)
        size = self.rate // 10 * 2
        for start in range(0, len(samples), size):
            self.pieces += 1
            yield Pcm(samples[start : start + size], self.rate)

    async def aclose(self) -> None:
        """Count the call."""
        self.closed += 1


def tone(utterance: Utterance, length: int = PER_CHARACTER) -> bytes:
    """Return the samples of an utterance; `length` is those of a character."""
    half = 60 if utterance.voice == "low" else 30
    wave = array("h", [-4_000] * half + [4_000] * half).tobytes()
    size = 2 * length * len(utterance.text)
    return (wave * (size // len(wave) + 1))[:size]
