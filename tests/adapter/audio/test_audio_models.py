"""Tests of the server's speaker and transcriber in `/v1/models`, and of keys that may use them."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import KeyConfig, digest_of
from latimer.backends.speech.pieces import wav_of
from latimer.backends.speech.process import LibraryTranscriber
from latimer.backends.speech.speaking import LibrarySpeaker
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.listener import Listener
from support.engines.speaker import Tone

VOICES = [
    {"id": "anna", "name": "anna", "language": "en"},
    {"id": "bela", "name": "bela", "language": "hu"},
    {"id": "carl", "name": "carl", "language": ""},
]
SPEECH = {"input": "Hi.", "voice": "anna", "response_format": "wav"}
FILE = {"file": ("a.wav", wav_of(bytes(3_200)))}


def app_of(**options: Any) -> OpenAIAdapter:
    """Return an adapter with one model, a speaker and a transcriber."""
    given = {"model_names": ["chat"], "speaker": Tone(), "transcriber": Listener(), **options}
    return OpenAIAdapter(Echo(), **given)


async def test_both_are_listed_last() -> None:
    """Each has its name and modalities, and the speaker its voices; each is found by its name."""
    async with client_of(app_of()) as client:
        chat, tone, listener = (await client.get("/v1/models")).json()["data"]
        for one in (chat, tone, listener):
            assert (await client.get(f"/v1/models/{one['id']}")).json() == one
        anthropic = {"anthropic-version": "2023-06-01"}
        pages = (await client.get("/v1/models", headers=anthropic)).json()["data"]
    assert [one["id"] for one in pages] == ["chat"]
    assert chat["architecture"]["output_modalities"] == ["text", "audio"]
    assert "voices" not in chat
    head = {"object": "model", "created": tone["created"], "owned_by": "latimer"}
    assert tone == {
        "id": "tone",
        **head,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["audio"]},
        "capabilities": ["speech"],
        "voices": VOICES,
    }
    assert listener == {
        "id": "listener",
        **head,
        "architecture": {"input_modalities": ["audio"], "output_modalities": ["text"]},
        "capabilities": ["transcription", "translation"],
    }


async def test_a_model_keeps_its_name() -> None:
    """A model that has the name of the speaker is listed once, as the model that it is."""
    async with client_of(app_of(model_names=["tone"])) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["tone", "listener"]
        assert listed[0]["context_length"] > 0
        assert (await client.get("/v1/models/tone")).json() == listed[0]


async def test_a_list_loads_nothing() -> None:
    """Neither library starts; a request by another name does not start one, either."""
    speaker = LibrarySpeaker("piper", "/voices/anna.onnx")
    transcriber = LibraryTranscriber("faster-whisper", "org/large-v3")
    async with client_of(app_of(speaker=speaker, transcriber=transcriber)) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        for name in ("piper:anna", "faster-whisper:large-v3"):
            assert (await client.get(f"/v1/models/{name}")).status_code == 200
        other = await client.post("/v1/audio/speech", json={**SPEECH, "model": "other"})
        assert other.status_code == 404
    assert [one["id"] for one in listed] == ["chat", "piper:anna", "faster-whisper:large-v3"]
    assert "voices" not in listed[1]
    assert (speaker._process, transcriber._process) == (None, None)


async def test_a_voice_of_a_hub_has_the_name_of_its_repository() -> None:
    """The folder of a commit in the cache has no name that means anything."""
    folder = "/cache/models--csukuangfj--vits-ljs/snapshots/0f2a"
    assert LibrarySpeaker("sherpa-onnx", folder).known().name == "sherpa-onnx:vits-ljs"


async def test_chat_says_what_they_are_for() -> None:
    """A chat with one of them is a 404 that names its path."""
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    async with client_of(app_of()) as client:
        for name, path in (("tone", "speech"), ("listener", "transcriptions")):
            reply = await client.post("/v1/chat/completions", json={**body, "model": name})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (404, "model_not_found")
            assert f"It is for /v1/audio/{path} only." in error["message"]


async def test_an_unknown_model_of_audio() -> None:
    """The error names the speaker or the transcriber, unless the key may not use it."""
    async with client_of(app_of()) as client:
        speech = await client.post("/v1/audio/speech", json={**SPEECH, "model": "other"})
        data = {"model": "other"}
        heard = await client.post("/v1/audio/transcriptions", files=FILE, data=data)
    for reply, name in ((speech, "tone"), (heard, "listener")):
        assert f" For this path, it is '{name}'. This server has: chat." in reply.text
    async with client_of(app_of(keys=KEYS)) as client:
        client.headers["authorization"] = "Bearer sk-chat"
        reply = await client.post("/v1/audio/speech", json={**SPEECH, "model": "other"})
        assert "tone" not in reply.text


KEYS = {
    "all": KeyConfig(digest=digest_of("sk-all")),
    "chat": KeyConfig(digest=digest_of("sk-chat"), models=["chat"]),
    "audio": KeyConfig(digest=digest_of("sk-audio"), models=["tone", "listener"]),
}


@pytest.mark.parametrize(
    ("key", "listed"),
    [
        ("sk-all", ["chat", "tone", "listener"]),
        ("sk-chat", ["chat"]),
        ("sk-audio", ["tone", "listener"]),
    ],
)
async def test_keys_use_what_they_see(key: str, listed: list[str]) -> None:
    """A name that is listed for a key works with it; another one is a 404, at each path."""
    async with client_of(app_of(keys=KEYS)) as client:
        client.headers["authorization"] = f"Bearer {key}"
        found = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in found] == listed
        for name in ("tone", "listener"):
            expected = 200 if name in listed else 404
            one = await client.get(f"/v1/models/{name}")
            assert one.status_code == expected
            assert (await _used(client, name)).status_code == expected
        # A key that may use a model may have it speak.
        speech = await client.post("/v1/audio/speech", json={**SPEECH, "model": "chat"})
        assert speech.status_code == (200 if "chat" in listed else 404)


async def _used(client: httpx2.AsyncClient, name: str) -> httpx2.Response:
    """Return the reply to a request for the speaker or the transcriber."""
    if name == "tone":
        return await client.post("/v1/audio/speech", json={**SPEECH, "model": name})
    return await client.post("/v1/audio/transcriptions", files=FILE, data={"model": name})
