"""Tests of the suite's own reading and writing of audio files."""

from __future__ import annotations

import pytest
from latimer.adapter.audio.formats import Encoder
from latimer.conformance.check import Fail
from latimer.conformance.recordings import RATE, at_rate, flac, form, options, samples, spoken, wav
from latimer.conformance.sounds import sound_of
from support.audio import decoded

SECONDS = len(samples()) / RATE
DATA = b"".join(value.to_bytes(2, "little", signed=True) for value in samples())


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "streamed"])
@pytest.mark.parametrize("container", ["wav", "mp3", "opus", "aac", "flac"])
def test_lengths(container: str, is_whole: bool) -> None:
    """The container and the length of a file are found without a decoder."""
    encoder = Encoder(container, RATE, is_whole)  # type: ignore[arg-type]
    found = sound_of(encoder.feed(DATA) + encoder.end())
    assert found.container == container
    # Lossy formats have whole frames, and silence before and after the sound.
    assert found.seconds == pytest.approx(SECONDS, abs=0.3)
    assert found.seconds >= SECONDS - 0.01


@pytest.mark.parametrize(
    "data",
    [
        b"", b"words", b"RIFF", spoken()[:30], spoken()[:-100], b"ID3", b"OggS" + bytes(90),
        b"\xff\xf3" + bytes(9), b"\xff\xf1" + bytes(9), b"fLaC" + bytes(30),
        b"\xff\xfb\xf0" + bytes(9), b"\xff\xf1\x34" + bytes(9),
    ],
)  # fmt: skip
def test_broken_files(data: bytes) -> None:
    """A broken file is a failure of the check, and not an error of the suite."""
    with pytest.raises(Fail):
        sound_of(data)


def _headed(riff: int, samples: int) -> bytes:
    """Return the sentence as a WAVE file that states these sizes."""
    data = spoken()
    return data[:4] + riff.to_bytes(4, "little") + data[8:40] + samples.to_bytes(
        4, "little") + data[44:]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        wav(samples(), width=3), _headed(0xFFFFFFFF, 0xFFFFFFFF), _headed(0, 0),
        # What espeak-ng and SoX write into a pipe.
        _headed(0x7FFFF024, 0x7FFFF000),
    ],
    ids=["24 bits", "largest sizes", "no sizes", "sizes of 2 GB"],
)  # fmt: skip
def test_wave_files_of_other_programs(data: bytes) -> None:
    """A WAVE file may have samples of any width, and any of the sizes of a stream."""
    assert sound_of(data).seconds == pytest.approx(SECONDS, abs=0.01)


@pytest.mark.parametrize(
    ("data", "rate"),
    [
        (flac(), 16_000),
        (spoken("sentence.mp3"), 16_000),
        (wav(at_rate(8_000), 8_000, 2), 8_000),
        (wav(at_rate(48_000), 48_000), 48_000),
        (wav(samples(), width=3), 16_000),
    ],
    ids=["flac", "mp3", "8 kHz", "48 kHz", "24 bit"],
)
def test_recordings(data: bytes, rate: int) -> None:
    """FFmpeg reads each recording that the suite sends, at its rate and with its length."""
    values, found = decoded(data, "file")
    assert found == rate
    assert len(values) / rate == pytest.approx(SECONDS, abs=0.11)
    assert max(values) > 5_000


def test_flac_is_lossless() -> None:
    """The samples of the FLAC file are those of the WAV file."""
    assert decoded(flac(), "flac")[0].tobytes() == DATA


def test_options_of_curl() -> None:
    """A form is repeated by the names of its parts."""
    body = form(("file", ("a.wav", b"\r\n--x")), ("model", "m"))
    assert options(body) == ["-F", "file=@a.wav", "-F", "model=m"]
