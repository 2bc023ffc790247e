"""Random padding of the events of a stream, which hides the lengths of tokens (contract 3.5).

A reader of encrypted traffic sees the length of each event. `stream_options.include_obfuscation`
asks for a key `obfuscation` in every chunk, which pads events to the same or similar lengths. Of
events with a name, only deltas have it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ...backends.errors import LatimerError
from ...schemas.openai.common import FinishReason, StreamOptions, Usage
from ...schemas.openai.responses import ResponseStreamOptions
from .choice import Delta
from .frames import Frames

# The lengths of events are multiples of it.
STEP = 16


class Obfuscated(Frames):
    """The frames of another response, each with the key `obfuscation` at its end."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.keeps = frames.keeps

    def start(self, index: int) -> bytes:
        """See `Frames.start`."""
        return _padded(self._frames.start(index))

    def delta(self, index: int, delta: Delta) -> bytes:
        """See `Frames.delta`."""
        return _padded(self._frames.delta(index, delta))

    def end(self, index: int, reason: FinishReason) -> bytes:
        """See `Frames.end`."""
        return _padded(self._frames.end(index, reason))

    def close(self, usage: Usage, reply: Mapping[str, Any] | None = None) -> bytes:
        """See `Frames.close`; the chunk with the usage is padded, too."""
        return _padded(self._frames.close(usage, reply))

    def failed(self, error: LatimerError) -> Mapping[str, Any] | None:
        """See `Frames.failed`."""
        return self._frames.failed(error)

    def error(self, error: LatimerError) -> bytes:
        """See `Frames.error`."""
        return self._frames.error(error)


def in_stream(options: StreamOptions | ResponseStreamOptions | None, frames: Frames) -> Frames:
    """Return the frames of a stream, padded if the request asks for it."""
    return Obfuscated(frames) if options is not None and options.include_obfuscation else frames


def _padded(data: bytes) -> bytes:
    """Return frames with padding; JSON contains no line ends, so each empty line ends a frame."""
    return b"".join([_one(frame) for frame in data.split(b"\n\n")[:-1]])


def _one(frame: bytes) -> bytes:
    name, _, _ = frame.partition(b"\n")
    if not frame.endswith(b"}") or (name.startswith(b"event: ") and not name.endswith(b".delta")):
        return frame + b"\n\n"
    size = STEP - len(frame) % STEP
    text = secrets.token_hex(STEP // 2)[:size].encode()
    return frame[:-1] + b',"obfuscation":"' + text + b'"}\n\n'
