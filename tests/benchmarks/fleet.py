"""Compare ways to choose an engine for conversations: prefix, session, round robin, least busy.

    python tests/benchmarks/fleet.py [--conversations 200] [--turns 8] [--clients 12]

Each way gets four new llama-servers with four slots each, and the same conversations. They share a
beginning, and their turns are in random order. One server alone has everything in its cache, and
shows what can be reused. Most answers have eight tokens, so that prompts take the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from latimer.backends.base import Finish, Generation, Piece, Prompt, Sampling, Text
from latimer.backends.fleet.config import Affinity
from latimer.backends.fleet.place import Job, Place
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from latimer.backends.queue import Ticket
from support.servers import llama_server

SERVERS, SLOTS, CONTEXT, ANSWER = 4, 4, 2048, 8
WORDS = (
    "the", "a", "cat", "dog", "sun", "moon", "went", "saw", "little", "big", "old", "red", "into",
    "over", "garden", "river", "house", "and",
)  # fmt: skip
ONE = "one engine alone"
WAYS: dict[str, Affinity] = {
    ONE: "prefix",
    "prefix": "prefix",
    "session": "session",
    "least busy": "none",
    "round robin": "none",
}


class RoundRobin(Pool):
    """A pool that gives each call the next engine, busy or not."""

    _next = 0

    async def _begin(self, place: Place, job: Job | None) -> Replica:
        self._next = (self._next + 1) % len(self.replicas)
        place.failed = {*self.replicas} - {self.replicas[self._next]}
        return await super()._begin(place, job)


@contextlib.asynccontextmanager
async def pool_of(way: str) -> AsyncIterator[Pool]:
    """Run new servers, and yield a pool over them."""
    with contextlib.ExitStack() as stack:
        count = 1 if way == ONE else SERVERS
        servers = [llama_server(DEMO_MODEL, slots=SLOTS, context=CONTEXT) for _ in range(count)]
        addresses = [stack.enter_context(server) for server in servers]
        engines = [LlamaServer(address, max_waiting=2**20) for address in addresses]
        replicas = [Replica(f"e{index}", engine) for index, engine in enumerate(engines)]
        kind = RoundRobin if way == "round robin" else Pool
        pool = kind("demo", replicas, 10_000, WAYS[way])
        await pool.ask_all()
        try:
            yield pool
        finally:
            await pool.aclose()
            for engine in engines:
                await engine.aclose()


async def turn(pool: Pool, text: str, session: str) -> tuple[float, int, int]:
    """Return the seconds to the first token, the tokens of a prompt, and those that were cached."""
    party = Ticket()
    party.session = session
    sampling = Sampling(extras={"ignore_eos": True})
    job = Generation(Prompt(Text(text)), ANSWER, sampling=sampling, party=party)
    start, first = time.perf_counter(), 0.0
    async with pool.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    first = first or time.perf_counter() - start
                elif isinstance(event, Finish):
                    return first, event.prompt_tokens, event.cached_tokens
    raise AssertionError("a call without an end")


async def measure(way: str, options: argparse.Namespace) -> tuple[list[float], int, int, float]:
    """Run all turns in one way; return the times to the first token, the tokens, the seconds."""
    chance = random.Random(1)
    system = "system " + " ".join(chance.choices(WORDS, k=60))
    texts = {str(index): system for index in range(options.conversations)}
    left = [name for name in texts for _ in range(options.turns)]
    chance.shuffle(left)
    times: list[float] = []
    counts = [0, 0]
    busy: set[str] = set()

    async def client(pool: Pool) -> None:
        while left:
            name = next((one for one in reversed(left) if one not in busy), None)
            if name is None:
                return
            left.reverse()
            left.remove(name)
            left.reverse()
            busy.add(name)
            texts[name] += f" user {name} " + " ".join(chance.choices(WORDS, k=45))
            first, tokens, cached = await turn(pool, texts[name], name)
            times.append(first)
            counts[0] += tokens
            counts[1] += cached
            busy.discard(name)

    async with pool_of(way) as pool:
        start = time.perf_counter()
        await asyncio.gather(*(client(pool) for _ in range(options.clients)))
        return times, counts[0], counts[1], time.perf_counter() - start


async def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--way", choices=WAYS, action="append")
    options = parser.parse_args()
    print("| engine is chosen by | prompt tokens | evaluated | reused | TTFT p50 | p99 | seconds |")
    print("|---|---|---|---|---|---|---|")
    best = 0
    for way in options.way or WAYS:
        times, tokens, cached, seconds = await measure(way, options)
        cuts = statistics.quantiles(times, n=100)
        best = cached if way == ONE else best
        share = f"{cached / best:.1%}" if best else f"{cached / tokens:.1%} of all"
        print(
            f"| {way} | {tokens:,} | {tokens - cached:,} | {share} | {cuts[49] * 1000:.0f} ms | "
            f"{cuts[98] * 1000:.0f} ms | {seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
