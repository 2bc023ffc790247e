"""Compare ways to choose an engine for conversations: prefix, session, round robin, least busy.

    python tests/benchmarks/fleet.py [--conversations 200] [--turns 8] [--clients 12]
        [--litellm PYTHON] [--plot docs/performance/fleet.svg]

Each way gets four new llama-servers with four slots each, and the same conversations. They share a
beginning, and their turns are in random order. One server alone has everything in its cache, and
shows what can be reused. Answers have eight tokens, so that prompts take the time. The evaluated
tokens are those that the servers count. Pools run in this process, and LiteLLM's router in front of
the servers' own `/v1`; PYTHON is that of an environment with `litellm[proxy]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import httpx2

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peers import LITELLM_ENVIRONMENT
from benchmarks.plots import picture
from latimer.backends.base import Generation, Piece, Prompt, Sampling, Text
from latimer.backends.fleet.config import Affinity
from latimer.backends.fleet.place import Job, Place
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from latimer.backends.queue import Ticket
from support.servers import free_port, llama_server, wait_for

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
# LiteLLM's names of its strategies, by the names of the rows.
LITELLM = {"LiteLLM, least busy": "least-busy", "LiteLLM, by default": "simple-shuffle"}
PANELS = {
    "evaluated": "prompt tokens evaluated",
    "p50": "first token, p50, ms",
    "p99": "first token, p99, ms",
}

# Sends a turn of a conversation; returns the seconds to the first token.
Ask: TypeAlias = Callable[[str, str], Awaitable[float]]


class RoundRobin(Pool):
    """A pool that gives each call the next engine, busy or not."""

    _next = 0

    async def begin(self, place: Place, job: Job | None) -> Replica:
        self._next = (self._next + 1) % len(self.replicas)
        place.failed = {*self.replicas} - {self.replicas[self._next]}
        return await super().begin(place, job)


@contextlib.contextmanager
def servers(count: int) -> Iterator[Sequence[str]]:
    """Run new llama-servers, and yield their addresses."""
    with contextlib.ExitStack() as stack:
        run = [
            llama_server(DEMO_MODEL, "--metrics", slots=SLOTS, context=CONTEXT)
            for _ in range(count)
        ]
        yield [stack.enter_context(server) for server in run]


def evaluated(addresses: Sequence[str]) -> int:
    """Return the number of prompt tokens that servers have evaluated."""
    count = 0
    for address in addresses:
        text = urllib.request.urlopen(f"{address}/metrics", timeout=5).read().decode()  # noqa: S310
        found = re.search(r"^llamacpp:prompt_tokens_total (\S+)", text, re.MULTILINE)
        assert found, "no count of evaluated tokens"
        count += int(float(found[1]))
    return count


@contextlib.asynccontextmanager
async def pool_over(addresses: Sequence[str], way: str) -> AsyncIterator[Ask]:
    """Yield a function that sends turns through a pool."""
    engines = [LlamaServer(address, max_waiting=2**20) for address in addresses]
    replicas = [Replica(f"e{index}", engine) for index, engine in enumerate(engines)]
    kind = RoundRobin if way == "round robin" else Pool
    pool = kind("demo", replicas, 10_000, WAYS[way])
    await pool.ask_all()

    async def ask(text: str, session: str) -> float:
        ticket = Ticket()
        ticket.session = session
        sampling = Sampling(extras={"ignore_eos": True})
        job = Generation(Prompt(Text(text)), ANSWER, sampling=sampling, ticket=ticket)
        start, first = time.perf_counter(), 0.0
        async with pool.open(job) as batches:
            async for batch in batches:
                if not first and any(isinstance(event, Piece) for event in batch):
                    first = time.perf_counter() - start
        return first

    try:
        yield ask
    finally:
        await pool.aclose()
        for engine in engines:
            await engine.aclose()


@contextlib.contextmanager
def litellm(addresses: Sequence[str], python: Path, strategy: str) -> Iterator[int]:
    """Run LiteLLM's proxy in front of servers, and yield its port."""
    models = [
        {
            "model_name": "demo",
            "litellm_params": {
                "model": "text-completion-openai/demo",
                "api_base": f"{address}/v1",
                "api_key": "x",
            },
        }
        for address in addresses
    ]
    settings = {
        "model_list": models,
        "router_settings": {"routing_strategy": strategy},
        "litellm_settings": {"telemetry": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        # JSON is YAML.
        file = Path(folder) / "litellm.yaml"
        file.write_text(json.dumps(settings))
        port = free_port()
        words = [str(python.parent / "litellm"), "--config", str(file), "--host", "127.0.0.1"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [*words, "--port", str(port)],
            env={**os.environ, **LITELLM_ENVIRONMENT},
            stdout=quiet,
            stderr=quiet,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health/liveliness", process, 120)
            yield port
        finally:
            process.terminate()
            process.wait(30)


@contextlib.asynccontextmanager
async def litellm_over(addresses: Sequence[str], python: Path, strategy: str) -> AsyncIterator[Ask]:
    """Yield a function that sends turns through LiteLLM's proxy."""
    with litellm(addresses, python, strategy) as port:
        async with httpx2.AsyncClient(timeout=120) as client:
            yield lambda text, _session: streamed(client, port, text)


async def streamed(client: httpx2.AsyncClient, port: int, text: str) -> float:
    """Stream a completion; return the seconds to its first event."""
    body = {
        "model": "demo",
        "prompt": text,
        "max_tokens": ANSWER,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    start, first = time.perf_counter(), 0.0
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with client.stream("POST", url, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - start
    return first


async def converse(ask: Ask, options: argparse.Namespace) -> list[float]:
    """Run all turns; return the seconds to the first token of each."""
    chance = random.Random(1)
    system = "system " + " ".join(chance.choices(WORDS, k=60))
    texts = {str(index): system for index in range(options.conversations)}
    left = [name for name in texts for _ in range(options.turns)]
    chance.shuffle(left)
    times: list[float] = []
    busy: set[str] = set()

    async def client() -> None:
        while left:
            name = next((one for one in reversed(left) if one not in busy), None)
            if name is None:
                return
            left.reverse()
            left.remove(name)
            left.reverse()
            busy.add(name)
            texts[name] += f" user {name} " + " ".join(chance.choices(WORDS, k=45))
            times.append(await ask(texts[name], name))
            busy.discard(name)

    await asyncio.gather(*(client() for _ in range(options.clients)))
    return times


async def measure(way: str, options: argparse.Namespace) -> tuple[list[float], int, float]:
    """Run all turns in one way; return the times to the first token, the evaluated tokens, the
    seconds."""
    with servers(1 if way == ONE else SERVERS) as addresses:
        over = (
            litellm_over(addresses, options.litellm, LITELLM[way])
            if way in LITELLM
            else pool_over(addresses, way)
        )
        async with over as ask:
            before, start = evaluated(addresses), time.perf_counter()
            times = await converse(ask, options)
            return times, evaluated(addresses) - before, time.perf_counter() - start


async def prompt_tokens(options: argparse.Namespace) -> int:
    """Return the tokens of all prompts."""
    total = 0

    async def count(text: str, _session: str) -> float:
        nonlocal total
        ids = await engine.tokenize(text, add_special=True, parse_special=False)
        total += len(ids)
        return 0.0

    with servers(1) as addresses:
        engine = LlamaServer(addresses[0], max_waiting=2**20)
        await converse(count, options)
        await engine.aclose()
    return total


async def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--way", choices=[*WAYS, *LITELLM], action="append")
    parser.add_argument("--litellm", type=Path, help="the Python of an environment with it")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    options = parser.parse_args()
    ways = options.way or [*WAYS, *(LITELLM if options.litellm else ())]
    tokens = await prompt_tokens(options)
    print(f"{tokens:,} prompt tokens. Shares are of what one engine alone reuses.\n")
    print("| engine is chosen by | evaluated | reused | first token, p50 | p99 | seconds |")
    print("|---|--:|--:|--:|--:|--:|")
    best = 0
    figures: dict[str, dict[str, float]] = {}
    for way in ways:
        times, count, seconds = await measure(way, options)
        cuts = statistics.quantiles(times, n=100)
        best = tokens - count if way == ONE else best
        share = f"{(tokens - count) / (best or tokens):.1%}"
        figures[way] = {"evaluated": count, "p50": cuts[49] * 1000, "p99": cuts[98] * 1000}
        print(
            f"| {way} | {count:,} | {share} | {cuts[49] * 1000:.0f} ms | "
            f"{cuts[98] * 1000:.0f} ms | {seconds:.1f} |",
            flush=True,
        )
    if options.plot:
        options.plot.parent.mkdir(exist_ok=True)
        options.plot.write_text(picture(figures, PANELS))


if __name__ == "__main__":
    asyncio.run(main())
