"""Decode a recording, in a process of its own that can be killed (`sandbox`).

A file may be made to take a decoder hours or gigabytes, or to crash it. This file is run as a
script. It reads the file that is its standard input, writes PCM to standard output (signed 16 bit,
little endian, mono), and imports nothing from Latimer. Its exit status is a reason of `REASONS`.
"""

from __future__ import annotations

import sys
import wave
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import IO, Any

RATE = 16_000
# Why a file has no samples, by the exit status.
REASONS = {
    10: "long", 11: "broken", 12: "silent", 13: "format", 14: "empty", 15: "heavy", 16: "rate",
}  # fmt: skip
_STATUS = {reason: status for status, reason in REASONS.items()}
# The rates that are decoded, in samples a second (`schemas/limits.py` has the reason).
LOWEST, HIGHEST = 1_000, 384_000

# The containers that are opened. Others can name further files and addresses, which FFmpeg would
# open as well (playlists and lists of parts).
_CONTAINERS = (
    "wav,w64,aiff,caf,au,mp3,flac,ogg,aac,ac3,amr,asf,mov,mp4,m4a,3gp,matroska,webm,mpeg,mpegts"
)


class Failed(Exception):
    """A file without samples, for a reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def main() -> None:
    """Decode standard input; the argument is the largest number of seconds."""
    most = int(float(sys.argv[1]) * RATE) * 2
    source = sys.stdin.buffer
    source.seek(0)
    size = 0
    try:
        for samples in decoded(source):
            size += len(samples)
            if size > most:
                raise Failed("long")
            sys.stdout.buffer.write(samples)
        if not size:
            raise Failed("empty")
    except Failed as failed:
        sys.exit(_STATUS[failed.reason])
    except MemoryError:
        sys.exit(_STATUS["heavy"])
    sys.stdout.buffer.flush()


def decoded(source: IO[bytes]) -> Iterator[bytes]:
    """Yield the samples of a file.

    Raises:
        Failed: it has none that can be read.
    """
    try:
        import av
    except ImportError:
        return _wave(source)
    return _av(av, source)


def read_plain(source: IO[bytes], most: int) -> bytes | None:
    """Return the samples of a WAV file that has them as they are wanted; None for other files.

    Args:
        most: the largest number of bytes to return.
    """
    source.seek(0)
    if source.read(4) != b"RIFF":
        return None
    source.seek(0)
    try:
        # Of a file, the module closes what it has opened only.
        file = wave.open(source, "rb")  # noqa: SIM115
        if file.getparams()[:3] != (1, 2, RATE):
            return None
        samples = file.readframes(most // 2)
    except (wave.Error, EOFError, RuntimeError):
        # The last one is raised for a chunk that is longer than the file.
        return None
    # A file that was cut may end within a sample.
    return samples[: len(samples) // 2 * 2] or None


def _av(av: Any, source: IO[bytes]) -> Iterator[bytes]:
    """Decode with FFmpeg, which skips what is damaged."""
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "pipe"}
    # PyAV 19 always accepts tags that are not UTF-8.
    lenient = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
    frames = damaged = 0
    try:
        with av.open(source, options=options, **lenient) as container:
            if not container.streams.audio:
                raise Failed("silent")
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
            for packet in container.demux(stream):
                try:
                    found = packet.decode()
                except av.error.InvalidDataError:
                    damaged += 1
                    continue
                for frame in found:
                    _check_rate(frame.sample_rate)
                    # Gaps and jumps in the times of frames are not filled with silence.
                    frame.pts = None
                    frames += 1
                    yield from map(_samples, resampler.resample(frame))
            if frames:
                yield from map(_samples, resampler.resample(None))
    except (Failed, MemoryError):
        raise
    except Exception as error:
        # What a broken file raises is not documented; what was decoded before it is kept.
        if not frames:
            raise Failed("broken") from error
    if not frames:
        raise Failed("broken" if damaged else "empty")


def _check_rate(rate: int) -> None:
    """Refuse a rate at which a small file would be hours, or which no recorder has."""
    if not LOWEST <= rate <= HIGHEST:
        raise Failed("rate")


def _samples(frame: Any) -> bytes:
    return bytes(frame.planes[0])[: frame.samples * 2]


def _wave(source: IO[bytes]) -> Iterator[bytes]:
    """Decode a WAV file with uncompressed samples, without other libraries."""
    if source.read(4) != b"RIFF":
        raise Failed("format")
    source.seek(0)
    try:
        file = wave.open(source, "rb")  # noqa: SIM115
    except (wave.Error, EOFError) as error:
        # Compressed samples, and the header of more than two channels.
        raise Failed("format" if "format" in str(error) else "broken") from error
    channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
    _check_rate(rate)
    if not 1 <= channels <= 32 or width not in (1, 2, 3, 4):
        raise Failed("broken")
    # A second of frames becomes a second of samples.
    while data := file.readframes(rate):
        count = len(data) // (channels * width)
        mono = _mixed(_as_16_bit(data[: count * channels * width], width), channels)
        found = resampled(mono, -(-count * RATE // rate), rate)
        if sys.byteorder == "big":
            found.byteswap()
        yield found.tobytes()


def _as_16_bit(data: bytes, width: int) -> array[int]:
    if width == 1:
        return array("h", [(byte - 128) << 8 for byte in data])
    if width > 2:
        # The two highest bytes of each number.
        high = bytearray(2 * (len(data) // width))
        high[0::2], high[1::2] = data[width - 2 :: width], data[width - 1 :: width]
        data = bytes(high)
    found = array("h", data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _mixed(samples: array[int], channels: int) -> Sequence[int]:
    if channels == 1:
        return samples
    each = [samples[index::channels] for index in range(channels)]
    return [sum(frame) // channels for frame in zip(*each, strict=True)]


def resampled(samples: Sequence[int], count: int, rate: int) -> array[int]:
    """Return samples at `RATE`: means of those at a higher rate, points between at a lower one.

    Args:
        count: the number of samples to return.
    """
    last = len(samples) - 1
    if last < 0 or rate == RATE:
        return array("h", samples)
    found = array("h")
    if rate > RATE:
        sums = [0, *accumulate(samples)]
        for index in range(count):
            begin = min(index * rate // RATE, last)
            end = min(max((index + 1) * rate // RATE, begin + 1), last + 1)
            found.append((sums[end] - sums[begin]) // (end - begin))
        return found
    for index in range(count):
        place, rest = divmod(index * rate, RATE)
        here, after = samples[min(place, last)], samples[min(place + 1, last)]
        found.append(here + (after - here) * rest // RATE)
    return found


if __name__ == "__main__":
    main()
