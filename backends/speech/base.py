"""The interfaces of engines and libraries that speak or transcribe.

Audio is PCM here: signed 16 bit, little endian, mono. Other formats are the adapter's matter.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..queue import Ticket

# Samples a second of the audio that a transcriber gets.
TRANSCRIBED_RATE = 16_000


def name_of(library: str, model: str) -> str:
    """Return the name of a library's model for clients: `piper:VOICE`, `sherpa-onnx:FOLDER`."""
    path = Path(model.rstrip("/")).expanduser()
    if path.parent.name == "snapshots":
        # The cache of a hub: models--ORGANIZATION--REPOSITORY/snapshots/COMMIT.
        return f"{library}:{path.parents[1].name.rpartition('--')[2]}"
    return f"{library}:{path.name.removesuffix('.onnx')}" if model else library


def thread_count(most: int = 4) -> int:
    """Return the threads for a library that speaks: one processor is left to the server."""
    return max(1, min(most, (os.cpu_count() or 1) - 1))


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice that a speaker has.

    Args:
        name: its name in requests.
        language: its ISO 639-1 code, if it is known.
    """

    name: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text to speak, in one piece: the adapter cuts a long text at the ends of sentences.

    Args:
        voice: the name of one of the speaker's voices.
        instructions: how to speak, for speakers that take instructions.
        ticket: the request that it belongs to: once one of its utterances was admitted to a queue,
            none is rejected as busy.
    """

    text: str
    voice: str
    instructions: str = ""
    ticket: Ticket = field(default_factory=Ticket, compare=False)


@dataclass(frozen=True, slots=True)
class Pcm:
    """A piece of spoken audio.

    Args:
        samples: signed 16 bit, little endian, mono; whole samples.
        rate: samples a second; the same in all pieces of an utterance.
    """

    samples: bytes
    rate: int


@dataclass(frozen=True, slots=True)
class SpeakerFacts:
    """The abilities of a speaker.

    Args:
        name: the name of its model, as clients see it.
        voices: at least one; the first is the default.
        takes_instructions: False if it ignores instructions.
        inexact: the fields of requests, such as `instructions`, that it may ignore.
    """

    name: str
    voices: Sequence[Voice]
    takes_instructions: bool = False
    inexact: frozenset[str] = frozenset()


class Speaker(Protocol):
    """Speaks texts at its own speed, which the adapter changes.

    The only errors that its coroutines raise on purpose are `LatimerError`s.
    """

    def known(self) -> SpeakerFacts:
        """Return its name, and what else is known already; this loads and asks nothing."""
        ...

    async def facts(self) -> SpeakerFacts:
        """Return what it can do; the answer is cached."""
        ...

    def speak(self, utterance: Utterance) -> AbstractAsyncContextManager[AsyncIterator[Pcm]]:
        """Speak; leaving the context or cancelling the task ends the work.

        At least one piece has samples.

        Raises:
            Unspoken: the voice has no sound for the text; the sentences after it are spoken.
        """
        ...

    async def aclose(self) -> None:
        """Release threads, processes and memory."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its times, in seconds from the start of the recording."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcript.

    Args:
        text: as it is to be joined; it may begin with a space.
        start, end: seconds from the start of the recording; None if the transcriber has no times.
        words: its words with times, if they were asked for and the transcriber has them.
        logprob: the mean log-probability of its tokens, if it is known.
        no_speech: the probability that nobody speaks, if it is known.
        tokens: its token ids, if they are known.
        language: the ISO 639-1 code of what is spoken, if it is known.
        prompt_tokens, completion_tokens: the tokens that a language model has evaluated and
            generated for it; 0 for other transcribers.
    """

    text: str
    start: float | None = None
    end: float | None = None
    words: Sequence[Word] = ()
    logprob: float | None = None
    no_speech: float | None = None
    tokens: Sequence[int] = ()
    language: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """Speech to transcribe.

    Args:
        samples: signed 16 bit, little endian, mono, at `TRANSCRIBED_RATE`.
        language: the ISO 639-1 code of its language; empty if it is to be found.
        prompt: text that precedes it, or words to expect.
        temperature: of sampling; 0 is greedy.
        words: True if the times of words are wanted.
        translate: True for English text, from any language.
        ticket: the request that it belongs to: once it was admitted to a queue, none of its pieces
            is rejected as busy.
    """

    samples: bytes
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    words: bool = False
    translate: bool = False
    ticket: Ticket = field(default_factory=Ticket, compare=False)

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / (2 * TRANSCRIBED_RATE)


@dataclass(frozen=True, slots=True)
class TranscriberFacts:
    """The abilities of a transcriber.

    Args:
        name: the name of its model, as clients see it.
        has_segments: True if segments have times.
        has_words: True if words have times.
        translates: True if it can translate to English.
        takes_language, takes_prompt, takes_temperature: False if it ignores the field.
        languages: the ISO 639-1 codes of those that it knows; empty if it does not tell.
        most_seconds: the longest recording; None for no limit of its own.
    """

    name: str
    has_segments: bool = False
    has_words: bool = False
    translates: bool = False
    takes_language: bool = False
    takes_prompt: bool = False
    takes_temperature: bool = False
    languages: Sequence[str] = ()
    most_seconds: float | None = None

    @property
    def language(self) -> str:
        """The one language that it knows; empty for several."""
        return self.languages[0] if len(self.languages) == 1 else ""


class Transcriber(Protocol):
    """Transcribes recordings. Its coroutines raise `LatimerError`s only, as far as on purpose."""

    def known(self) -> TranscriberFacts:
        """Return its name, and what else is known already; this loads and asks nothing."""
        ...

    async def facts(self) -> TranscriberFacts:
        """Return what it can do; the answer is cached."""
        ...

    def transcribe(
        self, recording: Recording
    ) -> AbstractAsyncContextManager[AsyncIterator[Segment]]:
        """Transcribe; leaving the context or cancelling the task ends the work.

        The texts of all segments, joined, are the transcript. Segments arrive as they are known.
        """
        ...

    async def aclose(self) -> None:
        """Release threads, processes and memory."""
