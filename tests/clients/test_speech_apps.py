"""Requests of Open WebUI and LibreChat with their default settings for speech.

They are modelled on the sources of both, in 2026: Open WebUI's `routers/audio.py` and LibreChat's
`TTSService.js` and `STTService.js`. Neither sends a response format, so speech must be MP3.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.conformance.recordings import SENTENCE, spoken
from latimer.conformance.sounds import sound_of
from support.clients import client_of
from support.dictation import dictation
from support.engines.echo import Echo

SPEECH, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"
TEXT = "Two cats sat on the mat."
# The bodies of both apps, and the headers in which they differ from others.
SPOKEN: dict[str, dict[str, Any]] = {
    "Open WebUI": {"input": TEXT, "voice": "alloy", "model": "tts-1"},
    "Open WebUI with parameters": {
        "input": TEXT, "voice": "alloy", "model": "tts-1", "speed": 1.2, "lang_code": "a",
    },
    "LibreChat": {"input": TEXT, "model": "tts-1", "voice": "alloy", "backend": "piper"},
}  # fmt: skip
USER = {"X-OpenWebUI-User-Name": "Ann", "X-OpenWebUI-User-Role": "user"}
# The name and content type of the file, and the other fields of the form.
HEARD: dict[str, tuple[str, str, dict[str, str]]] = {
    "Open WebUI": ("0d9a2c1e.wav", "audio/wav", {"model": "whisper-1"}),
    "Open WebUI with a language": (
        "0d9a2c1e.mp3", "audio/mpeg", {"model": "whisper-1", "language": "en"},
    ),
    "LibreChat": ("audio.webm", "audio/webm", {"model": "whisper-1", "language": "en"}),
}  # fmt: skip


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of a server that speaks and transcribes; the apps name OpenAI's models."""
    app = OpenAIAdapter(Echo(), model_names=["demo"], **dictation())
    async with client_of(app) as made:
        yield made
    await app.aclose()


@pytest.mark.parametrize("app", SPOKEN)
async def test_speech(client: httpx2.AsyncClient, app: str) -> None:
    """The apps save what they get as MP3, or play it as `audio/mpeg`."""
    reply = await client.post(SPEECH, json=SPOKEN[app], headers=USER)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "audio/mpeg"
    assert sound_of(reply.content).container == "mp3"


async def test_pieces_of_a_long_text_are_joined(client: httpx2.AsyncClient) -> None:
    """LibreChat sends a text of 4,096 characters in pieces, and joins the MP3 files."""
    body = SPOKEN["LibreChat"]
    parts = [
        (await client.post(SPEECH, json={**body, "input": TEXT * count})).content
        for count in (4, 2)
    ]
    one, two = [sound_of(part).seconds for part in parts]
    assert sound_of(b"".join(parts)).seconds == pytest.approx(one + two)


@pytest.mark.parametrize("app", HEARD)
async def test_transcription(client: httpx2.AsyncClient, app: str) -> None:
    """The apps take the text of the object; the name of a file may be wrong."""
    name, kind, fields = HEARD[app]
    data = spoken("sentence.mp3" if name.endswith("mp3") else "sentence.wav")
    reply = await client.post(TRANSCRIPTIONS, files={"file": (name, data, kind)}, data=fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["text"] == SENTENCE


async def test_silence_is_an_error_that_is_shown(client: httpx2.AsyncClient) -> None:
    """Open WebUI shows the message of an error, which is an object."""
    files = {"file": ("empty.wav", b"RIFF", "audio/wav")}
    reply = await client.post(TRANSCRIPTIONS, files=files, data={"model": "whisper-1"})
    assert reply.status_code == 400
    assert "file" in reply.json()["error"]["message"]
