"""Streams that wait, and comments while the server has nothing else to send (contract 1.7).

Proxies and clients close a connection that is silent for long. These checks send long
prompts, several at a time, and skip if the first event arrives before a client would notice.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

from openai._streaming import SSEDecoder

from ..check import Skip, check, expect
from ..raw import connected, parsed
from ..target import Api

H = "/chat/completions"
# The words of the first prompt, and of the longest; each one is twice as long as the one before.
FIRST, LAST = 1000, 128_000
# The number of concurrent requests: some of them may wait in the server's queue.
AT_ONCE = 4
# Seconds between two looks for bytes.
_LOOK = 0.05
# A part of each event that is a chunk.
CHUNK = b'"chat.completion.chunk"'


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait for the first chunk of a stream.

    Args:
        seconds: the time until the first chunk, or until the check knows enough.
        silence: the longest time in it without any bytes.
        data: all bytes of the reply that were read.
    """

    seconds: float
    silence: float
    data: bytes

    @property
    def refused(self) -> bool:
        """True if the server rejected the request, such as a prompt beyond the context."""
        return not re.match(rb"HTTP/1\.\d 200|$", self.data)


async def _wait(api: Api, words: int, number: int, end: bool) -> Wait:
    """Stream the answer to a long prompt that is in no cache.

    Args:
        end: read the stream to its end; otherwise three times the permitted silence suffices.
    """
    text = f"{time.monotonic_ns()} {number} " + "a b " * (words // 2)
    body = {"model": api.model, "messages": [{"role": "user", "content": text}],
            "max_tokens": 2, "stream": True}  # fmt: skip
    start = now = time.monotonic()
    looks, longest, data = 0, 0, b""
    async with connected(api, "POST", H, body) as (reader, _writer):
        while CHUNK not in data and (end or now - start < 3 * api.silence):
            try:
                read = await asyncio.wait_for(reader.read(65536), _LOOK)
            except TimeoutError:
                # Counted by looks, so that a busy machine that suspends this program adds nothing.
                now, looks = time.monotonic(), looks + 1
                longest = max(longest, looks)
                if looks * _LOOK > api.silence + 1:
                    break
                continue
            now, looks = time.monotonic(), 0
            data += read
            if not read:
                break
        while end and not looks and (read := await reader.read(65536)):
            data += read
    return Wait(now - start, longest * _LOOK, data)


async def _waits(api: Api, end: bool) -> list[Wait]:
    """Return waits above the permitted silence; skip if the longest prompt causes none."""
    words, longest = FIRST, 0.0
    while words <= LAST:
        waits = await asyncio.gather(*(_wait(api, words, n, end) for n in range(AT_ONCE)))
        if any(wait.refused for wait in waits):
            break
        longest = max(wait.seconds for wait in waits)
        if longest > api.silence:
            return [wait for wait in waits if wait.seconds > api.silence]
        words *= 2
    raise Skip(
        f"each stream began within {longest:.1f} s, and a silence of {api.silence:g} s is "
        "permitted: --silence"
    )


@check("keepalive.bytes",
       "While a prompt waits or is evaluated, its stream is never silent for longer than "
       "permitted: 20 s, or --silence.",
       "should", "1.7", alone=True, seconds=300)  # fmt: skip
async def some_bytes(api: Api) -> None:
    for wait in await _waits(api, end=False):
        expect(
            wait.silence <= api.silence,
            f"expected no silence above {api.silence:g} s, but got one of {wait.silence:.1f} s",
        )


@check("keepalive.comments",
       "Comments before the first event of a stream leave its events intact for the openai SDK.",
       "must", "1.7 [EXP]", alone=True, seconds=300)  # fmt: skip
async def comments(api: Api) -> None:
    waits = await _waits(api, end=True)
    bodies = [parsed(wait.data).body for wait in waits if CHUNK in wait.data]
    bodies = [body for body in bodies if not re.match(rb"data:.*" + CHUNK, body)]
    if not bodies:
        raise Skip("nothing arrived before the first chunk")
    for body in bodies:
        read = [event.data for event in SSEDecoder().iter_bytes(iter([body]))]
        expect(read[-1:] == ["[DONE]"], f"expected [DONE] at the end, but got {read[-1:]}")
        sent = body.count(CHUNK)
        chunks = [one for one in read[:-1] if CHUNK.decode() in one]
        expect(len(chunks) == sent, f"expected {sent} chunks, but the SDK reads {len(chunks)}")
        others = [one for one in read[:-1] if one not in chunks]
        expect(not others, f"expected comments and chunks only, but got the event {others[:1]}")
