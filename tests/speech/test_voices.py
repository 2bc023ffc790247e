"""Tests of real voices: they speak, and a recogniser understands them."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.speech.base import Recording
from latimer.backends.speech.libraries import speaker_of, transcriber_of
from speech.conftest import TEXT
from support.audio import at_rate, decoded
from support.clients import client_of
from support.engines.echo import Echo


@pytest.fixture(scope="module", params=["piper", "sherpa-onnx"])
async def app(request: pytest.FixtureRequest, voice: Path, folder: Path) -> AsyncIterator[object]:
    """Return an adapter whose speaker has the packaged voice."""
    model = voice if request.param == "piper" else folder
    found = OpenAIAdapter(Echo(), speaker=speaker_of(f"{request.param}:{model}"), any_model=True)
    yield found
    await found.aclose()


async def spoken(app: object, **body: object) -> tuple[array[int], int]:
    """Return the samples of a reply, and how many a second has."""
    form = str(body.setdefault("response_format", "wav"))
    async with client_of(app) as client:
        client.timeout = 120
        given = {"model": "m", "voice": "alloy", "input": TEXT, **body}
        reply = await client.post("/v1/audio/speech", json=given)
        assert reply.status_code == 200, reply.text
        return decoded(reply.content, form)


@pytest.mark.parametrize("form", ["wav", "mp3", "opus", "aac", "flac", "pcm"])
async def test_a_voice_speaks(app: object, form: str) -> None:
    """The audio of two sentences lasts three to eight seconds, and is not silent."""
    samples, rate = await spoken(app, response_format=form)
    assert 3 < len(samples) / rate < 8
    assert max(samples) > 3_000


async def test_speed_changes_the_length(app: object) -> None:
    """At twice the speed it takes half of the time; a voice's own pauses differ a little."""
    usual, fast = (await spoken(app))[0], (await spoken(app, speed=2))[0]
    assert 0.4 < len(fast) / len(usual) < 0.6


async def test_a_recogniser_understands_a_voice(app: object) -> None:
    """Whisper, or PocketSphinx, hears most of the words."""
    samples, rate = await spoken(app)
    transcriber = transcriber_of("pocketsphinx")
    recording = Recording(at_rate(samples, rate, 16_000))
    async with transcriber.transcribe(recording) as segments:
        heard = "".join([one.text async for one in segments])
    await transcriber.aclose()
    words, expected = set(re.findall(r"\w+", heard.lower())), re.findall(r"\w+", TEXT.lower())
    assert sum(word in words for word in expected) / len(expected) >= 0.8, heard


async def test_the_voice_is_listed(app: object) -> None:
    """It has its name and its language, also in the list of models."""
    async with client_of(app) as client:
        voices = (await client.get("/v1/audio/voices")).json()["voices"]
        _, model = (await client.get("/v1/models")).json()["data"]
    assert {one["language"] for one in voices} == {"en"}
    assert model["voices"] == voices


async def test_a_text_of_signs_leaves_turns_to_others(voice: Path) -> None:
    """While thousands of signs are spoken, which takes minutes, another text has its turn."""
    app = OpenAIAdapter(Echo(), speaker=speaker_of(f"piper:{voice}"), any_model=True)
    await spoken(app, input="Yes.")
    long = asyncio.create_task(spoken(app, input="a = % # … " * 400, response_format="pcm"))
    await asyncio.sleep(0.5)
    start = time.monotonic()
    samples, rate = await spoken(app, input="Yes.")
    took = time.monotonic() - start
    assert len(samples) / rate < 3
    assert not long.done()
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    await app.aclose()
    # Two sentences of signs at most, on a busy machine.
    assert took < 30
