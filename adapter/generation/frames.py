"""Turn deltas into the bytes of a stream.

The bytes around each text are prebuilt, so that no chunk needs a model of its own. Contract 2.7
defines the order of chunks for completions, and contract 3.5 for chat.

A reader of encrypted traffic sees the length of each event. `stream_options.include_obfuscation`
asks for a key `obfuscation` in every chunk, which pads events to the same or similar lengths. Of
events with a type, only deltas have it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from typing_extensions import override

from ...backends.errors import LatimerError
from ...backends.queue import Ticket
from ...schemas.openai.common import FinishReason, StreamOptions, Usage
from ..errors import DONE, error_event
from .choice import Choice, Delta
from .logprobs import Entry

if TYPE_CHECKING:
    from ...schemas.openai.responses import ResponseStreamOptions

# Clients ignore the comments of server-sent events.
COMMENT = b": keep-alive\n\n"


class ChunkEncoder:
    """The frames of one response, each a server-sent event.

    Args:
        head: the keys that every chunk has, in their order; `choices` and `usage` follow.
        include_usage: True if `stream_options.include_usage` is set. Every chunk then has
            `"usage": null`, except the last, which has no choices.
        show: formats the tokens; None if the request does not ask for them.

    Attributes:
        keeps: True if the frames make the response object of the stream from deltas that they keep.
        is_plain: True if a delta of content without tokens is one frame of `texts`.
        choices: the choices of the stream, before its first frame.
        ticket: the request as engines know it, which learns the size of the prompt.
        comment: the frame that is sent in silence.
        begins_early: True if `start` may be sent before the first delta, and returns nothing then.
    """

    keeps = False
    is_plain = False
    choices: Sequence[Choice] = ()
    ticket: Ticket | None = None
    comment = COMMENT
    begins_early = False

    def __init__(
        self,
        head: Mapping[str, Any],
        include_usage: bool,
        show: Callable[[Sequence[Entry]], Any] | None = None,
    ) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._show = show
        # The bytes before, between and after the texts of a choice.
        self._cache: dict[int, tuple[bytes, bytes, bytes]] = {}

    def start(self, index: int) -> bytes:
        """Return the frames that come before a choice's first text."""
        raise NotImplementedError

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta."""
        raise NotImplementedError

    def end(self, index: int, reason: FinishReason) -> bytes:
        """Return the frame that ends a choice."""
        raise NotImplementedError

    def close(self, usage: Usage, reply: Mapping[str, Any] | None = None) -> bytes:
        """Return the frames that end the stream.

        Args:
            reply: the response object, if `Answer.keeps` is set.
        """
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE

    def failed(self, error: LatimerError) -> Mapping[str, Any] | None:
        """Return the response object of a stream that fails; None if there is no such object."""
        return None

    def error(self, error: LatimerError) -> bytes:
        """Return the event of an error (`error_event`)."""
        return error_event(error)

    def texts(self, index: int, texts: Sequence[str]) -> bytes:
        """Return a frame for each of these texts, which adds only that."""
        if not texts:
            return b""
        around = self._cache.get(index)
        if around is None:
            before, after = self._around(index)
            around = self._cache[index] = before, after + before, after
        return around[0] + around[1].join(map(orjson.dumps, texts)) + around[2]

    def _around(self, index: int) -> tuple[bytes, bytes]:
        raise NotImplementedError


class CompletionEncoder(ChunkEncoder):
    """Chunks of `/v1/completions`."""

    is_plain = True

    @override
    def start(self, index: int) -> bytes:
        """A completion has no frame before its text."""
        return b""

    @override
    def delta(self, index: int, delta: Delta) -> bytes:
        if self._show is None:
            return self.texts(index, (delta.text,))
        return self._choice(index, delta.text, delta.entries, None)

    @override
    def end(self, index: int, reason: FinishReason) -> bytes:
        return self._choice(index, "", (), reason)

    def _choice(
        self, index: int, text: str, entries: Sequence[Entry], reason: FinishReason | None
    ) -> bytes:
        logprobs = None if self._show is None else self._show(entries)
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return self._head + orjson.dumps(choice) + self._tail

    def _around(self, index: int) -> tuple[bytes, bytes]:
        end = b',"index":%d,"logprobs":null,"finish_reason":null}' % index
        return self._head + b'{"text":', end + self._tail


# The lengths of events are multiples of it.
STEP = 16
_TYPE = re.compile(rb'(?:event: .*\n)?data: \{"type":"([^"]*)"')
# What no string of JSON contains.
_KEY = b',"obfuscation":"'


class ObfuscatedEncoder(ChunkEncoder):
    """The frames of another response, each with the key `obfuscation` at its end."""

    def __init__(self, frames: ChunkEncoder) -> None:
        self._frames = frames
        self.keeps, self.begins_early = frames.keeps, frames.begins_early

    @override
    def start(self, index: int) -> bytes:
        return padded(self._frames.start(index))

    @override
    def delta(self, index: int, delta: Delta) -> bytes:
        return padded(self._frames.delta(index, delta))

    @override
    def end(self, index: int, reason: FinishReason) -> bytes:
        return padded(self._frames.end(index, reason))

    @override
    def close(self, usage: Usage, reply: Mapping[str, Any] | None = None) -> bytes:
        """The chunk with the usage is padded, too."""
        return padded(self._frames.close(usage, reply))

    @override
    def failed(self, error: LatimerError) -> Mapping[str, Any] | None:
        return self._frames.failed(error)

    @override
    def error(self, error: LatimerError) -> bytes:
        return self._frames.error(error)


def in_stream(
    options: StreamOptions | ResponseStreamOptions | None, frames: ChunkEncoder
) -> ChunkEncoder:
    """Return the frames of a stream, padded if the request asks for it."""
    return (
        ObfuscatedEncoder(frames) if options is not None and options.include_obfuscation else frames
    )


def padded(data: bytes) -> bytes:
    """Return frames with padding, unless they have it already.

    JSON contains no line ends, so each empty line ends a frame.
    """
    return b"".join([_one(frame) for frame in data.split(b"\n\n")[:-1]])


def _one(frame: bytes) -> bytes:
    found = _TYPE.match(frame)
    if not frame.endswith(b"}") or (found and not found[1].endswith(b".delta")) or _KEY in frame:
        return frame + b"\n\n"
    size = STEP - len(frame) % STEP
    text = secrets.token_hex(STEP // 2)[:size].encode()
    return frame[:-1] + _KEY + text + b'"}\n\n'
