"""Tests of decoding: any format, with and without FFmpeg, and files that are made to do harm."""

from __future__ import annotations

import asyncio
import io
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest
from latimer.adapter.audio import decoder
from latimer.adapter.audio.recording import decoded
from latimer.adapter.errors import InvalidRequest
from latimer.schemas import limits
from support.leaving import closes, leave_at
from support.sounds import HELLO, RATE, tone, wav

SECONDS = 1.5
# The containers and codecs of formats that clients send.
FORMATS = {
    "mp3": ("mp3", "libmp3lame"),
    "flac": ("flac", "flac"),
    "opus": ("ogg", "libopus"),
    "m4a": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
    "aac": ("adts", "aac"),
}


def encoded(container: str, codec: str, rate: int = 48_000) -> bytes:
    """Return a tone in a format."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame(format="s16", layout="mono", samples=int(SECONDS * rate))
        frame.sample_rate = rate
        frame.planes[0].update(tone(SECONDS, rate))
        resampler = av.AudioResampler(stream.format, stream.layout, rate, stream.frame_size or None)
        for one in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(one))
        file.mux(stream.encode(None))
    return out.getvalue()


async def heard(data: bytes, most: float | None = None) -> bytes:
    """Return the samples of a file."""
    with tempfile.SpooledTemporaryFile() as file:
        file.write(data)
        return await decoded(file, "file", most)


async def refusal(data: bytes, most: float | None = None) -> str:
    """Return the message of the error for a file."""
    with pytest.raises(InvalidRequest) as caught:
        await heard(data, most)
    assert (caught.value.param, caught.value.status) == ("file", 400)
    return caught.value.message


def hertz(samples: bytes) -> float:
    """Return the frequency of a tone, by its changes of sign."""
    values = array("h", samples)
    changes = sum((a < 0) != (b < 0) for a, b in pairwise(values))
    return changes * RATE / len(values) / 2


@pytest.mark.parametrize("name", FORMATS)
async def test_formats(name: str) -> None:
    """A tone has its length and its frequency in each format, from any rate."""
    samples = await heard(encoded(*FORMATS[name]))
    assert len(samples) / 2 / RATE == pytest.approx(SECONDS, abs=0.1)
    assert hertz(samples) == pytest.approx(440, rel=0.03)


WAVES = [(8_000, 2, 2), (48_000, 1, 2), (44_100, 2, 3), (16_000, 1, 1), (22_050, 1, 4)]


@pytest.mark.parametrize(("rate", "channels", "width"), WAVES)
async def test_wav_files(rate: int, channels: int, width: int) -> None:
    """WAV files of every width are the same tone, and with the standard library alone, too."""
    data = wav(tone(SECONDS, rate, channels), rate, channels, width)
    alone = b"".join(decoder._wave(io.BytesIO(data)))
    for samples in (await heard(data), alone):
        assert len(samples) / 2 / RATE == pytest.approx(SECONDS, abs=0.01)
        assert hertz(samples) == pytest.approx(440, rel=0.01)
        loudest = max(map(abs, array("h", samples)))
        assert loudest == pytest.approx(12_000, rel=0.05)


async def test_a_wav_file_as_it_is_wanted() -> None:
    """The samples of such a file are not changed; a byte of a cut sample is dropped."""
    assert await heard(HELLO) == HELLO[44:]
    assert await heard(HELLO[:-1]) == HELLO[44:-2]
    endless = HELLO[:40] + b"\xff\xff\xff\xff" + HELLO[44:-1]
    assert len(await heard(endless)) % 2 == 0


def test_without_ffmpeg(tmp_path: Path) -> None:
    """Without the extra, WAV is read, and the status of another format says that it is not."""
    (tmp_path / "av.py").write_text("raise ImportError")
    script = str(Path(decoder.__file__))
    for data, status in ((wav(tone(1, 8_000), 8_000), 0), (encoded("flac", "flac"), 13)):
        file = tmp_path / "sound"
        file.write_bytes(data)
        with file.open("rb") as source:
            done = subprocess.run(
                [sys.executable, script, "60"], stdin=source, capture_output=True,
                env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
            )  # fmt: skip
        assert done.returncode == status
        assert len(done.stdout) == (0 if status else 2 * RATE)


async def test_without_ffmpeg_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator learns what to install."""
    monkeypatch.setattr("latimer.adapter.audio.recording.find_spec", lambda _name: None)
    said = await refusal(b"garbage" * 99)
    assert "run pip install '.[transcription]' in a clone of Latimer." in said


