"""A spoken sentence to transcribe, in several formats, and forms that send it.

`sentence.wav` and `sentence.mp3` were made with Debian's flite 2.2 and its voice rms:

    flite -voice rms -t "The cat sat on the chair." sentence.wav
"""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

SENTENCE = "The cat sat on the chair."
RATE = 16_000
BOUNDARY = "conformance-of-openai-7c2a"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
# The name of a part, and its text, or the name of a file and its bytes.
Part: TypeAlias = tuple[str, str | tuple[str, bytes]]
_BLOCK = 4096


@cache
def spoken(name: str = "sentence.wav") -> bytes:
    """Return the sentence as a file: mono, 16 kHz."""
    return Path(__file__).with_name(name).read_bytes()


@cache
def samples() -> Sequence[int]:
    """Return the samples of the sentence."""
    with wave.open(io.BytesIO(spoken())) as file:
        data = file.readframes(file.getnframes())
    return struct.unpack(f"<{len(data) // 2}h", data)


def wav(values: Sequence[int], rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    """Return samples of 16 bits as a RIFF file.

    Args:
        channels: each has the same samples.
        width: bytes of a sample in the file.
    """
    shift = 8 * (width - 2)
    data = b"".join((value << shift).to_bytes(width, "little", signed=True) * channels
                    for value in values)  # fmt: skip
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, width, rate, 0, "NONE", ""))
        out.writeframes(data)
    return file.getvalue()


def at_rate(rate: int) -> list[int]:
    """Return the samples of the sentence at a rate that divides 16 kHz, or is a multiple of it."""
    values = samples()
    if rate < RATE:
        step = RATE // rate
        return [sum(values[at : at + step]) // step for at in range(0, len(values), step)]
    times = rate // RATE
    following = (*values[1:], values[-1])
    return [
        value + (after - value) * part // times
        for value, after in zip(values, following, strict=True)
        for part in range(times)
    ]


@cache
def flac() -> bytes:
    """Return the sentence as a FLAC file of verbatim blocks (RFC 9639)."""
    values = samples()
    sizes = struct.pack(">HH", _BLOCK, _BLOCK) + bytes(6)
    # The rate in 20 bits, channels less 1 in 3, bits of a sample less 1 in 5, samples in 36.
    stream = sizes + ((RATE << 44) | (15 << 36) | len(values)).to_bytes(8)
    # The digest may be zeros.
    info = stream + bytes(16)
    blocks = [values[at : at + _BLOCK] for at in range(0, len(values), _BLOCK)]
    frames = b"".join(_frame(number, block) for number, block in enumerate(blocks))
    return b"fLaC\x80" + len(info).to_bytes(3) + info + frames


def _frame(number: int, block: Sequence[int]) -> bytes:
    # A fixed size of blocks; the size of this one in 16 bits; 16 kHz; mono of 16 bits.
    head = bytes((0xFF, 0xF8, 0x75, 0x08, number)) + struct.pack(">H", len(block) - 1)
    head += bytes((_crc(head, 8, 0x07),))
    body = head + b"\x02" + struct.pack(f">{len(block)}h", *block)
    return body + _crc(body, 16, 0x8005).to_bytes(2)


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    mask, value = (1 << bits) - 1, 0
    table = _table(bits, polynomial)
    for byte in data:
        value = (value << 8) & mask ^ table[(value >> (bits - 8)) ^ byte]
    return value


@cache
def _table(bits: int, polynomial: int) -> Sequence[int]:
    mask, found = (1 << bits) - 1, []
    for byte in range(256):
        value = byte << (bits - 8)
        for _ in range(8):
            value = (value << 1) ^ (polynomial if value >> (bits - 1) else 0)
            value &= mask
        found.append(value)
    return found


def form(*parts: Part) -> bytes:
    """Return the body of a form."""
    lines = bytearray()
    for name, value in parts:
        more = "" if isinstance(value, str) else f'; filename="{value[0]}"'
        lines += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n'.encode()
        lines += b"" if isinstance(value, str) else b"Content-Type: application/octet-stream\r\n"
        lines += b"\r\n" + (value.encode() if isinstance(value, str) else value[1]) + b"\r\n"
    return bytes(lines) + f"--{BOUNDARY}--\r\n".encode()


def options(body: bytes) -> list[str]:
    """Return curl's options that send a form, of the parts in its body."""
    found: list[str] = []
    for part in body.split(f"--{BOUNDARY}".encode())[1:-1]:
        head, _, value = part.strip(b"\r\n").partition(b"\r\n\r\n")
        words = head.decode(errors="replace").split('"')
        is_file = len(words) > 3
        found += ["-F", f"{words[1]}=@{words[3]}" if is_file else f"{words[1]}={value.decode()}"]
    return found
