"""Audio files that are made to crash a decoder, or to take its time or memory."""

from __future__ import annotations

import gzip
import io
import random
import struct
import zipfile
from collections.abc import Iterator, Mapping

import av
import numpy as np
from latimer.conformance.recordings import flac, samples, spoken

Files = Iterator[tuple[str, bytes]]
# Containers and codecs that FFmpeg writes, beyond the files of the conformance suite.
_WRITTEN: Mapping[str, tuple[str, str, int]] = {
    "ogg": ("ogg", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "m4a": ("mp4", "aac", 16_000),
    "aac": ("adts", "aac", 16_000),
}


def whole_files() -> dict[str, bytes]:
    """Return a good file of each kind, with the sentence of the conformance suite."""
    made = {name: _written(*how) for name, how in _WRITTEN.items()}
    return {"wav": spoken(), "mp3": spoken("sentence.mp3"), "flac": flac(), **made}


def _written(container: str, codec: str, rate: int) -> bytes:
    file = io.BytesIO()
    values = np.array([samples()], dtype=np.int16)
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        assert isinstance(stream, av.AudioStream)
        resampler = av.AudioResampler(stream.format.name, "mono", rate, stream.frame_size or None)
        frame = av.AudioFrame.from_ndarray(values, format="s16", layout="mono")
        frame.sample_rate = 16_000
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def hostile_files() -> Files:
    """Yield the files, each with a name."""
    good = whole_files()
    yield from _broken(good)
    yield from _claims()
    yield from _long()
    yield from _others()


def _broken(good: Mapping[str, bytes]) -> Files:
    """Yield good files that were cut, mutated or mixed."""
    rng = random.Random(7)
    heads = {name: data[:64] for name, data in good.items()}
    for name, data in good.items():
        for share in (0.02, 0.3, 0.9):
            yield f"{name} cut at {share}", data[: int(len(data) * share)]
        for number, count in enumerate((1, 20, 400)):
            changed = bytearray(data)
            for _ in range(count):
                changed[rng.randrange(len(data))] = rng.randrange(256)
            yield f"{name} with {count} other bytes ({number})", bytes(changed)
        changed = bytearray(data)
        for at in rng.sample(range(min(len(data), 200)), 24):
            changed[at] = rng.choice((0, 255))
        yield f"{name} with another head", bytes(changed)
        yield f"{name} without a head", bytes(64) + data[64:]
        other = rng.choice([one for one in good if one != name])
        yield f"{name} with the head of {other}", heads[other] + data[64:]
        yield f"{name} twice", data + data
        yield f"{name}, only its head", heads[name]


def _claims() -> Files:
    """Yield files that state sizes, rates and numbers that they do not have."""
    wav = spoken()
    for what, at, value in (
        ("4 GB of samples", 40, b"\xf0\xff\xff\xff"),
        ("no samples", 40, bytes(4)),
        ("a format of 4 GB", 16, b"\xf0\xff\xff\xff"),
        ("65,535 channels", 22, b"\xff\xff"),
        ("no channels", 22, bytes(2)),
        ("4 GHz", 24, b"\xff\xff\xff\xff"),
        ("no rate", 24, bytes(4)),
        ("1 Hz", 24, b"\x01\x00\x00\x00"),
        ("no block size", 32, bytes(2)),
        ("255 bits", 34, b"\xff\x00"),
        ("a codec of its own", 20, b"\x50\x00"),
    ):
        yield f"wav that states {what}", wav[:at] + value + wav[at + len(value) :]
    yield "wav of 50,000 lists", wav[:12] + b"LIST\x00\x00\x00\x00" * 50_000 + wav[12:]
    data = flac()
    yield "flac that states 2^36 samples", data[:21] + b"\xff" * 5 + data[26:]
    yield "flac that states 1 Hz", data[:18] + b"\x00\x00\x10" + data[21:]
    yield "flac with a picture of 16 MB", b"fLaC\x06\xff\xff\xff" + bytes(1000)
    yield (
        "mp4 with a box of 2^63 bytes",
        (
            b"\x00\x00\x00\x18ftypM4A \x00\x00\x00\x00M4A mp42\x00\x00\x00\x01moov"
            + b"\x7f"
            + bytes(7)
        ),
    )
    boxes = b"".join(struct.pack(">I4s", 8 * (999 - n), b"moov") for n in range(999))
    yield "mp4 of nested boxes", b"\x00\x00\x00\x10ftypM4A \x00\x00\x00\x00" + boxes
    yield "webm that states 2^56 bytes", b"\x1aE\xdf\xa3\x01" + b"\xff" * 7 + bytes(100)
    yield "mp3 with a tag of 256 MB", b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f" + bytes(1000)


def _long() -> Files:
    """Yield small files with hours of sound."""
    # A constant block of 65,535 samples at 8 kHz takes 15 bytes.
    yield "flac of hours of silence", _silence(8_000)
    yield "opus of hours without packets", _pages()
    # 72 ms in 72 bytes: MPEG 2.5, layer III, 8 kbit/s, 8 kHz, mono.
    yield "mp3 of more than an hour", (b"\xff\xe3\x18\xc4" + bytes(68)) * 52_000
    wav = spoken()
    yield "wav of an hour at 1 kHz", (
        wav[:24] + struct.pack("<IIHHI", 1_000, 1_000, 1, 8, 0)[:12] + b"data\xff\xff\xff\xff"
        + b"\x80" * 4_000_000
    )  # fmt: skip


def _silence(blocks: int) -> bytes:
    from latimer.conformance.recordings import _crc

    rate = 8_000
    info = struct.pack(">HH", 65_535, 65_535) + bytes(6) + ((rate << 44) | (15 << 36)).to_bytes(8)
    frames = []
    for number in range(blocks):
        coded = bytes((number,)) if number < 128 else chr(number).encode("utf-8", "surrogatepass")
        head = b"\xff\xf8\x74\x08" + coded + struct.pack(">H", 65_534)
        head += bytes((_crc(head, 8, 0x07),))
        body = head + b"\x00\x00\x00"
        frames.append(body + _crc(body, 16, 0x8005).to_bytes(2))
    return b"fLaC\x80\x00\x00\x22" + info + bytes(16) + b"".join(frames)


def _pages() -> bytes:
    """Return Ogg pages of Opus packets of one byte, each of which is 20 ms, without an end."""
    head = b"OpusHead\x01\x01\x00\x00\x80\xbb\x00\x00\x00\x00\x00"
    tags = b"OpusTags" + bytes(8)
    file = _page(0, 2, 0, (head,)) + _page(1, 0, 0, (tags,))
    packets = (b"\x08",) * 255
    return file + b"".join(_page(n, 0, n * 255 * 960, packets) for n in range(2, 1200))


def _page(number: int, flags: int, position: int, packets: tuple[bytes, ...]) -> bytes:
    lacing = bytes(len(one) for one in packets)
    head = struct.pack("<4sBBqIII", b"OggS", 0, flags, position, 7, number, 0)
    page = head + bytes((len(lacing),)) + lacing + b"".join(packets)
    return page[:22] + struct.pack("<I", _ogg_crc(page)) + page[26:]


def _ogg_crc(data: bytes) -> int:
    value = 0
    for byte in data:
        value ^= byte << 24
        for _ in range(8):
            value = ((value << 1) ^ (0x04C11DB7 if value >> 31 else 0)) & 0xFFFFFFFF
    return value


def _others() -> Files:
    """Yield files that are no audio: archives, lists of other files, noise."""
    rng = random.Random(11)
    for number, size in enumerate((1, 3, 17, 100, 5_000, 100_000)):
        yield f"noise {number}", rng.randbytes(size)
    for name, magic in (("RIFF", b"RIFF"), ("Ogg", b"OggS"), ("ID3", b"ID3"), ("FLAC", b"fLaC")):
        yield f"noise after {name}", magic + rng.randbytes(20_000)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("sound.wav", bytes(50 << 20))
    yield "a zip of 50 MB", archive.getvalue()
    yield "a gzip of 50 MB", gzip.compress(bytes(50 << 20))
    yield "a list of streams", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    yield "a list of files", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield "a session", b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n"
    yield "a playlist of XML", b'<?xml version="1.0"?><playlist><location>file:///etc/passwd'
    yield "a picture", b"\x89PNG\r\n\x1a\n" + rng.randbytes(500)
    yield "zeros", bytes(1 << 20)
