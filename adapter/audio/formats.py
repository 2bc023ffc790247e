"""The formats of spoken audio, and their encoders.

`wav` needs no library. The others need `av` (FFmpeg), which the extra `speech` has; `pcm` needs it
only for speakers with another rate than its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ...backends import offload
from ...backends.speech.pieces import wav_header
from ..errors import InvalidRequest

if TYPE_CHECKING:
    import av
    from av.audio.resampler import AudioResampler

AudioFormat: TypeAlias = Literal["wav", "mp3", "flac", "opus", "aac", "pcm", "pcm16"]

# Samples a second of `pcm` and `pcm16` (contract, sections 1.2 and 2).
PCM_RATE = 24_000
# Bytes of samples that are encoded at once: each call holds the interpreter lock for a moment.
_STEP = 8_192
# Bytes of samples for each turn in a thread: about a second.
_TURN = 49_152


@dataclass(frozen=True, slots=True)
class _Kind:
    """A row of the table of formats.

    Args:
        media_type: the `content-type` of its files.
        container, codec: the names of FFmpeg's muxer and encoder; empty without FFmpeg.
        rates: the rates that the encoder takes; empty for all.
        bits: bits a second; 0 for an encoder without loss.
        options: of the muxer, for a file that is sent while it is written.
    """

    media_type: bytes
    container: str = ""
    codec: str = ""
    rates: tuple[int, ...] = ()
    bits: int = 0
    options: Mapping[str, str] | None = None


_KINDS: Mapping[str, _Kind] = {
    "mp3": _Kind(
        b"audio/mpeg", "mp3", "libmp3lame",
        (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
        64_000, {"write_xing": "0", "id3v2_version": "0"},
    ),
    "opus": _Kind(
        b"audio/opus", "ogg", "libopus", (48_000,), 48_000, {"page_duration": "200000"}
    ),
    "aac": _Kind(
        b"audio/aac", "adts", "aac",
        (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000), 64_000,
    ),
    "flac": _Kind(b"audio/flac", "flac", "flac"),
    "wav": _Kind(b"audio/wav"),
    "pcm": _Kind(b"audio/pcm"),
    "pcm16": _Kind(b"audio/pcm"),
}  # fmt: skip


def media_type_of(form: AudioFormat) -> bytes:
    """Return the `content-type` of a format."""
    return _KINDS[form].media_type


@cache
def has_encoders() -> bool:
    """Return True if the library of the encoders is installed."""
    return find_spec("av") is not None


def check_format(form: AudioFormat, param: str) -> None:
    """Reject a format without an encoder.

    Args:
        param: the field of the request that names the format.

    Raises:
        InvalidRequest: `av` is not installed, and the format needs it.
    """
    if _KINDS[form].codec and not has_encoders():
        raise _no_encoder(form, param)


def _no_encoder(form: AudioFormat, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Unsupported value: '{param}' does not support '{form}' on this server, which has no "
        "encoder for it. Use 'wav', or install the extra 'speech' on the server: run pip install "
        "'.[speech]' in a clone of Latimer.",
        param,
        "unsupported_value",
    )


class Encoder:
    """Encodes PCM as it arrives, for a single stream of audio.

    A compressed format needs about a hundredth of the time that the audio lasts, so `encoded` calls
    it in a thread.

    Args:
        form: the format of the bytes.
        rate: samples a second of the PCM.
        is_whole: True if the file is sent when it is complete, so that its header can tell its
            length; `feed` then returns nothing.
        speed: 2 for twice as fast; without `av` there is only one.
        param: the field of the request that names the format, for errors.

    Raises:
        InvalidRequest: `av` is not installed, and the format needs it.
    """

    def __init__(
        self,
        form: AudioFormat,
        rate: int,
        is_whole: bool = False,
        speed: float = 1.0,
        param: str = "response_format",
    ) -> None:
        check_format(form, param)
        self._tempo = None if speed == 1 else _Tempo(rate, speed)
        self._encoder: _Wav | _Pcm | _File
        if form == "wav":
            self._encoder = _Wav(rate, is_whole)
        elif _KINDS[form].codec:
            self._encoder = _File(_KINDS[form], rate, is_whole)
        elif rate == PCM_RATE or has_encoders():
            self._encoder = _Pcm(rate, is_whole)
        else:
            raise _no_encoder(form, param)

    def feed(self, samples: bytes) -> bytes:
        """Return what is known of the file with these samples: signed 16 bit, little endian."""
        data = b""
        for start in range(0, len(samples), _STEP):
            step = samples[start : start + _STEP]
            if self._tempo is not None:
                step = self._tempo.feed(step)
            if step:
                data += self._encoder.feed(step)
        return data

    def end(self) -> bytes:
        """Return the rest of the file."""
        data = b""
        if self._tempo is not None and (step := self._tempo.end()):
            data = self._encoder.feed(step)
        return data + self._encoder.end()

    @property
    def is_slow(self) -> bool:
        """True if it computes anything."""
        return self._tempo is not None or not isinstance(self._encoder, _Wav)


async def encoded(encoder: Encoder, samples: bytes | None) -> bytes:
    """Encode in a thread, a second of audio at a time, so that short work of others is not late.

    Args:
        samples: None for the rest of the file.
    """
    if not encoder.is_slow:
        return encoder.end() if samples is None else encoder.feed(samples)
    if samples is None:
        return await offload.run(offload.UNKNOWN, encoder.end)
    parts = [
        await offload.run(offload.UNKNOWN, encoder.feed, samples[start : start + _TURN])
        for start in range(0, len(samples), _TURN)
    ]
    return b"".join(parts)


class _Tempo:
    """Changes the speed of speech, and not its pitch, by FFmpeg's filter `atempo`."""

    def __init__(self, rate: int, speed: float) -> None:
        from av.filter import Graph

        self._rate, self._count = rate, 0
        self._graph = Graph()
        last = self._graph.add_abuffer(
            format="s16", sample_rate=rate, layout="mono", time_base=Fraction(1, rate)
        )
        # The filter halves the speed at most.
        for factor in (0.5, speed / 0.5) if speed < 0.5 else (speed,):
            one = self._graph.add("atempo", repr(factor))
            last.link_to(one)
            last = one
        last.link_to(self._graph.add("abuffersink"))
        self._graph.configure()

    def feed(self, samples: bytes) -> bytes:
        """Return what is known of the audio with these samples."""
        self._graph.push(_frame(samples, self._rate, self._count))
        self._count += len(samples) // 2
        return self._pulled()

    def end(self) -> bytes:
        """Return the rest."""
        self._graph.push(None)
        return self._pulled()

    def _pulled(self) -> bytes:
        data = b""
        # Both mean that there is no more for now.
        with suppress(BlockingIOError, EOFError):
            while True:
                data += _samples_of(self._graph.pull())
        return data


