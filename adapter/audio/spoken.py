"""Speak the choices of a response while their texts are generated, sentence by sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol, TypeAlias

from ...backends import offload
from ...backends.errors import EngineError, Unspoken
from ...backends.queue import Ticket
from ...backends.speech.base import Pcm, Speaker, Utterance
from ...schemas.openai.chat import SpokenAnswer
from ..generation.choice import Delta
from .formats import PCM_RATE, AudioFormat, Encoder, encoded
from .sentences import Sentences, is_speakable
from .voices import ChosenVoice

# Samples for a text in which nothing is to be spoken, a tenth of a second: files without samples do
# not decode in every format.
SILENCE = Pcm(bytes(PCM_RATE // 10 * 2), PCM_RATE)
# The seconds of audio that a sentence may have.
MOST_SECONDS = 120
# The bytes of samples that a listener takes at least within a sentence: 0.4 seconds, as OpenAI
# sends them.
FRAME = 2 * PCM_RATE * 2 // 5
# Parts of texts that are cut into sentences at once.
_AT_ONCE = 32
FIELD = "audio.format"
# The index of a choice, and what is added to its text; None at its end.
Addition: TypeAlias = tuple[int, Sequence[Delta] | None]


async def pieces_of(
    speaker: Speaker, utterance: Utterance, rate: int = 0
) -> AsyncGenerator[Pcm, None]:
    """Yield the audio of a sentence.

    Args:
        rate: that of the sentences before it; 0 for the first one.

    Raises:
        EngineError: the speaker sends nothing, too much, or another rate.
        Unspoken: the voice has no sound for it.
    """
    count = 0
    async with speaker.speak(utterance) as pieces:
        async for pcm in pieces:
            rate = rate or pcm.rate
            count += len(pcm.samples) // 2
            if pcm.rate != rate:
                raise EngineError("The speaker changed the sample rate within a text.")
            if count > MOST_SECONDS * rate:
                raise EngineError(
                    f"The speaker spoke for more than {MOST_SECONDS} seconds for a sentence."
                )
            if pcm.samples:
                yield pcm
    if not count:
        raise EngineError("The speaker returned no audio for a sentence.")


@dataclass(frozen=True, slots=True)
class AudioOutput:
    """The speaker of a response, its voice, and the format of its audio.

    Args:
        ticket: the request as the queue of the speaker knows it.
    """

    speaker: Speaker
    voice: ChosenVoice
    form: AudioFormat
    ticket: Ticket


class Listener(Protocol):
    """Takes the audio of choices; the speech waits for it."""

    async def take_samples(self, index: int, data: bytes) -> None:
        """Take a part of the encoded audio of a choice."""
        ...

    async def end_samples(self, index: int, expires_at: int | None) -> None:
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
    rate: int = 0
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
        output: AudioOutput,
        is_whole: bool,
        id_of: Callable[[int], str],
        keep: Callable[[str, str], Awaitable[int]],
    ) -> None:
        self._output = output
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

    async def add(self, texts: Iterable[Addition]) -> None:
        """Add to the texts of choices; None ends a choice. Others have the event loop meanwhile."""
        for number, (index, deltas) in enumerate(texts, 1):
            if deltas is None:
                self._end(index)
            else:
                self._add(index, deltas)
            if not number % _AT_ONCE:
                await asyncio.sleep(0)

    def _add(self, index: int, deltas: Sequence[Delta]) -> None:
        line = self._lines[index]
        for delta in deltas:
            if delta.kind == "content":
                line.is_spoken = True
                line.texts.append(delta.text)
                for sentence in line.sentences.feed(delta.text):
                    self._queue.put_nowait((index, sentence))
            elif delta.kind == "call":
                line.has_calls = True

    def _end(self, index: int) -> None:
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
                    await listener.take_samples(index, await self._rest(line))
                    line.expires_at = await self._keep(self._id_of(index), "".join(line.texts))
                await listener.end_samples(index, line.expires_at)
            elif is_speakable(sentence):
                with suppress(Unspoken):
                    await self._say(index, sentence, listener)

    async def _say(self, index: int, sentence: str, listener: Listener) -> None:
        line, data, output = self._lines[index], b"", self._output
        utterance = Utterance(sentence, output.voice.name, ticket=output.ticket)
        async with aclosing(pieces_of(output.speaker, utterance, line.rate)) as pieces:
            async for piece in pieces:
                self.size += len(piece.samples)
                data += await encoded(await self._encoder(line, piece.rate), piece.samples)
                whole = len(data) - len(data) % FRAME
                await listener.take_samples(index, data[:whole])
                data = data[whole:]
        await listener.take_samples(index, data)

    async def _encoder(self, line: _Line, rate: int) -> Encoder:
        """Return the encoder of a choice; the event loop cannot wait for its imports."""
        if line.encoder is None:
            make = partial(Encoder, self._output.form, rate, self._is_whole, param=FIELD)
            line.encoder = await asyncio.to_thread(make)
            line.rate = rate
        return line.encoder

    async def _rest(self, line: _Line) -> bytes:
        """Return the end of a choice's audio, which is the whole file if it is sent at once."""
        data = b""
        if line.encoder is None:
            data = await encoded(await self._encoder(line, SILENCE.rate), SILENCE.samples)
        encoder = await self._encoder(line, SILENCE.rate)
        size = max(self.size, offload.UNKNOWN) if encoder.is_slow else self.size
        return data + await offload.run(size, encoder.end)
