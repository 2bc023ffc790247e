"""A speaker without a model: a tone for each character."""

from __future__ import annotations

import asyncio
import math
import threading
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from latimer.backends.errors import LatimerError
from latimer.backends.speech.base import Pcm, SpeakerFacts, Utterance, Voice

# Seconds of each character at normal speed.
CHARACTER = 0.01
VOICES = (Voice("anna", "en"), Voice("bela", "hu"), Voice("carl"))


class Tone:
    """A speaker whose audio is as long as its text; each voice has its own pitch.

    Args:
        error: raised instead of the audio of a text that contains `fail`.
        rate: samples a second.
        gate: each sentence after the first waits for it, also in another thread's event loop.

    Attributes:
        spoken: all utterances so far; `running` is the number of those that have not ended.
    """

    def __init__(
        self,
        rate: int = 22_050,
        voices: Sequence[Voice] = VOICES,
        takes_instructions: bool = False,
        error: LatimerError | None = None,
        gate: threading.Event | None = None,
    ) -> None:
        self._facts = SpeakerFacts("tone", voices, takes_instructions)
        self._rate, self._error, self._gate = rate, error, gate
        self.spoken: list[Utterance] = []
        self.running = 0
        self.is_closed = False

    def known(self) -> SpeakerFacts:
        """See `Speaker.known`."""
        return self._facts

    async def facts(self) -> SpeakerFacts:
        """See `Speaker.facts`."""
        return self._facts

    @asynccontextmanager
    async def speak(self, utterance: Utterance) -> AsyncIterator[AsyncIterator[Pcm]]:
        """See `Speaker.speak`."""
        self.running += 1
        self.spoken.append(utterance)
        try:
            if self._error is not None and "fail" in utterance.text:
                raise self._error
            if self._gate is not None and len(self.spoken) > 1:
                while not self._gate.is_set():
                    await asyncio.sleep(0.002)
            async with aclosing(self._pieces(utterance)) as pieces:
                yield pieces
        finally:
            self.running -= 1

    async def _pieces(self, utterance: Utterance) -> AsyncGenerator[Pcm, None]:
        samples = self.tone_of(utterance)
        step = self._rate // 2
        for start in range(0, len(samples), step // 2 * 2):
            yield Pcm(samples[start : start + step // 2 * 2], self._rate)

    def tone_of(self, utterance: Utterance) -> bytes:
        """Return the samples of an utterance."""
        names = [one.name for one in self._facts.voices]
        pitch = 300 + 100 * names.index(utterance.voice)
        count = int(self._rate * CHARACTER * len(utterance.text))
        step = math.tau * pitch / self._rate
        return array("h", (int(9_000 * math.sin(step * at)) for at in range(count))).tobytes()

    async def aclose(self) -> None:
        """See `Speaker.aclose`."""
        self.is_closed = True
