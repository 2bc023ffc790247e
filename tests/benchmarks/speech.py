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
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
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


async def heard(client: httpx2.AsyncClient) -> dict[str, float]:
    """Return the seconds until the first and the last text and audio of a spoken answer."""
    found: dict[str, float] = {}
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


async def main(voice: str | None) -> None:
    """Print the figures."""
    speaker = PacedSpeaker() if voice is None else speaker_of(voice)
    app = OpenAIAdapter(Echo(TEXT, context=100_000, pause=PAUSE), any_model=True, speaker=speaker)
    with measured(lambda: app) as (address, loop):
        async with httpx2.AsyncClient(base_url=address, timeout=300) as client:
            body = {"model": "m", "voice": "alloy", "input": "Yes.", "response_format": "mp3"}
            # The first request loads the voice.
            await client.post(SPEECH, json=body)
            found = await heard(client)
            print("| of a spoken answer of ten sentences | seconds |\n|---|--:|")
            print(f"| first text | {found['first transcript']:.2f} |")
            print(f"| first audio | {found['first data']:.2f} |")
            print(f"| last text | {found['last transcript']:.2f} |")
            print(f"| last audio | {found['last data']:.2f} |\n")
            alone = await widest_gap(client)
            loop.longest = 0.0
            tasks = [asyncio.ensure_future(heard(client)) for _ in range(10)]
            await asyncio.sleep(0.5)
            beside = await widest_gap(client)
            first = [one["first data"] for one in await asyncio.gather(*tasks)]
            print("| with ten spoken answers at once | |\n|---|--:|")
            print(f"| longest turn of the event loop (CPU time) | {1000 * loop.longest:.1f} ms |")
            print(f"| widest gap in a text stream, alone | {1000 * alone:.0f} ms |")
            print(f"| widest gap in a text stream, beside them | {1000 * beside:.0f} ms |")
            print(f"| first audio, fastest and slowest | {min(first):.2f} s, {max(first):.2f} s |")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--speech", help="as for latimer serve; by default a tone")
    asyncio.run(main(options.parse_args().speech))
