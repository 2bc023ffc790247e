"""The official `openai` client speaks, transcribes, and chats with audio."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from clients.conftest import strict
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import LlamaCpp
from latimer.conformance.recordings import SENTENCE, flac, spoken
from latimer.conformance.sounds import sound_of
from openai import AsyncOpenAI, OpenAI
from support.dictation import SEGMENTS, WORD, dictation
from support.engines.paced_speaker import PER_CHARACTER
from support.servers import serving

TEXT = "Two cats sat on the mat. A dog came in."
# The seconds of the spoken text.
SECONDS = len(TEXT) * PER_CHARACTER / 24_000
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
FORMATS: Any = ["mp3", "opus", "aac", "flac", "wav"]
END = SEGMENTS[-1].end


@pytest.fixture(scope="module")
def audio_url() -> Iterator[str]:
    """Serve the demo model with a speaker and a transcriber."""
    with serving(lambda: OpenAIAdapter(LlamaCpp(), model_names=["demo"], **dictation())) as url:
        yield url


@pytest.fixture
def audio_sdk(audio_url: str) -> Iterator[OpenAI]:
    """Yield a client of it, which repeats no request."""
    with strict(audio_url, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("form", FORMATS)
def test_speech(audio_sdk: OpenAI, form: Any) -> None:
    """Speech in each format is a file of that format, as long as the text."""
    reply = audio_sdk.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format=form
    )
    sound = sound_of(reply.read())
    assert sound.container == form
    assert sound.seconds == pytest.approx(SECONDS, abs=0.15)


def test_speech_by_default(audio_sdk: OpenAI, tmp_path: Path) -> None:
    """The example of the SDK's documentation saves an MP3 file while it arrives."""
    path = tmp_path / "speech.mp3"
    with audio_sdk.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="coral", input=TEXT, instructions="Speak cheerfully."
    ) as reply:
        reply.stream_to_file(path)
    assert sound_of(path.read_bytes()).container == "mp3"


def test_speech_in_pieces(audio_sdk: OpenAI) -> None:
    """Samples are read in pieces while they are spoken."""
    with audio_sdk.audio.speech.with_streaming_response.create(
        model="tts-1", voice={"id": "alloy"}, input=TEXT, response_format="pcm"
    ) as reply:
        data = b"".join(reply.iter_bytes(4096))
    assert len(data) / 48_000 == pytest.approx(SECONDS, abs=0.06)


def test_speech_events(audio_sdk: OpenAI) -> None:
    """Streamed speech is events that the SDK iterates over as server-sent events."""
    with audio_sdk.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=TEXT, response_format="wav", stream_format="sse"
    ) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    assert '"speech.audio.done"' in lines[-1]
    assert all('"speech.audio.delta"' in line for line in lines[:-1])


def test_speech_errors(audio_sdk: OpenAI) -> None:
    """An invalid request is the SDK's error, with the name of the field."""
    for fields in ({"input": ""}, {"voice": "nobody"}, {"speed": 9.0}):
        full: Any = {"model": "tts-1", "voice": "alloy", "input": TEXT, **fields}
        with pytest.raises(openai.BadRequestError) as found:
            audio_sdk.audio.speech.create(**full)
        assert found.value.param == next(iter(fields))


def test_transcription(audio_sdk: OpenAI) -> None:
    """A transcription has the text and the seconds."""
    file = ("sentence.wav", spoken())
    found = audio_sdk.audio.transcriptions.create(model="whisper-1", file=file)
    assert found.text == SENTENCE
    assert found.usage is not None
    assert found.usage.type == "duration"
    assert found.usage.seconds == 2


@pytest.mark.parametrize("form", ["text", "srt", "vtt"])
def test_transcription_as_text(audio_sdk: OpenAI, form: Literal["text", "srt", "vtt"]) -> None:
    """The formats of text are strings."""
    found = audio_sdk.audio.transcriptions.create(
        model="whisper-1", file=io.BytesIO(flac()), response_format=form, language="en"
    )
    text = str(found)
    first = {"text": SENTENCE, "srt": "1\n00:00:00,000 --> ", "vtt": "WEBVTT\n\n00:00:00.000 --> "}
    assert text.startswith(first[form])


