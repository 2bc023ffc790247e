"""Speak the choices of a response while their texts are generated, sentence by sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from ...backends.speech.base import Pcm, Speaker, Utterance
from ...schemas.openai.chat import SpokenAnswer
from ..generation.choice import Delta
from .formats import PCM_RATE, AudioFormat, Encoder
from .sentences import Sentences, is_speakable
from .voices import ChosenVoice

# The silence, in seconds, of an answer that has nothing to speak: files without samples do not
# decode in every format.
SILENCE = 0.1
# The bytes of samples that a listener takes at least within a sentence: 0.4 seconds, as OpenAI
# sends them.
FRAME = 2 * PCM_RATE * 2 // 5
FIELD = "audio.format"


@dataclass(frozen=True, slots=True)
class Manner:
    """How a response is spoken."""

    speaker: Speaker
    voice: ChosenVoice
    form: AudioFormat


class Listener(Protocol):
    """Takes the audio of choices; the speech waits for it."""

    async def hear(self, index: int, data: bytes) -> None:
        """Take a part of the encoded audio of a choice."""
        ...

    async def heard(self, index: int, expires_at: int | None) -> None:
        """Take the end of a choice; `expires_at` is None if it has no audio."""
        ...


@dataclass(slots=True)
class _Line:
    """A choice, as far as it is known.

    Attributes:
        is_spoken: False while there are only tool calls and reasoning.
        expires_at: when its transcript is forgotten, in seconds since 1970; None while it is not
            complete.
    """

    sentences: Sentences = field(default_factory=Sentences)
    texts: list[str] = field(default_factory=list)
    encoder: Encoder | None = None
    is_spoken: bool = False
    has_calls: bool = False
    expires_at: int | None = None


class Speech:
    """The speech of a response; a context that ends it.

    A single task speaks one sentence at a time, in the order in which sentences are complete.
    Texts are never held back: what waits is text, which the context length bounds.

    Args:
        is_whole: True if each choice is one file, which arrives when it is complete.
        id_of: returns the id of the audio of a choice.
        keep: keeps the transcript with an id, and returns when it expires, in seconds since 1970.

    Attributes:
        size: the bytes of samples so far, of all choices.
    """

    def __init__(
        self,
        manner: Manner,
        is_whole: bool,
        id_of: Callable[[int], str],
        keep: Callable[[str, str], int],
    ) -> None:
        self._manner = manner
        self._is_whole = is_whole
        self._id_of = id_of
        self._keep = keep
        self._lines: list[_Line] = []
        # Sentences, and None for the end of a choice.
        self._queue: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.size = 0

    async def __aenter__(self) -> Speech:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    def begin(self, count: int, listener: Listener) -> None:
        """Begin to speak for a listener; the number of choices is known."""
        self._lines = [_Line() for _ in range(count)]
        self._task = asyncio.create_task(self._speak(listener))

    def add(self, index: int, deltas: Iterable[Delta]) -> None:
        """Add to the text of a choice."""
        line = self._lines[index]
        for delta in deltas:
            if delta.kind == "content":
                line.is_spoken = True
                line.texts.append(delta.text)
                for sentence in line.sentences.feed(delta.text):
                    self._queue.put_nowait((index, sentence))
            elif delta.kind == "call":
                line.has_calls = True

    def end(self, index: int) -> None:
        """End the text of a choice."""
        line = self._lines[index]
        # A turn of calls only has no audio; an answer without text has.
        line.is_spoken = line.is_spoken or not line.has_calls
        for sentence in line.sentences.end():
            self._queue.put_nowait((index, sentence))
        self._queue.put_nowait((index, None))

    def check(self) -> None:
        """Raise the error that has ended the speech, if there is one."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def wait(self) -> None:
        """Wait until every choice is spoken; raise the error that has ended the speech."""
        if self._task is not None:
            await self._task

    async def aclose(self) -> None:
        """End the speech."""
        if self._task is not None:
            self._task.cancel()
            # Its error was raised by `check` or `wait`, or the response has failed before.
            await asyncio.gather(self._task, return_exceptions=True)

    def answer(self, index: int) -> SpokenAnswer | None:
        """Return the audio of a choice that is complete, without data; None if it has none."""
        line = self._lines[index]
        if line.expires_at is None:
            return None
        return {
            "id": self._id_of(index),
            "data": "",
            "expires_at": line.expires_at,
            "transcript": "".join(line.texts),
        }

    async def _speak(self, listener: Listener) -> None:
        left = len(self._lines)
        while left:
            index, sentence = await self._queue.get()
            if sentence is None:
                left -= 1
                line = self._lines[index]
                if line.is_spoken:
                    await listener.hear(index, await asyncio.to_thread(self._rest, line))
                    line.expires_at = self._keep(self._id_of(index), "".join(line.texts))
                await listener.heard(index, line.expires_at)
            elif is_speakable(sentence):
                await self._say(index, sentence, listener)

    async def _say(self, index: int, sentence: str, listener: Listener) -> None:
        line, data = self._lines[index], b""
        utterance = Utterance(sentence, self._manner.voice.name)
        async with self._manner.speaker.speak(utterance) as pieces:
            async for piece in pieces:
                self.size += len(piece.samples)
                data += await asyncio.to_thread(self._encoded, line, piece)
                whole = len(data) - len(data) % FRAME
                await listener.hear(index, data[:whole])
                data = data[whole:]
        await listener.hear(index, data)

    def _encoded(self, line: _Line, piece: Pcm) -> bytes:
        return self._encoder(line, piece.rate).feed(piece.samples)

    def _encoder(self, line: _Line, rate: int) -> Encoder:
        """Return the encoder of a choice; to make the first one takes imports."""
        if line.encoder is None:
            line.encoder = Encoder(self._manner.form, rate, self._is_whole, FIELD)
        return line.encoder

    def _rest(self, line: _Line) -> bytes:
        silence = b""
        if line.encoder is None:
            silence = self._encoder(line, PCM_RATE).feed(bytes(2 * int(SILENCE * PCM_RATE)))
        return silence + self._encoder(line, PCM_RATE).end()
