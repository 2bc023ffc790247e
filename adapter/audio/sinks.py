"""Send a response whose content is spoken: whole, or as a stream of text and samples."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import orjson
from typing_extensions import override

from ...backends import offload
from ...backends.base import Batch, Finish, Piece
from ...backends.errors import LatimerError
from ...schemas import limits
from ...schemas.openai.chat import ChatCompletion
from ...schemas.openai.common import Usage
from ..chat.message import SpokenEncoder
from ..errors import InvalidRequest
from ..generation.choice import Choice, Delta
from ..generation.frames import ChunkEncoder, padded
from ..generation.keepalive import SENDING
from ..generation.sinks import Answer, JsonSink, StreamSink, cost_of, note_approximated
from ..model_entry import ServedModel
from ..request import EVENT_STREAM, Exchange
from .spoken import FRAME, Addition, Speech

# The bytes of a part of a response that is sent whole.
_PART = 1 << 18


class SpokenReply(JsonSink):
    """A sink that sends a spoken response whole; it speaks while the text is generated."""

    is_live = True

    def __init__(
        self, exchange: Exchange, served: ServedModel, answer: Answer, speech: Speech
    ) -> None:
        super().__init__(exchange, served, answer)
        self._speech = speech
        self._deltas: list[list[Delta]] = []
        # The texts that are not spoken yet; None for the end of a choice.
        self._unspoken: list[Addition] = []
        self._files: dict[int, bytes] = {}

    @override
    def begin(self, choices: Sequence[Choice], per_prompt: int) -> None:
        super().begin(choices, per_prompt)
        self._speech.begin(len(choices), self)
        # The text that a reply begins with is spoken, too.
        self._deltas = [list(self._prompts.get(index, ())) for index in range(len(choices))]
        self._unspoken += self._prompts.items()

    @override
    async def take(self, batch: Batch) -> None:
        self._speech.check()
        size = cost_of(batch) if self._needs_tokens else 0
        await offload.run(size, self._take, batch)
        texts, self._unspoken = self._unspoken, []
        await self._speech.add(texts)

    @override
    def _take(self, batch: Batch) -> None:
        for event in batch:
            index = event.choice
            choice, deltas = self._choices[index], self._deltas[index]
            if isinstance(event, Piece):
                added = choice.take((event,))
                deltas += added
                self._unspoken.append((index, added))
            elif isinstance(event, Finish):
                added, reason = choice.end(event)
                deltas += added
                self._unspoken += (index, added), (index, None)
                self._results[index] = self._answer.result((), deltas, reason, event, choice.stop)

    async def take_samples(self, index: int, data: bytes) -> None:
        """Keep the file of a choice.

        Raises:
            InvalidRequest: the response has more samples than are kept.
        """
        most = limits.SPOKEN_SAMPLES
        if self._speech.size > most.maximum << 20:
            raise InvalidRequest(
                f"The spoken answer is too long: it has more than {most.maximum} {most.unit} of "
                "samples. Stream it, or lower 'max_completion_tokens'.",
                "modalities",
                "audio_too_long",
            )
        if data:
            self._files[index] = data

    async def end_samples(self, index: int, expires_at: int | None) -> None:
        """Take the end of a choice, whose file is complete."""

    @override
    async def finish(self, finishes: Sequence[Finish], usage: Usage) -> Mapping[str, Any]:
        await self._speech.wait()
        if any(one.inexact for one in finishes):
            note_approximated(self._exchange, self._served, finishes)
        results = [*filter(None, self._results)]
        size = max(self._speech.size, offload.UNKNOWN)
        reply = await offload.run(size, self._answer.whole, results, usage)
        if self._answer.store is not None:
            await self._answer.store(reply)
        voiced = cast("ChatCompletion", reply)
        parts = await offload.run(size, _parts, voiced, self._files)
        await self._exchange.reply_in_parts(parts)
        return reply


def _parts(reply: ChatCompletion, files: Mapping[int, bytes]) -> list[bytes]:
    """Return the parts of a response's JSON, with the files of its choices."""
    choices = []
    for choice in reply["choices"]:
        message = choice["message"]
        if "audio" in message:
            data = b64encode(files[choice["index"]]).decode()
            message = {**message, "audio": {**message["audio"], "data": data}}
        choices.append({**choice, "message": message})
    body = orjson.dumps({**reply, "choices": choices})
    return [body[start : start + _PART] for start in range(0, len(body), _PART)]


class SpokenStream(StreamSink):
    """A sink that streams a spoken response: its text is ahead of its samples.

    Args:
        frames: the frames of `own`, padded if the request asks for it.
        own: the frames of the audio.
    """

    def __init__(
        self,
        exchange: Exchange,
        served: ServedModel,
        answer: Answer,
        frames: ChunkEncoder,
        own: SpokenEncoder,
        speech: Speech,
    ) -> None:
        super().__init__(exchange, served, answer, frames)
        # The speech waits for its turn.
        self.pushes = False
        self._own = own
        self._pad: Callable[[bytes], bytes] = bytes if frames is own else padded
        self._speech = speech
        # Two tasks send: that of the text, and that of the speech.
        self._lock = asyncio.Lock()
        # The texts that are not spoken yet, because their choice is not shown; None for an end.
        self._unspoken: list[Addition] = []

    @override
    def begin(self, choices: Sequence[Choice], per_prompt: int) -> None:
        super().begin(choices, per_prompt)
        self._unspoken += enumerate(self._starts)
        self._speech.begin(len(choices), self)

    @override
    async def take(self, batch: Batch) -> None:
        self._speech.check()
        size = 0 if self._answer.show is None else cost_of(batch)
        data = await offload.run(size, self._written, batch)
        if self.at_once and not self._exchange.started:
            self._note()
        await self._send(data)
        # No audio comes before the first text of its choice, nor before those with a lower index.
        texts = [one for one in self._unspoken if one[0] < self._shown]
        self._unspoken = [one for one in self._unspoken if one[0] >= self._shown]
        await self._speech.add(texts)

    @override
    async def finish(self, finishes: Sequence[Finish], usage: Usage) -> Mapping[str, Any] | None:
        await self._speech.wait()
        return await super().finish(finishes, usage)

    @override
    async def fail(self, error: LatimerError) -> bool:
        await self._speech.aclose()
        return await super().fail(error)

    async def take_samples(self, index: int, data: bytes) -> None:
        """Send samples; between two frames, others have the event loop."""
        for start in range(0, len(data), FRAME):
            await self._send(self._pad(self._own.audio(index, data[start : start + FRAME])))
            await asyncio.sleep(0)

    async def end_samples(self, index: int, expires_at: int | None) -> None:
        """Send the end of a choice."""
        await self._send(self._pad(self._own.last(index, expires_at)))

    @override
    def _end(self, event: Finish) -> bytes:
        data = super()._end(event)
        self._unspoken.append((event.choice, None))
        return data

    @override
    def _framed(self, index: int, deltas: Sequence[Delta]) -> bytes:
        self._unspoken.append((index, deltas))
        return super()._framed(index, deltas)

    async def _send(self, data: bytes) -> None:
        exchange, comments = self._exchange, self.comments
        async with self._lock:
            if comments.writing is not None:
                await comments.settle()
            comments.idle = SENDING
            if not exchange.started:
                await exchange.start(200, EVENT_STREAM)
            if data:
                await exchange.chunk(data)
            comments.idle = 0
