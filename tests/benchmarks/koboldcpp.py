"""Compare short answers of a koboldcpp with those of servers in front of it.

    koboldcpp --model model.gguf --port 5001
    latimer serve http://127.0.0.1:5001 --port 8000
    python tests/benchmarks/koboldcpp.py http://127.0.0.1:5001 http://127.0.0.1:8000 [--turns 15]

The servers take turns with chats of 8 tokens: plain, streamed, with `n: 4`, five in a row. Pauses
let koboldcpp end its sleeps. Each server then gets 200 requests at once. koboldcpp ignores `n`, and
rejects requests that do not fit into its queue.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx2

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count to 12."}],
    "max_tokens": 8,
    "temperature": 0,
}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "streamed": {"stream": True}, "n: 4": {"n": 4}}
# Seconds after which koboldcpp has ended all its sleeps, and requests in a row and at once.
PAUSE, ROW, MANY = 0.4, 5, 200


async def timed(client: httpx2.AsyncClient, server: str, body: dict[str, Any]) -> float:
    """Return the seconds of a request."""
    start = time.monotonic()
    reply = await client.post(f"{server}/v1/chat/completions", json={**CHAT, **body})
    reply.raise_for_status()
    return time.monotonic() - start


async def turn(client: httpx2.AsyncClient, servers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the seconds of a request of each kind, by server."""
    found: dict[str, dict[str, float]] = {server: {} for server in servers}
    for kind, body in KINDS.items():
        for server in servers:
            await asyncio.sleep(PAUSE)
            found[server][kind] = await timed(client, server, body)
    for server in servers:
        await asyncio.sleep(PAUSE)
        await timed(client, server, {})
        row = [await timed(client, server, {}) for _ in range(ROW)]
        found[server]["in a row"] = sum(row) / ROW
    return found


async def main() -> None:
    """Print the medians."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("servers", nargs="+")
    options.add_argument("--turns", type=int, default=15)
    arguments = options.parse_args()
    limits = httpx2.Limits(max_connections=2 * MANY)
    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
        models = (await client.get(f"{arguments.servers[-1]}/v1/models")).json()
        # koboldcpp serves any name, and Latimer its own.
        CHAT["model"] = models["data"][0]["id"]
        turns = [await turn(client, arguments.servers) for _ in range(arguments.turns)]
        for kind in turns[0][arguments.servers[0]]:
            for server in arguments.servers:
                times = [one[server][kind] for one in turns]
                sys.stdout.write(f"{kind:9} {server:28} {statistics.median(times):7.4f} s\n")
        for server in arguments.servers:
            await asyncio.sleep(PAUSE)
            start = time.monotonic()
            work = [timed(client, server, {}) for _ in range(MANY)]
            replies = await asyncio.gather(*work, return_exceptions=True)
            seconds = time.monotonic() - start
            found = Counter("answered" if isinstance(one, float) else "failed" for one in replies)
            sys.stdout.write(f"at once   {server:28} {seconds:7.2f} s {dict(found)}\n")


if __name__ == "__main__":
    asyncio.run(main())
