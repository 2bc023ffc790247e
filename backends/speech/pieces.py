"""Cut a long recording at its quietest places, for transcribers that take short ones; WAV files."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

from .base import TRANSCRIBED_RATE

# Samples of a frame whose loudness is measured, and the distance of those that are looked at.
_FRAME, _STEP = TRANSCRIBED_RATE // 20, 4
# The share of a piece at its end in which it may be cut.
_SHARE = 0.3
# A size in the header of a WAV file that is not known yet.
_UNKNOWN = 0xFFFFFFFF


def cut(samples: bytes, seconds: float) -> Iterator[bytes]:
    """Yield a recording in pieces of at most some seconds.

    A piece ends in the middle of the quietest twentieth of a second of its last third, where a word
    rarely is.

    Args:
        samples: signed 16 bit, little endian, mono, at `TRANSCRIBED_RATE`.
    """
    most = int(seconds * TRANSCRIBED_RATE) * 2
    start = 0
    while len(samples) - start > most:
        least = start + int(most * (1 - _SHARE)) // 2 * 2
        end = least + _quietest(samples[least : start + most])
        yield samples[start:end]
        start = end
    yield samples[start:]


def _quietest(part: bytes) -> int:
    """Return the offset of the middle of the quietest frame, in bytes."""
    values = array("h", part)
    if sys.byteorder == "big":
        values.byteswap()
    frames = range(0, len(values) - _FRAME + 1, _FRAME)
    if not frames:
        return len(part)
    loudness = [sum(map(abs, values[begin : begin + _FRAME : _STEP])) for begin in frames]
    return 2 * (frames[loudness.index(min(loudness))] + _FRAME // 2)


def wav_header(rate: int, size: int | None = None) -> bytes:
    """Return the header of a WAV file: 16 bit, mono.

    Args:
        size: bytes of samples; None if they are not known yet.
    """
    whole, data = (_UNKNOWN, _UNKNOWN) if size is None else (36 + size, size)
    numbers = (16, 4), (1, 2), (1, 2), (rate, 4), (2 * rate, 4), (2, 2), (16, 2)
    form = b"".join(number.to_bytes(width, "little") for number, width in numbers)
    head = b"RIFF" + whole.to_bytes(4, "little") + b"WAVEfmt " + form
    return head + b"data" + data.to_bytes(4, "little")


def wav_of(samples: bytes) -> bytes:
    """Return samples for a transcriber as a WAV file."""
    return wav_header(TRANSCRIBED_RATE, len(samples)) + samples


def joined(before: str, text: str) -> str:
    """Return the text of a piece as it follows the text before it.

    A space is between them, unless the script has none between words.
    """
    text = text.lstrip()
    if not before or not text or _has_no_spaces(before[-1]) or _has_no_spaces(text[0]):
        return text
    return f" {text}"


def _has_no_spaces(character: str) -> bool:
    """Return True for the scripts of Chinese and Japanese, with their punctuation, and Thai."""
    return (
        "\u3000" <= character <= "\u9fff"
        or "\uff00" <= character <= "\uffef"
        or ("\u0e00" <= character <= "\u0eff")
    )
