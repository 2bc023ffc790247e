"""Tests of koboldcpp's transcription over a fake with the replies of koboldcpp 1.115.1."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.errors import EngineError, EngineUnavailable
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.koboldcpp.transcription import transcriber_at
from latimer.backends.speech.base import Recording, Segment, Transcriber
from support.clients import client_of
from support.engines.koboldcpp import FakeKoboldcpp
from support.sounds import HELLO, tone

SAMPLES = HELLO[44:]
T = "/v1/audio/transcriptions"


@pytest.fixture
async def fake() -> AsyncIterator[FakeKoboldcpp]:
    """Return a fake koboldcpp that hears."""
    async with FakeKoboldcpp(version={"transcribe": True}, hears=[" Hello.\n", " Bye."]) as found:
        yield found


@pytest.fixture
async def transcriber(fake: FakeKoboldcpp) -> AsyncIterator[Transcriber]:
    """Return the transcriber of a backend."""
    backend = KoboldCpp(fake.url)
    found = await backend.transcriber()
    assert found is not None
    yield found
    await backend.aclose()


async def heard(transcriber: Transcriber, recording: Recording) -> list[Segment]:
    """Return the segments of a recording."""
    async with transcriber.transcribe(recording) as segments:
        return [one async for one in segments]


async def test_the_call(fake: FakeKoboldcpp, transcriber: Transcriber) -> None:
    """The engine gets a WAV file in base64, the language and the prompt; the text has no times."""
    (found,) = await heard(transcriber, Recording(SAMPLES, "de", "Latimer"))
    assert (found.text, found.start, found.language) == ("Hello.", None, "de")
    (body,) = fake.heard
    assert base64.b64decode(body["audio_data"]) == HELLO
    assert (body["langcode"], body["prompt"]) == ("de", "Latimer")
    facts = await transcriber.facts()
    assert not facts.has_segments
    assert not facts.translates


async def test_long_recordings_are_cut(fake: FakeKoboldcpp, transcriber: Transcriber) -> None:
    """Half a minute at most is in a call: the engine cuts longer ones within words."""
    found = await heard(transcriber, Recording(tone(10) * 4))
    assert "".join(one.text for one in found) == "Hello. Bye."
    sizes = [len(base64.b64decode(one["audio_data"])) - 44 for one in fake.heard]
    assert sum(sizes) == 40 * 32_000
    assert max(sizes) <= 30 * 32_000
    assert fake.heard[0]["langcode"] == "auto"


@pytest.mark.parametrize(("seconds", "calls"), [(0.05, 0), (0.2, 1), (0.9, 1)])
async def test_short_recordings_are_continued(
    fake: FakeKoboldcpp, transcriber: Transcriber, seconds: float, calls: int
) -> None:
    """The engine hears nothing in a second or less, so a word alone is followed by silence."""
    samples = tone(seconds)
    found = await heard(transcriber, Recording(samples))
    assert [one.text for one in found] == ["Hello."] * calls
    for call in fake.heard:
        data = base64.b64decode(call["audio_data"])[44:]
        assert data == samples + bytes(48_000 - len(samples))


async def test_an_empty_text_is_a_failure_unless_it_counts(
    fake: FakeKoboldcpp, transcriber: Transcriber
) -> None:
    """Silence is an empty text; so are the engine's failures, which it does not count."""
    fake.hears = ["", None]
    assert "".join(one.text for one in await heard(transcriber, Recording(SAMPLES))) == ""
    with pytest.raises(EngineError, match="failed to transcribe"):
        await heard(transcriber, Recording(SAMPLES))


async def test_a_busy_engine_is_waited_for(fake: FakeKoboldcpp, transcriber: Transcriber) -> None:
    """While other clients fill its queue, the call is sent again."""
    fake.refusals = 2
    (found,) = await heard(transcriber, Recording(SAMPLES))
    assert found.text == "Hello."


async def test_a_client_that_leaves_keeps_the_turn_until_the_call_ends(
    fake: FakeKoboldcpp, transcriber: Transcriber
) -> None:
    """The engine cannot be stopped, so the next call waits for the one that is left."""
    fake.may_hear.clear()
    first = asyncio.create_task(heard(transcriber, Recording(SAMPLES)))
    await asyncio.sleep(0.1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(heard(transcriber, Recording(SAMPLES)))
    await asyncio.sleep(0.1)
    # The call of the first client is all that the engine has got.
    assert len(fake.heard) == 1
    fake.may_hear.set()
    (found,) = await second
    assert found.text == "Bye."


async def test_without_a_whisper_model() -> None:
    """A koboldcpp without one has no transcriber; at a URL, the error says what to do."""
    async with FakeKoboldcpp() as fake:
        backend = KoboldCpp(fake.url)
        assert await backend.transcriber() is None
        await backend.aclose()
        own = transcriber_at(fake.url)
        with pytest.raises(EngineUnavailable, match="--whispermodel"):
            await own.facts()
        await own.aclose()


async def test_without_a_text_model() -> None:
    """A koboldcpp at a URL needs nothing but a Whisper model."""
    version = {"transcribe": True, "llm": False}
    async with FakeKoboldcpp(version=version, hears=["Hello."]) as fake:
        own = transcriber_at(fake.url)
        (found,) = await heard(own, Recording(SAMPLES))
        await own.aclose()
    assert found.text == "Hello."


async def test_over_http(fake: FakeKoboldcpp) -> None:
    """A request reaches the engine; formats with times, and translations, are refused."""
    app = OpenAIAdapter(KoboldCpp(fake.url))
    async with client_of(app) as client:

        async def send(path: str = T, **fields: str) -> tuple[int, dict[str, object]]:
            data = {"model": "whisper-1", **fields}
            reply = await client.post(path, data=data, files={"file": HELLO})
            return reply.status_code, reply.json()

        status, body = await send()
        assert (status, body["text"]) == (200, "Hello.")
        status, body = await send(response_format="srt")
        assert status == 400
        status, body = await send("/v1/audio/translations")
        assert status == 404
    await app.aclose()
