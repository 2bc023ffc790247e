"""Recordings for tests: tones in any format."""

from __future__ import annotations

import io
import math
import wave
from array import array

RATE = 16_000


def tone(seconds: float, rate: int = RATE, channels: int = 1, hertz: float = 440.0) -> bytes:
    """Return a tone as samples of 16 bits, the same in all channels."""
    factor = 2 * math.pi * hertz / rate
    each = [round(12_000 * math.sin(factor * index)) for index in range(int(seconds * rate))]
    return array("h", [value for value in each for _ in range(channels)]).tobytes()


def wav(samples: bytes, rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    """Return samples of 16 bits as a WAV file with another width."""
    if width == 1:
        samples = bytes((value >> 8) + 128 for value in array("h", samples))
    elif width > 2:
        pad = bytes(width - 2)
        samples = b"".join(pad + samples[at : at + 2] for at in range(0, len(samples), 2))
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples)
    return out.getvalue()


HELLO = wav(tone(1.5))
