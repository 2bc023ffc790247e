"""`POST /v1/audio/transcriptions` and `/translations` (contract of audio, sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Capabilities, Sampling
from ...backends.errors import LatimerError, Unsupported
from ...backends.speech.base import Recording, Segment, TranscriberFacts
from ...schemas.openai.common import joined
from ...schemas.openai.transcriptions import TranscriptionRequest, TranslationRequest
from ..audio.languages import code_of
from ..audio.recording import decoded, free
from ..audio.transcribers import Chosen, transcriber_for
from ..audio.transcript import TYPES, TextStream, Transcribed, body_of
from ..errors import DONE, InvalidRequest, missing, wrong_type, wrong_value
from ..form import Form, form_of, values_of
from ..generation.keepalive import commented
from ..request import EVENT_STREAM, JSON, Exchange
from ..service import Service
from ..validation import notes, parse

_TRANSCRIPTION, _TRANSLATION = TypeAdapter(TranscriptionRequest), TypeAdapter(TranslationRequest)
_ARRAYS = frozenset(
    {
        "include", "keywords", "known_speaker_names", "known_speaker_references", "languages",
        "timestamp_granularities",
    }
)  # fmt: skip
_NUMBERS, _BOOLEANS = frozenset({"temperature"}), frozenset({"stream"})
# The formats with times, and fields of a valid request that have no effect here.
_TIMED = frozenset({"srt", "verbose_json", "vtt"})
_UNUSED = (
    "include", "keywords", "known_speaker_names", "known_speaker_references", "languages",
)  # fmt: skip
_GRANULARITIES, _CHUNKING = "timestamp_granularities", "chunking_strategy"
_NO_TIMES = "It has no times. Use 'json' or 'text', or start the server with --transcription."


async def create_transcription(exchange: Exchange, service: Service) -> None:
    """Transcribe a recording, which is a file in a form."""
    async with form_of(exchange) as form:
        request = parse(_TRANSCRIPTION, (), _body(form))
        await _answer(exchange, service, form, request, request)


async def create_translation(exchange: Exchange, service: Service) -> None:
    """Translate a recording to English text."""
    async with form_of(exchange) as form:
        await _answer(exchange, service, form, parse(_TRANSLATION, (), _body(form)), None)


def _body(form: Form) -> dict[str, Any]:
    """Return the values of a form, whose file was checked.

    Raises:
        InvalidRequest: it has no file, or an empty one.
    """
    body = values_of(form, _ARRAYS, _NUMBERS, _BOOLEANS)
    # Clients send an object as a field for each of its keys.
    if (kind := body.pop(f"{_CHUNKING}[type]", None)) is not None:
        body.setdefault(_CHUNKING, kind)
    if "file" not in form.files:
        if "file" in form.texts:
            raise wrong_type("file", "a file with a name", form.texts["file"][0])
        raise missing("file")
    if not form.files["file"].size:
        raise wrong_value("file", "the file is empty. Send a recording.")
    return body


async def _answer(
    exchange: Exchange,
    service: Service,
    form: Form,
    request: TranscriptionRequest | TranslationRequest,
    own: TranscriptionRequest | None,
) -> None:
    """Transcribe and reply.

    Args:
        own: the request; None for a translation.
    """
    exchange.asked = request.model
    chosen = await transcriber_for(exchange, service, request.model)
    facts = chosen.facts
    if own is None and not facts.translates:
        raise InvalidRequest(
            f"This server does not serve {exchange.place}, because {chosen.engine} does not "
            "translate. Start it with --transcription and a Whisper model.",
            code="unsupported_endpoint",
            status=404,
        )
    form_name = request.response_format or "json"
    _check_format(form_name, own, chosen)
    language = "" if own is None or own.language is None else _language(own.language, chosen)
    await _note(exchange, request, own, chosen)
    streams = own is not None and bool(own.stream) and form_name not in _TIMED
    exchange.wants_stream = streams
    granularities = (own and own.timestamp_granularities) or ["segment"]
    await service.recordings.take(chosen.ticket)
    kept: list[object] = []
    try:
        recording = Recording(
            await decoded(form.files["file"].file, "file", facts.most_seconds),
            language if facts.takes_language else "",
            request.prompt or "" if facts.takes_prompt else "",
            request.temperature or 0.0,
            "word" in granularities,
            own is None,
            chosen.ticket,
        )
        kept.append(recording)
        if exchange.record is not None:
            exchange.record.begin(chosen.served.name, chosen.engine, chosen.ticket)
        send = _stream if streams else _reply
        found = await send(exchange, chosen, recording, form_name, granularities)
        del recording
    finally:
        service.recordings.release()
        free(kept)
    _end(exchange, found)


def _check_format(form: str, own: TranscriptionRequest | None, chosen: Chosen) -> None:
    """Refuse a format, or times, that the transcriber does not have.

    Raises:
        InvalidRequest: times are asked for in a format without them.
        Unsupported: the transcriber does not have what is asked for.
    """
    facts, engine = chosen.facts, chosen.engine
    granularities = own.timestamp_granularities if own is not None else None
    if granularities and form != "verbose_json":
        raise wrong_value(
            _GRANULARITIES, "it needs 'response_format': 'verbose_json'. Set it, or omit this."
        )
    if form == "diarized_json":
        hint = "It does not tell speakers apart. Use another format."
        raise Unsupported("response_format", engine, hint)
    if granularities and "word" in granularities and not facts.has_words:
        hint = "It has no times of words. Start the server with --transcription."
        raise Unsupported(_GRANULARITIES, engine, hint)
    if form in _TIMED and not facts.has_segments and granularities != ["word"]:
        raise Unsupported("response_format", engine, _NO_TIMES)


def _language(language: str, chosen: Chosen) -> str:
    """Return the code of a request's language.

    Raises:
        InvalidRequest: the language is unknown.
        Unsupported: the transcriber does not know the language; the error lists those it knows.
    """
    code, known = code_of(language), chosen.facts.languages
    if code in known or (code and not known):
        return code
    listed = joined([f"'{one}'" for one in sorted(known or ("en",))], "and")
    if not code:
        hint = f"Supported values are: {listed}." if known else f"Such a code is {listed}."
        raise wrong_value("language", f"expected the ISO 639-1 code of a language. {hint}")
    hint = f"Supported values are: {listed}."
    if len(known) == 1:
        hint = f"It knows {listed} only. Start the server with another --transcription."
    raise Unsupported("language", chosen.engine, hint)


async def _note(
    exchange: Exchange,
    request: TranscriptionRequest | TranslationRequest,
    own: TranscriptionRequest | None,
    chosen: Chosen,
) -> None:
    """Name the fields without effect in headers; under `strict`, reject the request."""
    facts, given = chosen.facts, request.__pydantic_fields_set__
    unused = [name for name in _UNUSED if name in given]
    if own is not None and own.stream and request.response_format in _TIMED:
        unused.append("stream")
    if own is not None and own.language and not (facts.takes_language or facts.language):
        unused.append("language")
    if request.prompt and not facts.takes_prompt:
        unused.append("prompt")
    if request.temperature and not facts.takes_temperature:
        unused.append("temperature")
    capabilities = Capabilities(chosen.engine, frozenset())
    inexact = () if chosen.is_exact else ("model",)
    strict = chosen.served.policy.strict
    await notes(exchange, request, Sampling(), capabilities, strict, inexact, unserved=unused)


async def _reply(
    exchange: Exchange,
    chosen: Chosen,
    recording: Recording,
    form: str,
    granularities: Sequence[str],
) -> Transcribed:
    """Send a plain reply."""
    async with chosen.transcriber.transcribe(recording) as arriving:
        segments = [one async for one in arriving]
    found = _transcribed(segments, recording, chosen.facts, granularities)
    size = 64 * len(segments) + sum(len(one.text) + 64 * len(one.words) for one in segments)
    body = await offload.run(size, body_of, found, form)
    await exchange.reply(200, body, TYPES.get(form, JSON))
    return found


async def _stream(
    exchange: Exchange,
    chosen: Chosen,
    recording: Recording,
    _form: str,
    granularities: Sequence[str],
) -> Transcribed:
    """Send the text as events, as it becomes known.

    Raises:
        LatimerError: an error occurred before the response started.
    """
    events, segments = TextStream(), list[Segment]()
    try:
        async with chosen.transcriber.transcribe(recording) as arriving:
            async for one in commented(exchange, arriving):
                segments.append(one)
                if event := events.feed(one.text):
                    if not exchange.started:
                        await exchange.start(200, EVENT_STREAM)
                    await exchange.chunk(event)
    except LatimerError as error:
        if not exchange.started:
            raise
        if exchange.record is not None:
            exchange.record.fail(error)
        await exchange.chunk(exchange.fault(error), more=False)
        return _transcribed(segments, recording, chosen.facts, granularities)
    found = _transcribed(segments, recording, chosen.facts, granularities)
    if not exchange.started:
        await exchange.start(200, EVENT_STREAM)
    await exchange.chunk(events.end(found) + DONE, more=False)
    return found


def _transcribed(
    segments: Sequence[Segment],
    recording: Recording,
    facts: TranscriberFacts,
    granularities: Sequence[str],
) -> Transcribed:
    spoken = next((one.language for one in segments if one.language), "")
    return Transcribed(
        segments,
        recording.seconds,
        spoken or recording.language or facts.language,
        recording.temperature,
        granularities,
        recording.translate,
    )


def _end(exchange: Exchange, found: Transcribed) -> None:
    """Note the tokens of a request that has succeeded."""
    read = sum(one.prompt_tokens for one in found.segments)
    written = sum(one.completion_tokens for one in found.segments)
    if exchange.lease is not None:
        exchange.lease.settle(read + written)
    if exchange.record is not None and not exchange.record.failed:
        exchange.record.succeed(read, written)
