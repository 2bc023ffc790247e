"""Tests of the encoders; FFmpeg decodes what they write."""

from __future__ import annotations

import io
import math
import wave
from array import array
from itertools import pairwise
from typing import get_args

import av
import pytest
from latimer.adapter.audio import formats
from latimer.adapter.audio.formats import PCM_RATE, AudioFormat, Encoder, check_format
from latimer.adapter.errors import InvalidRequest
from support.audio import decoded

FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
RATES = (16_000, 22_050, 24_000, 44_100)
# Seconds that a format may add: frames of a fixed length, and what an encoder needs before them.
PADDING = 0.13


def tone(rate: int, seconds: float = 1.0, pitch: float = 440.0) -> bytes:
    """Return a tone at a third of the loudest."""
    step = math.tau * pitch / rate
    wave_form = (int(10_000 * math.sin(step * at)) for at in range(int(rate * seconds)))
    return array("h", wave_form).tobytes()


def encoded(
    form: AudioFormat, rate: int, samples: bytes, is_whole: bool, step: int = 9_002
) -> bytes:
    """Return the file of samples that arrive in pieces."""
    encoder = Encoder(form, rate, is_whole)
    parts = [encoder.feed(samples[at : at + step]) for at in range(0, len(samples), step)]
    assert is_whole is not any(parts)
    return b"".join(parts) + encoder.end()


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_decoder_gets_the_same_tone(form: AudioFormat, rate: int, is_whole: bool) -> None:
    """Every format decodes to the length, the pitch and the loudness of what was encoded."""
    data = encoded(form, rate, tone(rate), is_whole)
    samples, found = decoded(data, form)
    assert found == {"opus": 48_000, "pcm": PCM_RATE, "pcm16": PCM_RATE}.get(form, rate)
    assert 0.999 <= len(samples) / found <= 1 + PADDING
    middle = samples[found // 4 : 3 * found // 4]
    rises = sum(a < 0 <= b for a, b in pairwise(middle))
    assert abs(rises / 0.5 - 440) < 5
    assert 8_000 < max(middle) < 12_500


@pytest.mark.parametrize("form", FORMATS)
def test_pieces_of_any_size_make_the_same_file(form: AudioFormat) -> None:
    """A file does not depend on the pieces of its samples, except in the serial number of Ogg."""
    samples = tone(22_050, 0.5)
    first = encoded(form, 22_050, samples, False, step=2_500)
    second = encoded(form, 22_050, samples, False, step=22_050)
    assert decoded(first, form) == decoded(second, form)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "flac"])
def test_bytes_follow_their_samples_soon(form: AudioFormat) -> None:
    """After a second of samples, at least half of it has been written."""
    encoder = Encoder(form, 24_000)
    first = b"".join(encoder.feed(tone(24_000, 0.1)) for _ in range(10))
    samples, rate = decoded(first, form)
    assert len(samples) / rate > 0.5


def test_the_sizes_of_a_wav_file() -> None:
    """A complete file has its sizes; one that is sent while it is spoken has the largest."""
    samples = tone(16_000, 0.25)
    with wave.open(io.BytesIO(encoded("wav", 16_000, samples, True))) as file:
        assert file.getparams()[:4] == (1, 2, 16_000, 4_000)
        assert file.readframes(4_000) == samples
    head = encoded("wav", 16_000, samples, False)[:44]
    assert head[4:8] == head[40:44] == b"\xff\xff\xff\xff"


def test_pcm_at_its_own_rate_is_unchanged() -> None:
    """Samples at 24 kHz need no encoder."""
    samples = tone(PCM_RATE, 0.1)
    assert encoded("pcm", PCM_RATE, samples, False) == encoded("pcm16", PCM_RATE, samples, True)
    assert encoded("pcm", PCM_RATE, samples, False) == samples


@pytest.mark.parametrize("form", FORMATS)
def test_no_samples(form: AudioFormat) -> None:
    """A file without samples raises no error."""
    assert len(Encoder(form, 24_000).end()) < 100


def test_formats_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `av`, the error names the field and what works; wav and 24 kHz pcm still do."""
    monkeypatch.setattr(formats, "has_encoders", lambda: False)
    for form in ("mp3", "opus", "aac", "flac"):
        with pytest.raises(InvalidRequest, match="'wav'") as caught:
            check_format(form, "audio.format")
        assert (caught.value.param, caught.value.code) == ("audio.format", "unsupported_value")
    with pytest.raises(InvalidRequest, match="'response_format' does not support 'pcm'"):
        Encoder("pcm", 22_050)
    assert Encoder("pcm", PCM_RATE).feed(b"ab") == b"ab"
    assert Encoder("wav", 8_000).feed(b"ab").endswith(b"ab")


def test_av_says_its_version() -> None:
    """The encoders that the table names are in the installed FFmpeg."""
    for kind in formats._KINDS.values():
        if kind.codec:
            assert av.codec.Codec(kind.codec, "w").type == "audio"