class _Wav:
    """A WAV file; the sizes in its header are unknown if it is sent while it is written."""

    def __init__(self, rate: int, is_whole: bool) -> None:
        self._rate = rate
        self._whole = bytearray() if is_whole else None
        self._head = b"" if is_whole else wav_header(rate)

    def feed(self, samples: bytes) -> bytes:
        if self._whole is not None:
            self._whole += samples
            return b""
        head, self._head = self._head, b""
        return head + samples

    def end(self) -> bytes:
        if self._whole is None:
            return self._head
        return wav_header(self._rate, len(self._whole)) + self._whole


class _Pcm:
    """Samples at `PCM_RATE` without a header."""

    def __init__(self, rate: int, is_whole: bool) -> None:
        self._rate = rate
        self._whole = bytearray() if is_whole else None
        self._resampler = None if rate == PCM_RATE else _resampler()
        self._count = 0

    def feed(self, samples: bytes) -> bytes:
        if self._resampler is not None:
            frame = _frame(samples, self._rate, self._count)
            self._count += len(samples) // 2
            samples = _resampled(self._resampler, frame)
        if self._whole is None:
            return samples
        self._whole += samples
        return b""

    def end(self) -> bytes:
        rest = b""
        if self._resampler is not None and self._count:
            rest = _resampled(self._resampler, None)
        return rest if self._whole is None else bytes(self._whole + rest)


def _resampler() -> AudioResampler:
    from av.audio.resampler import AudioResampler

    return AudioResampler(format="s16", layout="mono", rate=PCM_RATE)


def _resampled(resampler: AudioResampler, frame: av.AudioFrame | None) -> bytes:
    return b"".join(map(_samples_of, resampler.resample(frame)))


def _samples_of(frame: Any) -> bytes:
    return bytes(frame.planes[0])[: 2 * frame.samples] if frame.samples else b""


def _frame(samples: bytes, rate: int, at: int) -> av.AudioFrame:
    """Return samples as FFmpeg has them; the first is number `at`."""
    from av import AudioFrame

    count = len(samples) // 2
    frame = AudioFrame(format="s16", layout="mono", samples=count, align=1)
    frame.planes[0].update(samples[: 2 * count])
    frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
    return frame


class _Sink(io.BytesIO):
    """The bytes that FFmpeg has written; it cannot go back if the file is sent meanwhile."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self._is_whole = is_whole

    def seekable(self) -> bool:
        return self._is_whole

    def take(self) -> bytes:
        """Return the bytes that were not returned yet."""
        found = self.getvalue()
        self.seek(0)
        self.truncate()
        return found


class _File:
    """A file by FFmpeg."""

    def __init__(self, kind: _Kind, rate: int, is_whole: bool) -> None:
        import av
        from av.audio.stream import AudioStream

        self._rate, self._is_whole = rate, is_whole
        self._sink = _Sink(is_whole)
        options = {} if is_whole else dict(kind.options or {})
        self._container = av.open(self._sink, "w", format=kind.container, options=options)
        found = rate if not kind.rates else _nearest(rate, kind.rates)
        stream = self._container.add_stream(kind.codec, rate=found)
        assert isinstance(stream, AudioStream)
        self._stream = stream
        context = stream.codec_context
        context.layout = "mono"
        if kind.bits:
            context.bit_rate = kind.bits
        self._count = 0

    def feed(self, samples: bytes) -> bytes:
        frame = _frame(samples, self._rate, self._count)
        self._count += len(samples) // 2
        self._mux(self._stream.encode(frame))
        return b"" if self._is_whole else self._sink.take()

    def end(self) -> bytes:
        if self._count:
            self._mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()

    def _mux(self, packets: Any) -> None:
        for packet in packets:
            self._container.mux(packet)


def _nearest(rate: int, rates: tuple[int, ...]) -> int:
    """Return the lowest rate that loses nothing, or the highest."""
    return min((one for one in rates if one >= rate), default=max(rates))
