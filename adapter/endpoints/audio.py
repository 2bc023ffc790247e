"""`POST /v1/audio/speech` and `GET /v1/audio/voices` (contract of audio, section 2)."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import replace

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Sampling
from ...backends.errors import LatimerError, Unspoken
from ...backends.queue import Ticket
from ...backends.speech.base import Pcm, Speaker, SpeakerFacts, Utterance
from ...schemas.openai.audio import (
    SpeechDelta,
    SpeechDone,
    SpeechFormat,
    SpeechRequest,
    SpeechUsage,
    VoiceList,
)
from ..admission import TOKEN, admitted_for_audio, ticket_of
from ..audio.formats import Encoder, check_format, encoded, has_encoders, media_type_of
from ..audio.sentences import LONGEST_PIECE, is_speakable, sentences_of
from ..audio.spoken import SILENCE, pieces_of
from ..audio.voices import speaker_for, speech_use, voice_for, voices_of
from ..errors import DONE
from ..generation.keepalive import commented
from ..model_entry import ServedModel
from ..request import EVENT_STREAM, Exchange
from ..service import Service
from ..validation import notes, read

_log = logging.getLogger(__name__)

_SPEECH = TypeAdapter(SpeechRequest)
# Bytes of audio in an event.
_EVENT = 19_200
# The formats whose header has the length of the audio.
_SIZED = frozenset({"wav", "flac"})
_NO_TOKENS: SpeechUsage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}


async def create_speech(exchange: Exchange, service: Service) -> None:
    """Speak a text.

    The audio is sent as soon as the first sentence is spoken. With `stream_format: "sse"`, the
    reply has events.
    """
    request = await read(exchange, _SPEECH)
    exchange.wants_stream = request.stream_format == "sse"
    form = request.response_format or "mp3"
    use = speech_use(service, exchange.place)
    served, has_model = await admitted_for_audio(exchange, service, request.model, use)
    speaker = await speaker_for(service, served, exchange.place)
    check_format(form, "response_format")
    facts = await speaker.facts()
    strict, speed = served.policy.strict, request.speed or 1.0
    chosen = voice_for(facts, request.voice, "voice", strict)
    exact = {"model": has_model, "voice": chosen.is_exact}
    replaced = [name for name, is_exact in exact.items() if not is_exact]
    await _note(exchange, request, served, facts, replaced)
    size = offload.UNKNOWN if len(request.input) > LONGEST_PIECE else 0
    sentences = await offload.run(size, _sentences, request.input)
    ticket = Ticket()
    if service.speaker is None:
        ticket_of(exchange, served, ticket)
    else:
        ticket.engine = facts.name
    utterance = Utterance(
        "",
        chosen.name,
        (request.instructions or "") if facts.takes_instructions else "",
        ticket,
    )
    if exchange.record is not None:
        exchange.record.begin(served.name, served.capabilities.engine, ticket)
    is_whole = len(sentences) <= 1 and form in _SIZED
    output = _Output(exchange, form, is_whole, speed if has_encoders() else 1.0)
    try:
        async with aclosing(_spoken(exchange, speaker, utterance, sentences)) as spoken:
            async for pcm in spoken:
                await output.take(pcm)
        _end(exchange, request)
        await output.end()
    except LatimerError as error:
        if not exchange.started or exchange.has_waited:
            raise
        await output.fail(error)


def _sentences(text: str) -> list[str]:
    return [one for one in sentences_of(text) if is_speakable(one)]


async def _note(
    exchange: Exchange,
    request: SpeechRequest,
    served: ServedModel,
    facts: SpeakerFacts,
    replaced: Collection[str],
) -> None:
    """Name the fields that the speaker ignores, and those that are inexact.

    Args:
        replaced: fields whose value stands for one of OpenAI's.
    """
    inexact = {*replaced, *(name for name in facts.inexact if getattr(request, name))}
    ignored = []
    if request.speed not in (None, 1.0) and not has_encoders():
        ignored.append("speed")
    if request.instructions and not facts.takes_instructions:
        ignored.append("instructions")
    own = replace(served.capabilities, engine=facts.name, inexact=frozenset())
    strict = served.policy.strict
    await notes(exchange, request, Sampling(), own, strict, inexact, unserved=ignored)


async def _spoken(
    exchange: Exchange, speaker: Speaker, utterance: Utterance, sentences: list[str]
) -> AsyncGenerator[Pcm, None]:
    """Yield the audio of sentences; see `pieces_of`. Streams have comments while there is none.

    Raises:
        Unspoken: the voice has no sound for any of them.
    """
    if not sentences:
        yield SILENCE
    rate, unspoken = 0, None
    for sentence in sentences:
        spoken = pieces_of(speaker, replace(utterance, text=sentence), rate)
        if exchange.wants_stream:
            spoken = commented(exchange, spoken)
        try:
            async with aclosing(spoken) as pieces:
                async for pcm in pieces:
                    rate = pcm.rate
                    yield pcm
        except Unspoken as error:
            unspoken = error
    if unspoken is not None and not rate:
        raise unspoken


def _end(exchange: Exchange, request: SpeechRequest) -> None:
    """Note the end of the work; for the limits of keys, four characters are a token."""
    if exchange.lease is not None:
        exchange.lease.settle(len(request.input) // TOKEN + 1)
    if exchange.record is not None:
        exchange.record.succeed(0, 0)


class _Output:
    """The reply: audio as it is spoken, events with it, or a whole file if it is short.

    Args:
        is_whole: True to send the file when it is complete.
        speed: see `Encoder`.
    """

    def __init__(
        self, exchange: Exchange, form: SpeechFormat, is_whole: bool, speed: float
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._is_whole = is_whole
        self._speed = speed
        self._encoder: Encoder | None = None

    async def take(self, pcm: Pcm) -> None:
        """Encode and send a piece of audio."""
        if self._encoder is None:
            # The event loop cannot wait for the imports of the first one.
            arguments = self._form, pcm.rate, self._is_whole, self._speed
            self._encoder = await asyncio.to_thread(Encoder, *arguments)
        await self._send(await encoded(self._encoder, pcm.samples))

    async def end(self) -> None:
        """Send the rest of the file, and the end of the reply."""
        assert self._encoder is not None
        rest = await encoded(self._encoder, None)
        if self._exchange.wants_stream:
            await self._send(rest)
            done: SpeechDone = {"type": "speech.audio.done", "usage": _NO_TOKENS}
            await self._exchange.chunk(_event(done) + DONE, more=False)
        elif self._exchange.started:
            await self._exchange.chunk(rest, more=False)
        else:
            await self._exchange.reply(200, rest, media_type_of(self._form))

    async def fail(self, error: LatimerError) -> None:
        """End a reply that has begun: with an event, or without the end that HTTP requires."""
        exchange = self._exchange
        if exchange.record is not None:
            exchange.record.fail(error)
        if exchange.wants_stream:
            await exchange.chunk(exchange.fault(error), more=False)
        else:
            _log.error("request %s: speech failed: %s", exchange.request_id, error.message)

    async def _send(self, data: bytes) -> None:
        exchange = self._exchange
        if not data:
            return
        if not exchange.started:
            head = EVENT_STREAM if exchange.wants_stream else media_type_of(self._form)
            await exchange.start(200, head)
        if not exchange.wants_stream:
            await exchange.chunk(data)
            return
        for start in range(0, len(data), _EVENT):
            audio = b64encode(data[start : start + _EVENT]).decode()
            delta: SpeechDelta = {"type": "speech.audio.delta", "audio": audio}
            await exchange.chunk(_event(delta))


def _event(data: SpeechDelta | SpeechDone) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(data)


async def list_voices(exchange: Exchange, service: Service) -> None:
    """List the voices of the first model that speaks, in the shape that local servers share."""
    grant = exchange.grant
    name = await speech_use(service, exchange.place).first(service, grant)
    served = await (service.first(grant) if name is None else service.resolve(name, grant))
    speaker = await speaker_for(service, served, exchange.place)
    facts = await speaker.facts()
    reply: VoiceList = {"object": "list", "model": facts.name, "voices": voices_of(facts)}
    await exchange.reply(200, orjson.dumps(reply))
