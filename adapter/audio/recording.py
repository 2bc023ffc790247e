"""Recordings that are sent as files, in any format: decode them to PCM for a transcriber."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from ...backends import offload, sandbox
from ...backends.speech.base import TRANSCRIBED_RATE
from ...schemas.limits import SOUND, SOUND_MEMORY, SOUND_SECONDS
from ..errors import InvalidRequest, wrong_value
from ..service import MOST_RECORDINGS
from .decoder import HIGHEST, LOWEST, REASONS, read_plain

_DECODER = Path(__file__).with_name("decoder.py")
# Seconds for which a process may decode, since others use the CPU as well.
_WAIT = 2.0 * SOUND_SECONDS.maximum
_TOO_LONG = next(status for status, reason in REASONS.items() if reason == "long")
# The end of a process that has taken too much time, or that the system has killed; after any other
# signal it has crashed.
_KILLED = (None, -9, -24)
_FORMATS = "WAV, MP3, FLAC, OGG, Opus, M4A, MP4, WebM and AAC"
_NEEDS = (
    "Others require the extra 'transcription' on the server: run pip install '.[transcription]' in "
    "a clone of Latimer."
)

# They only wait for processes.
_threads = ThreadPoolExecutor(MOST_RECORDINGS, "latimer-audio")


async def decoded(file: IO[bytes], param: str, most: float | None = None) -> bytes:
    """Return the samples of a recording; its format is known by its bytes.

    Cancelling the caller kills the process that decodes.

    Args:
        file: a file on disk, or one that has a place there when it needs it.
        param: the field of the file, for errors.
        most: the largest length in seconds, if it is less than `SOUND`.

    Returns:
        Signed 16 bit, little endian, mono, at `TRANSCRIBED_RATE`.

    Raises:
        InvalidRequest: the file cannot be decoded, or is too long.
    """
    longest = min(most or SOUND.maximum, SOUND.maximum)
    status, samples = await offload.run(
        offload.UNKNOWN, _decoded, file, longest, threads=_threads, seconds=2 * _WAIT
    )
    if status == 0:
        return samples
    raise _error(status, param, longest)


def free(kept: list[object]) -> None:
    """Free samples in a thread, since the memory of an hour takes milliseconds.

    Args:
        kept: the last references to them; the list is cleared.
    """
    _threads.submit(kept.clear)


def _decoded(file: IO[bytes], longest: float) -> tuple[int | None, bytes]:
    # Assistants often send this, and a process takes a tenth of a second.
    plain = read_plain(file, (most := int(longest * TRANSCRIBED_RATE) * 2) + 2)
    if plain is not None:
        return (_TOO_LONG, b"") if len(plain) > most else (0, plain)
    file.flush()
    # Through a pipe the samples would be joined, which holds the interpreter for long.
    with offload.shielded():
        # Nobody would close a descriptor that work had when it was abandoned.
        samples = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed below)
    with samples:
        ended = sandbox.run(
            _DECODER, file, str(longest), cpu=SOUND_SECONDS.maximum,
            memory=SOUND_MEMORY.maximum << 20, wait=_WAIT, output=samples,
        )  # fmt: skip
        if ended.status:
            return ended.status, b""
        size = samples.seek(0, 2)
        samples.seek(0)
        return ended.status, samples.read(size) or b""


def _error(status: int | None, param: str, longest: float) -> InvalidRequest:
    reason = REASONS.get(status or 0, "broken")
    if status in _KILLED:
        reason = "heavy"
    if reason == "long":
        return wrong_value(
            param,
            f"the recording is too long; at most {longest:.0f} s are allowed. Send it in parts.",
            "audio_too_long",
        )
    if reason == "heavy":
        return wrong_value(
            param,
            f"the recording takes more than {SOUND_SECONDS.maximum} s or {SOUND_MEMORY.maximum} "
            "MiB to decode. Send a shorter one, or WAV.",
            "audio_too_long",
        )
    if reason == "rate":
        return wrong_value(
            param,
            f"the recording states fewer than {LOWEST:,} or more than {HIGHEST:,} samples a "
            "second. Send it with another rate, such as 16,000.",
        )
    if reason in ("silent", "empty"):
        return wrong_value(param, "the file has no sound. Send a recording.")
    if find_spec("av") is None:
        return wrong_value(
            param, f"the file cannot be decoded. Here, only uncompressed WAV can be. {_NEEDS}"
        )
    return wrong_value(param, f"the file cannot be decoded. Supported formats are {_FORMATS}.")
