"""Audio files in replies: their container by their bytes, and their length without a decoder."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .check import Fail, expect

# A streamed RIFF file states 0 or at least this size, because its length is unknown.
UNKNOWN = 0x7FFFF000
# kbit/s of an MPEG layer III frame, by the index in its header: MPEG 1, and MPEG 2 and 2.5.
_KILOBITS = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_MPEG_RATES = (44_100, 48_000, 32_000)
_AAC_RATES = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000,
              11_025, 8_000, 7_350)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sound:
    """An audio file.

    Args:
        container: wav, mp3, flac, opus or aac.
        seconds: its length.
        samples: the samples of a wav file.
    """

    container: str
    seconds: float
    samples: bytes = b""


def sound_of(data: bytes) -> Sound:
    """Return the kind and length of a file; raise `Fail` unless it is an audio file."""
    readers = [read for begins, read in _CONTAINERS if data.startswith(begins)]
    if data[:1] == b"\xff" and len(data) > 1:
        readers = [_aac if data[1] & 0xF6 == 0xF0 else _mp3]
    for read in readers:
        try:
            return read(data)
        except (struct.error, IndexError, ValueError) as error:
            raise Fail(f"expected an audio file, but got a broken one: {error!r}") from None
    raise Fail(f"expected an audio file, but got {data[:40]!r}")


def _unknown(size: int) -> bool:
    """Return True if a size is one of a stream."""
    return size == 0 or size >= UNKNOWN


def _wav(data: bytes) -> Sound:
    """Read a RIFF file: PCM or floats, whose sizes are true or those of a stream."""
    expect(data[8:12] == b"WAVE", f"expected a WAVE file, but got {data[:16]!r}")
    stated = struct.unpack_from("<I", data, 4)[0]
    at, rate, width = 12, 0, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        at += 8
        if name == b"fmt ":
            kind, channels, rate, _, width, bits = struct.unpack_from("<HHIIHH", data, at)
            fine = kind in (1, 3, 0xFFFE) and channels in (1, 2) and width == channels * bits // 8
            expect(fine, f"expected PCM, but got format {kind}, {channels} x {bits} bits")
        if name == b"data":
            expect(rate and width, "expected a format before the samples, but got none")
            samples = data[at:] if _unknown(size) else data[at : at + size]
            true = _unknown(size) or len(samples) == size
            true = true and (_unknown(stated) or stated == len(data) - 8)
            expect(true, f"expected true sizes, but got {stated} and {size} of {len(data)} bytes")
            return Sound("wav", len(samples) / (rate * width), samples)
        at += size + size % 2
    raise Fail("expected a WAVE file with samples, but got none")


def _mp3(data: bytes) -> Sound:
    """Count the frames of MPEG layer III, after an ID3 tag."""
    at, seconds = 0, 0.0
    if data.startswith(b"ID3"):
        at = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0),
                                                                   strict=True))  # fmt: skip
    while at + 4 <= len(data) and data[at : at + 3] != b"TAG":
        head = data[at : at + 4]
        sync, version, layer = (head[0] << 3) | (head[1] >> 5), (head[1] >> 3) & 3, head[1] & 6
        expect(sync == 0x7FF and version != 1 and layer == 2,
               f"expected an MP3 frame, but got {head!r} at byte {at}")  # fmt: skip
        kilobits = _KILOBITS[version != 3][head[2] >> 4]
        rate = _MPEG_RATES[(head[2] >> 2) & 3] >> {3: 0, 2: 1, 0: 2}[version]
        samples = 1152 if version == 3 else 576
        expect(kilobits, "expected MP3 frames with a bitrate, but got one without")
        at += samples // 8 * kilobits * 1000 // rate + ((head[2] >> 1) & 1)
        seconds += samples / rate
    return Sound("mp3", seconds)


def _aac(data: bytes) -> Sound:
    """Count the frames of AAC in ADTS."""
    at, seconds = 0, 0.0
    while at + 7 <= len(data):
        head = data[at : at + 7]
        expect(head[0] == 0xFF and head[1] & 0xF6 == 0xF0,
               f"expected an ADTS frame, but got {head!r} at byte {at}")  # fmt: skip
        size = ((head[3] & 3) << 11) | (head[4] << 3) | (head[5] >> 5)
        seconds += 1024 / _AAC_RATES[(head[2] >> 2) & 15]
        expect(size >= 7, f"expected an ADTS frame, but got one of {size} bytes")
        at += size
    return Sound("aac", seconds)


def _flac(data: bytes) -> Sound:
    """Read the number of samples; a streamed file states none, and counts by its last frame."""
    bits = int.from_bytes(data[18:26])
    rate, count = bits >> 44, bits & ((1 << 36) - 1)
    expect(data[4] & 0x7F == 0 and rate, "expected a FLAC file with a STREAMINFO, but got none")
    if not count:
        count = _frames(data) * int.from_bytes(data[10:12])
    return Sound("flac", count / rate)


def _frames(data: bytes) -> int:
    """Return the number of FLAC frames, by the numbers in their headers."""
    count, at = 0, data.find(b"\xff\xf8")
    while at >= 0:
        first = data[at + 4] if at + 4 < len(data) else 0xFF
        if first < 0x80:
            number = first
        elif 0xC0 <= first < 0xE0 and at + 5 < len(data):
            number = ((first & 0x1F) << 6) | (data[at + 5] & 0x3F)
        else:
            number = -1
        count += number == count
        at = data.find(b"\xff\xf8", at + 2)
    return count


def _ogg(data: bytes) -> Sound:
    """Read the position of the last page; Opus counts 48,000 samples a second."""
    expect(b"OpusHead" in data[:64], f"expected Opus in Ogg, but got {data[:64]!r}")
    skipped = struct.unpack_from("<H", data, data.index(b"OpusHead") + 10)[0]
    at, end = 0, 0
    while at + 27 <= len(data):
        expect(data[at : at + 4] == b"OggS", f"expected a page of Ogg at byte {at}, but got none")
        end = max(end, struct.unpack_from("<q", data, at + 6)[0])
        lacing = data[at + 27 : at + 27 + data[at + 26]]
        at += 27 + len(lacing) + sum(lacing)
    return Sound("opus", (end - skipped) / 48_000)


_CONTAINERS = ((b"RIFF", _wav), (b"ID3", _mp3), (b"fLaC", _flac), (b"OggS", _ogg))
