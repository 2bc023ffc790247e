"""A transcriber without a model, whose segments are up to the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from latimer.backends.speech.base import (
    Recording,
    Segment,
    Transcriber,
    TranscriberFacts,
    Word,
)

FACTS = TranscriberFacts(
    "listener",
    has_segments=True,
    has_words=True,
    translates=True,
    takes_language=True,
    takes_prompt=True,
    takes_temperature=True,
)
SEGMENTS = (
    Segment(
        " Hello there.",
        0.0,
        1.25,
        (Word(" Hello", 0.0, 0.5), Word(" there.", 0.5, 1.25)),
        -0.25,
        0.01,
        (1, 2),
        "en",
    ),
    Segment(" How are you?", 1.25, 3.3204, (Word(" How", 1.25, 2.0),), -0.5, 0.02, (3,), "en"),
)


class Listener(Transcriber):
    """A transcriber that hears the same in every recording.

    Args:
        segments: what it hears.
        facts: what it can do.
        error: raised before the segment with the index `fails_at`.
        pause: seconds before each segment.

    Attributes:
        recordings: all recordings so far; `running` is the number of those that have not ended.
        left: set when a transcription ends.
    """

    def __init__(
        self,
        segments: Sequence[Segment] = SEGMENTS,
        facts: TranscriberFacts = FACTS,
        *,
        error: Exception | None = None,
        fails_at: int = 0,
        pause: float = 0.0,
    ) -> None:
        self.segments = segments
        self.abilities = facts
        self.error = error
        self.fails_at = fails_at
        self.pause = pause
        self.recordings: list[Recording] = []
        self.running = 0
        self.left = asyncio.Event()
        self.closed = 0

    def known(self) -> TranscriberFacts:
        return self.abilities

    async def facts(self) -> TranscriberFacts:
        return self.abilities

    @asynccontextmanager
    async def transcribe(self, recording: Recording) -> AsyncIterator[AsyncIterator[Segment]]:
        self.recordings.append(recording)
        self.running += 1
        try:
            yield self._heard()
        finally:
            self.running -= 1
            self.left.set()

    async def _heard(self) -> AsyncIterator[Segment]:
        for index, segment in enumerate(self.segments):
            await asyncio.sleep(self.pause)
            if self.error is not None and index == self.fails_at:
                raise self.error
            yield segment

    async def aclose(self) -> None:
        self.closed += 1
