"""A language model that hears, as a transcriber: it gets the recording in a chat, and an order."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from typing_extensions import override

from ...backends import offload
from ...backends.base import Finish, Generation, Piece, Sampling
from ...backends.errors import (
    ContextExceeded,
    LatimerError,
    RequestError,
    UnreadableMedia,
    Unsupported,
)
from ...backends.speech.base import Recording, Segment, Transcriber, TranscriberFacts
from ...backends.speech.pieces import cut, joined, wav_of
from ...schemas.openai.messages import (
    AudioPart,
    InputAudio,
    Message,
    SystemMessage,
    TextPart,
    UserMessage,
)
from ..chat.prepare import ChatJob, ChatTurn, prepare
from ..errors import InvalidRequest
from ..generation.choice import NO_ECHO, Choice
from ..model_entry import ServedModel
from .languages import NAMES, code_of

# Seconds of a recording that a model gets at once. Models are trained with half a minute to some
# minutes, and omit parts of longer ones.
PIECE = 30.0
# The tokens of an answer: for each second of a recording, and for what precedes them. Fast speech
# has 8 a second; a model that repeats itself ends here.
TOKENS, MORE_TOKENS = 16, 64
# What llama.cpp's own server sends, on which models are tried; the second is for LFM2.
ORDER, LFM2_ORDER = "Transcribe audio to text", "Perform ASR."
# What Qwen3-ASR writes before a transcript, and the longest that it can be.
_HEAD = re.compile(r"\s*(?:language\s+(?P<name>[^<]{0,40}?)\s*)?<asr_text>")
_MOST_HEAD = 80


class Head:
    """The text of a model before its transcript: Qwen3-ASR's language.

    Attributes:
        language: its code, once the head has been read; empty if there is none.
    """

    def __init__(self) -> None:
        self._held: str | None = ""
        self.language = ""

    def feed(self, text: str) -> str:
        """Return the text that belongs to the transcript; a head is held until it is complete."""
        if self._held is None:
            return text
        self._held += text
        found = _HEAD.match(self._held)
        if found is not None:
            self.language = code_of(found["name"] or "")
            return self._release(found.end())
        start = self._held.lstrip()
        if _may_begin(start) and len(start) < _MOST_HEAD:
            return ""
        return self._release(0)

    def end(self) -> str:
        """Return what was held."""
        return self._release(0)

    def _release(self, start: int) -> str:
        text, self._held = (self._held or "")[start:], None
        return text


def _may_begin(text: str) -> bool:
    """Return True if a text can be the beginning of a head."""
    return any(text.startswith(word[: len(text)]) for word in ("language ", "<asr_text>"))


class AudioModel(Transcriber):
    """A model with audio input, for one request.

    Long recordings are cut at quiet places; each piece is a job of the engine.

    Args:
        owner: see `Generation`.
    """

    def __init__(self, served: ServedModel, owner: str) -> None:
        self._served = served
        self._owner = owner

    @override
    def known(self) -> TranscriberFacts:
        """Return what it can do. It has no times, and none are made up."""
        return TranscriberFacts(
            self._served.model.name, takes_language=True, takes_prompt=True, takes_temperature=True
        )

    @override
    async def facts(self) -> TranscriberFacts:
        return self.known()

    @override
    @asynccontextmanager
    async def transcribe(self, recording: Recording) -> AsyncIterator[AsyncIterator[Segment]]:
        async with aclosing(self._segments(recording)) as segments:
            yield segments

    @override
    async def aclose(self) -> None:
        """Release nothing: the adapter closes the engine."""

    async def _segments(self, recording: Recording) -> AsyncGenerator[Segment, None]:
        before = ""
        for samples in cut(recording.samples, PIECE):
            head, text = Head(), ""
            chat = await self._prepared(samples, recording)
            chat.job.ticket = recording.ticket
            async for part in self._written(chat):
                if isinstance(part, Finish):
                    rest = head.end()
                    prompt, generated = part.prompt_tokens, part.completion_tokens
                else:
                    rest, prompt, generated = head.feed(part), 0, 0
                if not text:
                    # The text of the piece begins.
                    rest = joined(before, rest)
                text += rest
                yield Segment(
                    rest,
                    language=head.language or recording.language,
                    prompt_tokens=prompt,
                    completion_tokens=generated,
                )
            before = text.rstrip() or before

    async def _prepared(self, samples: bytes, recording: Recording) -> ChatJob:
        size = len(samples)
        data = await offload.run(size, lambda: b64encode(wav_of(samples)).decode())
        most = int(size / 32_000 * TOKENS) + MORE_TOKENS
        turn = ChatTurn(
            self._messages(data, recording),
            size,
            self._owner,
            most,
            (None,),
            (),
            Sampling(temperature=recording.temperature),
        )
        try:
            return await prepare(turn, self._served)
        except LatimerError as error:
            raise _about_file(error) from None

    def _messages(self, data: str, recording: Recording) -> list[Message]:
        sound = AudioPart(type="input_audio", input_audio=InputAudio(data=data, format="wav"))
        more = ""
        if recording.language:
            more += f" (language: {NAMES.get(recording.language, recording.language)})"
        if recording.prompt:
            more += f" (context: {recording.prompt})"
        if "lfm2" in self._served.model.name.lower():
            order = SystemMessage(role="system", content=f"{LFM2_ORDER}{more}")
            return [order, UserMessage(role="user", content=[sound])]
        text = TextPart(type="text", text=f"{ORDER}{more}")
        return [UserMessage(role="user", content=[text, sound])]

    async def _written(self, chat: ChatJob) -> AsyncIterator[str | Finish]:
        """Yield the content that the model writes, and its end."""
        job: Generation = chat.job
        choice = Choice(job.stops.texts, NO_ECHO, chat.form)
        cuts = chat.form is not None and job.stops.by_reader
        try:
            async with self._served.backend.open(job) as batches:
                async for batch in batches:
                    for event in batch:
                        if isinstance(event, Piece):
                            end = choice.read(event) if cuts else None
                            if end is not None:
                                job.stops.ends[0] = end
                            deltas = choice.take([event])
                        elif isinstance(event, Finish):
                            deltas, _ = choice.end(event)
                        else:
                            continue
                        text = "".join(one.text for one in deltas if one.kind == "content")
                        if text:
                            yield text
                        if isinstance(event, Finish):
                            yield event
        except LatimerError as error:
            raise _about_file(error) from None


def _about_file(error: LatimerError) -> LatimerError:
    """Return an error that names the file instead of the chat which the model gets."""
    if isinstance(error, ContextExceeded):
        return InvalidRequest(
            f"Invalid 'file': the recording takes {error.prompt_tokens} tokens, and the context of "
            f"the model has {error.context}. Start the engine with a longer one.",
            "file",
            "context_length_exceeded",
        )
    if isinstance(error, UnreadableMedia):
        return UnreadableMedia("file")
    if isinstance(error, Unsupported):
        return Unsupported("file", error.engine, error.hint)
    if isinstance(error, RequestError) and error.param != "model":
        return InvalidRequest(f"The model did not take the recording: {error}", "file")
    return error
