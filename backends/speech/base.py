"""The interfaces of engines and libraries that speak or transcribe.

Audio is PCM here: signed 16 bit, little endian, mono. Other formats are the adapter's matter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from ..queue import Ticket

# Samples a second of the audio that a transcriber gets.
TRANSCRIBED_RATE = 16_000


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
        speed: 1 is the voice's own speed, 2 is twice as fast.
        instructions: how to speak, for speakers that take instructions.
        party: the request that it belongs to: once one of its utterances was admitted to a queue,
            none is rejected as busy.
    """

    text: str
    voice: str
    speed: float = 1.0
    instructions: str = ""
    party: Ticket = field(default_factory=Ticket, compare=False)


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
        changes_speed: False if it speaks at one speed only.
        takes_instructions: False if it ignores instructions.
        inexact: the fields of requests, `speed` or `instructions`, that it may ignore.
    """

    name: str
    voices: Sequence[Voice]
    changes_speed: bool = False
    takes_instructions: bool = False
    inexact: frozenset[str] = frozenset()


class Speaker(Protocol):
    """Speaks texts. The only errors that its coroutines raise on purpose are `LatimerError`s."""

    async def facts(self) -> SpeakerFacts:
        """Return what it can do; the answer is cached."""
        ...

    def speak(self, utterance: Utterance) -> AbstractAsyncContextManager[AsyncIterator[Pcm]]:
        """Speak; leaving the context or cancelling the task ends the work.

        At least one piece has samples, unless the text has nothing to speak.
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
        party: the request that it belongs to: once it was admitted to a queue, none of its pieces
            is rejected as busy.
    """

    samples: bytes
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    words: bool = False
    translate: bool = False
    party: Ticket = field(default_factory=Ticket, compare=False)

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
        language: the one language that it knows; empty for several.
        most_seconds: the longest recording; None for no limit of its own.
    """

    name: str
    has_segments: bool = False
    has_words: bool = False
    translates: bool = False
    takes_language: bool = False
    takes_prompt: bool = False
    takes_temperature: bool = False
    language: str = ""
    most_seconds: float | None = None


class Transcriber(Protocol):
    """Transcribes recordings. Its coroutines raise `LatimerError`s only, as far as on purpose."""

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