async def test_long_recordings() -> None:
    """A recording that is too long is refused, also if its file is small."""
    long = encoded("flac", "flac")
    for data in (HELLO, long):
        assert "at most 1 s" in await refusal(data, most=1)


RATES = [(1, 16), (999, 16), (1_000, 0), (384_000, 0), (384_001, 16)]


@pytest.mark.parametrize(("rate", "status"), RATES)
async def test_rates_that_no_recording_has(rate: int, status: int) -> None:
    """A small file that states such a rate could be hours: WAV, with FFmpeg or not, or another."""
    assert limits.SOUND_RATE.maximum == decoder.HIGHEST
    data = wav(tone(0.1), rate)
    if not status:
        assert await heard(data)
        assert list(decoder._wave(io.BytesIO(data)))
        return
    assert "fewer than 1,000 or more than 384,000 samples a second" in await refusal(data)
    with pytest.raises(decoder.Failed) as caught:
        list(decoder._wave(io.BytesIO(data)))
    assert decoder.REASONS[status] == caught.value.reason == "rate"
    sound = struct.pack(">4s5I", b".snd", 24, 3_200, 3, rate, 1) + bytes(3_200)
    assert "samples a second" in await refusal(sound)


async def test_videos_without_sound() -> None:
    """A file without sound is refused as such."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream: Any = file.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        file.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        file.mux(stream.encode(None))
    assert "no sound" in await refusal(out.getvalue())
    assert "no sound" in await refusal(wav(b"", 8_000))


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{path}'\n",
        "[playlist]\nFile1={path}\n",
    ],
)
async def test_playlists_open_no_files(tmp_path: Path, text: str) -> None:
    """A file that names others is not followed: no file of the server, and no address."""
    other = tmp_path / "other.wav"
    other.write_bytes(HELLO)
    assert "cannot be decoded" in await refusal(text.format(path=other).encode() + b" " * 500)


def broken_files() -> list[bytes]:
    """Return files that are cut, changed at random, or declare more than they have."""
    rng = random.Random(39)
    whole = [encoded(*FORMATS[name]) for name in ("mp3", "flac", "opus", "m4a", "webm")]
    whole.append(wav(tone(1, 44_100, 2), 44_100, 2))
    found = []
    for data in whole:
        found += [data[: rng.randrange(1, len(data))] for _ in range(2)]
        for share in (0.001, 0.01, 0.2):
            changed = bytearray(data)
            for _ in range(int(len(data) * share) + 1):
                changed[rng.randrange(len(data))] = rng.randrange(256)
            found.append(bytes(changed))
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 2**32 - 1, b"WAVE", b"fmt ", 16, 1, 1,
                       1, 2, 2, 16, b"data", 2**32 - 1)  # fmt: skip
    return [*found, head + bytes(99), head[:20], b"\0", b"OggS" * 999, b"ID3" + b"\xff" * 9_999]


@pytest.mark.slow
async def test_broken_files() -> None:
    """A broken file is heard as far as it goes, or refused with a 400; never anything else."""
    for data in broken_files():
        try:
            samples = await heard(data, most=30)
        except InvalidRequest:
            continue
        assert 0 < len(samples) <= 30 * 2 * RATE


async def test_a_client_that_leaves_kills_the_decoder() -> None:
    """A cancelled caller does not wait for the decoder, which ends."""
    data = encoded("flac", "flac", 8_000)
    task = asyncio.create_task(heard(data))
    await asyncio.sleep(0.02)
    begin = time.monotonic()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert time.monotonic() - begin < 1
    assert task.cancelled()


async def test_a_client_that_leaves_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves when the file for its samples was just opened leaves it closed."""
    with tempfile.TemporaryFile() as file:
        file.write(b"no sound")
        await closes(await leave_at(monkeypatch, os, "open", decoded(file, "file")))
