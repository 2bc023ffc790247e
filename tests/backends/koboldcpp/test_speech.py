"""Tests of koboldcpp's speech over a recorded one, or a live one if there is one, and a fake."""

from __future__ import annotations

import asyncio
import io
import os
import wave
from collections.abc import AsyncIterator
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.audio.formats import Encoder
from latimer.adapter.engines import describe
from latimer.backends.errors import EngineError, EngineUnavailable, LatimerError
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.koboldcpp.speech import read_wav, speaker_at
from latimer.backends.queue import Ticket
from latimer.backends.speech.base import Pcm, Speaker, Utterance
from support.clients import client_of
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.replay import SPEECH, Replay, replaying

SAMPLES = bytes(range(200)) * 24
HELLO = Utterance("Hello.", "kobo")


def wav(samples: bytes = SAMPLES, rate: int = 24_000, channels: int = 1, width: int = 2) -> bytes:
    """Return a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(samples)
    return file.getvalue()


@pytest.fixture
async def fake() -> AsyncIterator[FakeKoboldcpp]:
    """Return a fake koboldcpp that speaks."""
    async with FakeKoboldcpp(version={"tts": True}, wav=wav()) as found:
        yield found


@pytest.fixture
async def recorded() -> AsyncIterator[KoboldCpp]:
    """Return a backend over a recorded koboldcpp that speaks noise, or over a live one."""
    live = os.environ.get("LATIMER_KOBOLDCPP_SPEECH_URL")
    if live:
        backend = KoboldCpp(live)
        yield backend
        await backend.aclose()
        return
    with replaying(Replay(SPEECH)) as (address, replay):
        backend = KoboldCpp(address)
        yield backend
        await backend.aclose()
        assert not replay.unknown


async def test_koboldcpp_speaks(recorded: KoboldCpp) -> None:
    """A real koboldcpp lists its voices, and sends a WAV file of 16 bits at 24 kHz."""
    speaker = await recorded.speaker()
    assert speaker is not None
    facts = await speaker.facts()
    names = ["kobo", "cheery", "sleepy", "shouty", "chatty", "random", "instruct"]
    assert [voice.name for voice in facts.voices] == names
    (pcm,) = await spoken(speaker)
    assert (pcm.rate, len(pcm.samples)) == (24_000, 2 * 31_200)


@pytest.fixture
async def speaker(fake: FakeKoboldcpp) -> AsyncIterator[Speaker]:
    """Return the speaker of a backend."""
    backend = KoboldCpp(fake.url)
    found = await backend.speaker()
    assert found is not None
    yield found
    await backend.aclose()


async def spoken(speaker: Speaker, utterance: Utterance = HELLO) -> list[Pcm]:
    """Return the pieces of an utterance."""
    async with speaker.speak(utterance) as pieces:
        return [piece async for piece in pieces]


async def test_the_voices_are_those_that_it_lists(speaker: Speaker) -> None:
    """The first is the default; instructions may have no effect."""
    facts = await speaker.facts()
    names = ["kobo", "cheery", "sleepy", "shouty", "chatty", "random", "instruct"]
    assert [voice.name for voice in facts.voices] == names
    assert facts.inexact == {"instructions"}


async def test_a_text_is_one_piece(fake: FakeKoboldcpp, speaker: Speaker) -> None:
    """The samples are those of the WAV file; the same text has the same seed each time."""
    assert await spoken(speaker) == [Pcm(SAMPLES, 24_000)]
    assert fake.spoken == [{"input": "Hello.", "voice": "kobo", "seed": 1}]


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("[sadly] Hello.", "(sadly] Hello."), ("Hello [there].", "Hello [there]."),
        (" a\0b ", "a b"),
    ],
)  # fmt: skip
async def test_a_text_is_never_an_instruction(
    fake: FakeKoboldcpp, speaker: Speaker, text: str, sent: str
) -> None:
    """Brackets at the beginning would be taken for one, and a null character for the end."""
    await spoken(speaker, Utterance(text, "kobo", instructions="Slowly\0."))
    assert fake.spoken == [{"input": sent, "voice": "kobo", "seed": 1, "instruction": "Slowly ."}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "failed to speak"), (b"<html>", "invalid WAV"), (wav()[:30], "invalid WAV"),
        (wav(channels=2), "2 channels of 16 bits"), (wav(width=1), "1 channels of 8 bits"),
        (wav(rate=100), "at 100 Hz"),
    ],
)  # fmt: skip
async def test_a_reply_that_is_no_audio_is_an_error(
    fake: FakeKoboldcpp, speaker: Speaker, data: bytes, message: str
) -> None:
    """koboldcpp answers 200 with an empty body when it has failed."""
    fake.wav = data
    with pytest.raises(EngineError, match=message):
        await spoken(speaker)
    fake.wav = wav()
    assert await spoken(speaker)


async def test_a_busy_server_is_asked_again(fake: FakeKoboldcpp, speaker: Speaker) -> None:
    """A 503 means that other clients fill its queue."""
    fake.refusals = 2
    assert await spoken(speaker)
    assert len(fake.spoken) == 3


async def test_a_cancelled_text_keeps_its_turn(fake: FakeKoboldcpp, speaker: Speaker) -> None:
    """koboldcpp cannot stop, so the next text waits until it has ended; no task is left."""
    fake.may_speak.clear()
    first = asyncio.create_task(spoken(speaker))
    while not fake.spoken:
        await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(spoken(speaker, Utterance("Second.", "kobo", ticket=Ticket())))
    await asyncio.sleep(0.05)
    assert len(fake.spoken) == 1
    fake.may_speak.set()
    assert await second
    assert [one["input"] for one in fake.spoken] == ["Hello.", "Second."]


async def test_a_server_without_a_model_that_speaks(fake: FakeKoboldcpp) -> None:
    """The backend has no speaker then, and an address as speaker says what to do."""
    fake.version["tts"] = False
    backend = KoboldCpp(fake.url)
    assert await backend.speaker() is None
    await backend.aclose()
    speaker = speaker_at(fake.url)
    with pytest.raises(EngineUnavailable, match="--ttsmodel"):
        await speaker.facts()
    await speaker.aclose()


async def test_a_server_that_only_speaks() -> None:
    """A koboldcpp at an address needs no model for text."""
    async with FakeKoboldcpp(version={"tts": True, "llm": False}, wav=wav()) as fake:
        speaker = speaker_at(fake.url)
        assert await spoken(speaker) == [Pcm(SAMPLES, 24_000)]
        await speaker.aclose()


@pytest.mark.parametrize("voices", [(), (3,)])
async def test_wrong_lists_of_voices(fake: FakeKoboldcpp, voices: Any) -> None:
    """A list without names is an error of the engine."""
    fake.voices = voices
    speaker = speaker_at(fake.url)
    with pytest.raises(LatimerError, match="invalid response for /v1/audio/voices"):
        await speaker.facts()
    await speaker.aclose()


async def test_the_endpoint_uses_the_speech_of_the_engine(fake: FakeKoboldcpp) -> None:
    """`/v1/audio/speech` needs no other speaker, and the model lists its voices."""
    backend = KoboldCpp(fake.url)
    body = {"model": "m", "voice": "alloy", "input": "Hi. Ho.", "response_format": "wav"}
    async with client_of(OpenAIAdapter(backend, any_model=True)) as client:
        reply = await client.post("/v1/audio/speech", json={**body, "instructions": "Whisper."})
        assert reply.headers["x-latimer-inexact"] == "instructions, voice"
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in model["voices"]][:2] == ["kobo", "cheery"]
        assert model["architecture"]["output_modalities"] == ["text", "audio"]
        reply = await client.post("/v1/audio/speech", json=body)
        assert reply.headers["x-latimer-inexact"] == "voice"
        assert reply.content == Encoder("wav", 24_000).feed(2 * SAMPLES)
        fake.wav = b""
        empty = await client.post("/v1/audio/speech", json=body)
        assert (empty.status_code, empty.json()["error"]["code"]) == (502, "engine_error")
    await backend.aclose()


async def test_check_names_the_speech_of_the_engine(fake: FakeKoboldcpp) -> None:
    """The rows of `latimer check` have the voices of an engine that speaks."""
    backend = KoboldCpp(fake.url)
    error, rows = await describe(backend)
    assert error is None
    assert dict(rows)["own speech"] == "7 voices"
    await backend.aclose()


def test_a_wav_file_is_read() -> None:
    """Its rate is kept."""
    assert read_wav(wav(rate=44_100)).rate == 44_100