def test_transcription_verbose(audio_sdk: OpenAI) -> None:
    """A verbose transcription has segments and words with their times."""
    found = audio_sdk.audio.transcriptions.create(
        model="whisper-1", file=("sentence.mp3", spoken("sentence.mp3")),
        response_format="verbose_json", timestamp_granularities=["word", "segment"], prompt="cat",
    )  # fmt: skip
    assert found.language == "english"
    assert found.segments is not None
    assert found.words is not None
    assert [one.end for one in found.segments] == pytest.approx([0.68, 1.4])
    assert [one.start for one in found.words] == pytest.approx([WORD * at for at in range(6)])


def test_transcription_stream(audio_sdk: OpenAI) -> None:
    """A streamed transcription has deltas, which are joined the whole text."""
    stream = audio_sdk.audio.transcriptions.create(
        model="gpt-4o-transcribe", file=("sentence.wav", spoken()), stream=True, temperature=0.0,
        chunking_strategy="auto", include=["logprobs"],
    )  # fmt: skip
    events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    last = events[-1]
    assert last.type == "transcript.text.done"
    assert "".join(deltas) == last.text == SENTENCE
    assert len(deltas) == 2


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_translation(audio_sdk: OpenAI) -> None:
    """A translation has English text, and its verbose form has segments."""
    file = ("sentence.wav", spoken())
    found = audio_sdk.audio.translations.create(model="whisper-1", file=file)
    assert found.text == SENTENCE
    more = audio_sdk.audio.translations.create(
        model="whisper-1", file=file, response_format="verbose_json"
    )
    assert more.segments is not None
    assert len(more.segments) == 2


def test_transcription_errors(audio_sdk: OpenAI) -> None:
    """A file without audio is the SDK's error of a bad request."""
    with pytest.raises(openai.BadRequestError, match="file"):
        audio_sdk.audio.transcriptions.create(model="whisper-1", file=("words.mp3", b"No. " * 99))


async def test_async(audio_url: str) -> None:
    """The asynchronous client speaks and transcribes its own speech."""
    async with AsyncOpenAI(base_url=f"{audio_url}/v1", api_key="x") as client:
        async with client.audio.speech.with_streaming_response.create(
            model="tts-1", voice="alloy", input=TEXT, response_format="opus"
        ) as reply:
            data = b"".join([chunk async for chunk in reply.iter_bytes()])
        found = await client.audio.transcriptions.create(model="whisper-1", file=("a.ogg", data))
    assert found.text == SENTENCE


def test_spoken_chat(audio_sdk: OpenAI) -> None:
    """A spoken answer has a file and its transcript, and its id continues the conversation."""
    reply = audio_sdk.chat.completions.create(
        model="demo", messages=ASK, temperature=0, modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    )  # fmt: skip
    message = reply.choices[0].message
    assert message.content is None
    assert message.audio is not None
    assert message.audio.transcript == ANSWER
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert file.getnframes() == len(ANSWER) * PER_CHARACTER
    follow: Any = {"role": "assistant", "audio": {"id": message.audio.id}}
    again = audio_sdk.chat.completions.create(
        model="demo", temperature=0, messages=[*ASK, follow, *ASK], max_tokens=8
    )
    written: Any = {"role": "assistant", "content": ANSWER}
    same = audio_sdk.chat.completions.create(
        model="demo", temperature=0, messages=[*ASK, written, *ASK], max_tokens=8
    )
    assert again.choices[0].message.content == same.choices[0].message.content
    assert again.usage is not None
    assert same.usage is not None
    assert again.usage.prompt_tokens == same.usage.prompt_tokens


def test_spoken_stream(audio_sdk: OpenAI) -> None:
    """A spoken stream has a transcript and samples, which clients join."""
    stream = audio_sdk.chat.completions.create(
        model="demo", messages=ASK, temperature=0, modalities=["text", "audio"], stream=True,
        audio={"voice": "alloy", "format": "pcm16"},
    )  # fmt: skip
    transcript, data = "", b""
    for chunk in stream:
        for choice in chunk.choices:
            audio = getattr(choice.delta, "audio", None)
            transcript += getattr(audio, "transcript", None) or ""
            data += base64.b64decode(getattr(audio, "data", None) or "")
    assert transcript == ANSWER
    assert len(data) == 2 * PER_CHARACTER * len(ANSWER)
