"""Speech in each format, decoded by programs that Latimer has no part in: ffmpeg and sox."""

from __future__ import annotations

import shutil
import subprocess
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.paced_speaker import PER_CHARACTER, PacedSpeaker

TEXT = "Two cats sat on the mat. A dog came in, and nobody was surprised. It was late."
# Samples a second of the voice.
RATE = 22_050
# The seconds of the text; the spaces between sentences are not spoken.
SECONDS = (len(TEXT) - 2) * PER_CHARACTER / RATE
# The rates at which a decoder finds each format, if the voice has 22,050 samples a second.
RATES = {"wav": RATE, "flac": RATE, "mp3": RATE, "aac": RATE, "opus": 48_000}


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of a server whose voice has 22,050 samples a second."""
    app = OpenAIAdapter(Echo(), any_model=True, speaker=PacedSpeaker(rate=RATE))
    async with client_of(app) as made:
        yield made
    await app.aclose()


async def _file(client: httpx2.AsyncClient, form: str, folder: Path, text: str) -> Path:
    body = {"model": "m", "voice": "alloy", "input": text, "response_format": form}
    reply = await client.post("/v1/audio/speech", json=body)
    assert reply.status_code == 200, reply.text
    path = folder / f"speech.{form}"
    path.write_bytes(reply.content)
    return path


def _run(*words: str) -> bytes:
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}: apt-get install {words[0]}")
    done = subprocess.run(words, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert not done.stderr, done.stderr.decode()[-500:]
    return done.stdout


@pytest.mark.parametrize("text", [TEXT, "Two cats sat on the mat."], ids=["streamed", "whole"])
@pytest.mark.parametrize("form", RATES)
async def test_ffmpeg(client: httpx2.AsyncClient, form: str, text: str, tmp_path: Path) -> None:
    """ffmpeg decodes each format without a complaint, at its rate and with the right length.

    MP3 and AAC have frames of silence at both ends, which belong to the formats.
    """
    path = await _file(client, form, tmp_path, text)
    show = ("-show_entries", "stream=sample_rate,channels", "-of", "csv=p=0")
    found = _run("ffprobe", "-v", "error", *show, str(path)).decode().split(",")
    assert [int(one) for one in found if one.strip()] == [RATES[form], 1]
    wave = ("-f", "s16le", "-ac", "1", "-ar", str(RATES[form]), "-")
    samples = array("h", _run("ffmpeg", "-v", "error", "-i", str(path), *wave))
    spaces = text.count(". ")
    seconds = (len(text) - spaces) * PER_CHARACTER / RATE
    assert len(samples) / RATES[form] == pytest.approx(seconds, abs=0.12)
    assert max(samples) > 1_000


@pytest.mark.parametrize("form", ["wav", "flac"])
async def test_sox(client: httpx2.AsyncClient, form: str, tmp_path: Path) -> None:
    """Sox reads the lossless formats, with the length that their heads state."""
    path = await _file(client, form, tmp_path, TEXT)
    raw = ("-t", "raw", "-e", "signed", "-b", "16", "-")
    # A wav file that is sent while it is spoken cannot state its length.
    quiet = ("-V1",)
    samples = _run("sox", *quiet, str(path), *raw)
    assert len(samples) / 2 / RATE == pytest.approx(SECONDS, abs=0.01)


async def test_pcm(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    """Samples have 24 kHz, also if the voice has another rate."""
    path = await _file(client, "pcm", tmp_path, TEXT)
    assert path.stat().st_size / 48_000 == pytest.approx(SECONDS, abs=0.01)
