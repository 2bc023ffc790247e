"""Decode audio in tests, with FFmpeg."""

from __future__ import annotations

import io
from array import array

import av
from av.audio.resampler import AudioResampler
from latimer.adapter.audio.formats import PCM_RATE


def decoded(data: bytes, form: str) -> tuple[array[int], int]:
    """Return the samples of a file, and how many a second has."""
    samples = array("h")
    if form in ("pcm", "pcm16"):
        samples.frombytes(data)
        return samples, PCM_RATE
    rate = 0
    with av.open(io.BytesIO(data), "r") as container:
        resampler = AudioResampler(format="s16", layout="mono")
        for frame in container.decode(container.streams.audio[0]):
            rate = frame.sample_rate
            for one in resampler.resample(frame):
                samples.frombytes(bytes(one.planes[0])[: 2 * one.samples])
    return samples, rate


def at_rate(samples: array[int], rate: int, wanted: int) -> bytes:
    """Return samples at another rate."""
    frame = av.AudioFrame(format="s16", layout="mono", samples=len(samples), align=1)
    frame.planes[0].update(samples.tobytes())
    frame.sample_rate = rate
    resampler = AudioResampler(format="s16", layout="mono", rate=wanted)
    found = [*resampler.resample(frame), *resampler.resample(None)]
    return b"".join(bytes(one.planes[0])[: 2 * one.samples] for one in found)
