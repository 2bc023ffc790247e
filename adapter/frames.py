"""Choice deltas to the bytes of a stream: prebuilt around each text, no model per chunk.

The order of chunks is contract 2.7 for completions and 3.5 for chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ..backends.errors import LatimerError
from ..schemas.openai.common import FinishReason, Usage
from .errors import render

DONE = b"data: [DONE]\n\n"


class Frames:
    """What is alike in the frames of one reply.

    Args:
        head: the keys that every chunk has, in their order; `choices` and `usage` follow.
        include_usage: whether `stream_options.include_usage` was set; every chunk then says
            `"usage": null` but the last, which has no choices.
    """

    def __init__(self, head: Mapping[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._cache: dict[int, tuple[bytes, bytes]] = {}

    def start(self, index: int) -> bytes:
        """The frames that come before a choice's first text."""
        raise NotImplementedError

    def text(self, index: int, text: str) -> bytes:
        """A frame that adds text to a choice."""
        around = self._cache.get(index)
        if around is None:
            around = self._cache[index] = self._around(index)
        return around[0] + orjson.dumps(text) + around[1]

    def logged(self, index: int, text: str, logprobs: Any) -> bytes:
        """A frame that adds text with its tokens; None where no token begins in the text."""
        raise NotImplementedError

    def delta(self, index: int, fields: Mapping[str, Any], logprobs: Any) -> bytes:
        """A frame that adds to a chat's message."""
        raise NotImplementedError

    def end(self, index: int, reason: FinishReason, logprobs: Any = None) -> bytes:
        """The frame that ends a choice."""
        raise NotImplementedError

    def close(self, usage: Usage) -> bytes:
        """What ends the stream."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE

    def error(self, error: LatimerError) -> bytes:
        """See `error_event`."""
        return error_event(error)

    def _around(self, index: int) -> tuple[bytes, bytes]:
        raise NotImplementedError


class CompletionFrames(Frames):
    """Chunks of `/v1/completions`."""

    def start(self, index: int) -> bytes:
        """See `Frames.start`: a completion has nothing before its text."""
        return b""

    def logged(self, index: int, text: str, logprobs: Any) -> bytes:
        """See `Frames.logged`."""
        return self._choice(index, text, logprobs, None)

    def end(self, index: int, reason: FinishReason, logprobs: Any = None) -> bytes:
        """See `Frames.end`."""
        return self._choice(index, "", logprobs, reason)

    def _choice(self, index: int, text: str, logprobs: Any, reason: FinishReason | None) -> bytes:
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return self._head + orjson.dumps(choice) + self._tail

    def _around(self, index: int) -> tuple[bytes, bytes]:
        end = b',"index":%d,"logprobs":null,"finish_reason":null}' % index
        return self._head + b'{"text":', end + self._tail


class ChatFrames(Frames):
    """Chunks of `/v1/chat/completions`.

    Args:
        logprobs: what the first chunk's `logprobs` is: null, or an object without tokens.
        apart: whether the message is taken apart: then its first delta tells the role.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        include_usage: bool,
        logprobs: Any = None,
        apart: bool = False,
    ) -> None:
        super().__init__(head, include_usage)
        self._logprobs = logprobs
        self._apart = apart

    def start(self, index: int) -> bytes:
        """See `Frames.start`: the role, once."""
        if self._apart:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._choice(index, delta, self._logprobs, None)

    def logged(self, index: int, text: str, logprobs: Any) -> bytes:
        """See `Frames.logged`."""
        return self._choice(index, {"content": text}, logprobs, None)

    def delta(self, index: int, fields: Mapping[str, Any], logprobs: Any) -> bytes:
        """See `Frames.delta`."""
        return self._choice(index, fields, logprobs, None)

    def end(self, index: int, reason: FinishReason, logprobs: Any = None) -> bytes:
        """See `Frames.end`; the last chunk of chat has no log-probabilities (contract 3.5)."""
        return self._choice(index, {}, None, reason)

    def _choice(
        self, index: int, delta: Mapping[str, Any], logprobs: Any, reason: FinishReason | None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head + orjson.dumps(choice) + self._tail

    def _around(self, index: int) -> tuple[bytes, bytes]:
        return (
            self._head + b'{"index":%d,"delta":{"content":' % index,
            b'},"logprobs":null,"finish_reason":null}' + self._tail,
        )


def error_event(error: LatimerError) -> bytes:
    """An error in mid-stream, as the SDK notices it, and the end (contract 1.7)."""
    _status, body, _headers = render(error)
    return b"data: " + orjson.dumps(body) + b"\n\n" + DONE
