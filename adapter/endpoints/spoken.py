"""Spoken answers of `POST /v1/chat/completions` (contract of audio, section 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...backends.base import Grammar
from ...backends.errors import shortened
from ...backends.queue import Ticket
from ...schemas.openai.chat import ChatCompletion, ChatRequest
from ...schemas.openai.common import Usage
from ...schemas.openai.messages import AssistantMessage, EarlierAudio, Message
from ..audio.formats import check_format
from ..audio.sinks import SpokenReply, SpokenStream
from ..audio.spoken import FIELD, AudioOutput, Speech
from ..audio.voices import speaker_for, voice_for
from ..chat.message import Shape, SpokenEncoder
from ..errors import InvalidRequest, missing, wrong_value
from ..generation.frames import in_stream
from ..generation.run import Plan
from ..generation.sinks import Answer, Result, respond
from ..model_entry import ServedModel
from ..request import Exchange
from ..service import Service
from ..store.transcripts import audio_id, origin_of
from .common import ticket_of_tier

VOICE = "audio.voice"
_COMPLETION = "chat.completion"


async def audio_output_of(
    request: ChatRequest, service: Service, served: ServedModel
) -> AudioOutput:
    """Return how the answers to a request with the modality `audio` are spoken.

    Raises:
        InvalidRequest: a field of the audio is missing or not supported here.
        Unsupported: nothing here speaks.
    """
    audio = request.audio
    if audio is None:
        raise missing("audio")
    if "text" not in (request.modalities or ()):
        raise InvalidRequest(
            "Invalid value: ['audio']. Supported values are: ['text'], and ['text', 'audio'].",
            "modalities",
            "invalid_value",
        )
    speaker = await speaker_for(service, served)
    if request.stream and audio.format != "pcm16":
        raise not_streamed(audio.format)
    if request.oai_compat is False:
        raise wrong_value(
            "modalities",
            "an engine's own response has no audio. Omit 'oai_compat', or request text only.",
        )
    check_format(audio.format, FIELD)
    facts, strict = await speaker.facts(), served.policy.strict
    voice = voice_for(facts, audio.voice, VOICE, strict)
    ticket = ticket_of_tier(request.service_tier) or Ticket()
    # What follows an answer is not rejected as busy.
    ticket.admitted = True
    return AudioOutput(speaker, voice, audio.format, ticket)


def not_streamed(form: str) -> InvalidRequest:
    """Return OpenAI's error for a format that cannot be streamed."""
    return InvalidRequest(
        f"'{FIELD}' does not support '{form}' when stream=true. Supported values are: 'pcm16'.",
        FIELD,
        "unsupported_value",
    )


def check_spoken(answer: Grammar | None) -> None:
    """Reject a spoken answer in JSON, of which a listener has no use.

    Raises:
        InvalidRequest: the request has a schema for the answer.
    """
    if answer is not None and answer.kind == "json_schema":
        raise wrong_value(
            answer.param.partition(".")[0],
            "not supported together with audio. Omit it, or request text only.",
        )


async def read_transcripts(exchange: Exchange, service: Service, messages: list[Message]) -> None:
    """Replace the audio of earlier answers in messages by its text; content that is there wins.

    Raises:
        InvalidRequest: an id is unknown or expired, and the message does not have the transcript.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, AssistantMessage) or message.audio is None:
            continue
        changes: dict[str, Any] = {"audio": None}
        if not message.content:
            text = await _transcript(exchange, service, message.audio, index)
            changes["content"] = text
            if exchange.to_store is not None:
                kept = {"id": message.audio.id, "transcript": text}
                exchange.to_store = _with_audio(exchange.to_store, index, kept)
        messages[index] = message.model_copy(update=changes)


def _with_audio(body: Mapping[str, Any], index: int, audio: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a request's body to store, which names the audio of a message without its data."""
    messages = list(body["messages"])
    messages[index] = {**messages[index], "audio": audio}
    return {**body, "messages": messages}


async def _transcript(exchange: Exchange, service: Service, audio: EarlierAudio, index: int) -> str:
    found = await service.transcripts.find(exchange.key, audio.id)
    if found is None:
        found = await _stored(exchange, service, audio.id)
    if found is None:
        found = audio.transcript
    if found is None:
        raise InvalidRequest(
            f"Audio with id '{shortened(audio.id)}' not found. It may have expired. Send the "
            "transcript of the answer as 'content'.",
            f"messages.[{index}].audio.id",
            "audio_not_found",
        )
    return found


async def _stored(exchange: Exchange, service: Service, name: str) -> str | None:
    """Return the transcript of a stored completion; None if it is not stored."""
    origin = origin_of(name)
    if service.store is None or origin is None:
        return None
    completion, number = origin
    stored = await service.store.get(exchange.key, _COMPLETION, completion)
    if stored is None or (exchange.grant is not None and not exchange.grant.allows(stored.model)):
        return None
    choices = stored.reply["choices"]
    if number >= len(choices):
        return None
    audio = choices[number]["message"].get("audio")
    return None if audio is None else str(audio["transcript"])


async def answer_aloud(
    exchange: Exchange,
    service: Service,
    served: ServedModel,
    request: ChatRequest,
    output: AudioOutput,
    shape: Shape,
    plan: Plan,
    answer: Answer,
    chunk: Mapping[str, Any],
    include_usage: bool,
) -> None:
    """Run a plan and send the response with its speech.

    Args:
        answer: of the same response without speech.
        chunk: the keys that each chunk of a stream has.
    """
    id_of = partial(audio_id, str(chunk["id"]))
    keep = partial(service.transcripts.keep, exchange.key)
    async with Speech(output, not request.stream, id_of, keep) as speech:
        answer.whole = partial(_whole, answer.whole, speech)
        if not request.stream:
            reply = SpokenReply(exchange, served, answer, speech)
            await respond(exchange, served, plan, answer, None, reply)
            return
        own = SpokenEncoder(chunk, include_usage, answer.show, shape, id_of)
        frames = in_stream(request.stream_options, own)
        stream = SpokenStream(exchange, served, answer, frames, own, speech)
        await respond(exchange, served, plan, answer, frames, stream)


def _whole(whole: Any, speech: Speech, results: Sequence[Result], usage: Usage) -> ChatCompletion:
    """Return a response whose contents are the transcripts of audio, without its data."""
    reply: ChatCompletion = whole(results, usage)
    for choice in reply["choices"]:
        audio = speech.answer(choice["index"])
        if audio is not None:
            choice["message"]["content"] = None
            choice["message"]["audio"] = audio
    return reply
