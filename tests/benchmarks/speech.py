"""The time to the first audio of a spoken answer, and the delay that ten at once cause.

    python tests/benchmarks/speech.py [--speech piper:VOICE.onnx]

Without `--speech` the voice is a tone that needs no time, so that the rest of Latimer is measured.
The text comes at 200 characters a second, like 40 to 50 tokens. `make speech` has an environment
with a voice.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx2
from latimer.adapter import OpenAIAdapter
from latimer.backends.speech.libraries import speaker_of
from support.engines.echo import Echo
from support.engines.paced_speaker import PacedSpeaker
from support.turns import measured

SENTENCE = "The weather is very good today, and the children play in the garden. "
TEXT = SENTENCE * 10
# Seconds between the characters of the answer.
PAUSE = 0.005
# Seconds after which the ten clients leave.
_LONG = 20.0
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}


async def chunks(client: httpx2.AsyncClient, **fields: Any) -> AsyncIterator[tuple[float, Any]]:
    """Yield the chunks of a streamed answer, each with the seconds since the request."""
    start = time.perf_counter()
    async with client.stream("POST", CHAT, json={**ASK, "stream": True, **fields}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter() - start, json.loads(line.removeprefix("data: "))


async def heard(client: httpx2.AsyncClient, most: float) -> dict[str, float]:
    """Return the seconds until the first and the last text and audio of a spoken answer.

    Args:
        most: the seconds after which the client leaves.
    """
    found: dict[str, float] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(most):
            async for at, chunk in chunks(client, **SPOKEN):
                for choice in chunk["choices"]:
                    for key in choice["delta"].get("audio") or ():
                        found.setdefault(f"first {key}", at)
                        found[f"last {key}"] = at
    return found


async def widest_gap(client: httpx2.AsyncClient) -> float:
    """Return the longest time between two chunks of a text stream."""
    times = [at async for at, _ in chunks(client)]
    return max(after - at for at, after in itertools.pairwise(times[1:]))


def hear(address: str, count: int, most: float) -> list[dict[str, float]]:
    """Return what `heard` returns for several answers at once; in a process of its own."""

    async def all_heard() -> list[dict[str, float]]:
        async with httpx2.AsyncClient(base_url=address, timeout=300) as client:
            return list(await asyncio.gather(*(heard(client, most) for _ in range(count))))

    return asyncio.run(all_heard())


def gap(address: str) -> float:
    """Return what `widest_gap` returns; in a process of its own."""

    async def found() -> float:
        async with httpx2.AsyncClient(base_url=address, timeout=300) as client:
            return await widest_gap(client)

    return asyncio.run(found())


def main(voice: str | None) -> None:
    """Print the figures."""
    speaker = PacedSpeaker() if voice is None else speaker_of(voice)
    app = OpenAIAdapter(Echo(TEXT, context=100_000, pause=PAUSE), any_model=True, speaker=speaker)
    spawn = multiprocessing.get_context("spawn")
    # What reads the answers does not share an interpreter with the server.
    with measured(lambda: app) as (address, loop), ProcessPoolExecutor(2, spawn) as clients:
        body = {"model": "m", "voice": "alloy", "input": "Yes.", "response_format": "mp3"}
        # The first requests load the voice and the clients.
        httpx2.post(address + SPEECH, json=body, timeout=300)
        clients.submit(gap, address).result()
        (found,) = clients.submit(hear, address, 1, 120).result()
        print("| of a spoken answer of ten sentences | seconds |\n|---|--:|")
        print(f"| first text | {found['first transcript']:.2f} |")
        print(f"| first audio | {found['first data']:.2f} |")
        print(f"| last text | {found['last transcript']:.2f} |")
        print(f"| last audio | {found['last data']:.2f} |\n")
        alone = [clients.submit(gap, address).result() for _ in range(3)]
        loop.longest = 0.0
        ten = clients.submit(hear, address, 10, _LONG)
        time.sleep(1)
        beside: list[float] = []
        while not ten.done() and len(beside) < 3:
            beside.append(clients.submit(gap, address).result())
        first = [one.get("first data", math.inf) for one in ten.result()]
        print("| with ten spoken answers at once | |\n|---|--:|")
        print(f"| longest turn of the event loop (CPU time) | {1000 * loop.longest:.1f} ms |")
        print(f"| widest gap in a text stream, alone | {_shown(alone)} |")
        print(f"| widest gap in a text stream, beside them | {_shown(beside)} |")
        print(f"| first audio, fastest and slowest | {min(first):.2f} s, {max(first):.2f} s |")


def _shown(gaps: Sequence[float]) -> str:
    """Return the median of several measurements, and the largest."""
    return f"{1000 * median(gaps):.0f} ms ({1000 * max(gaps):.0f} ms at most)"


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--speech", help="as for latimer serve; by default a tone")
    main(options.parse_args().speech)
