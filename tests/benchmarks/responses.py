"""Compare the CPU time of a streamed response with that of a streamed chat completion.

    python tests/benchmarks/responses.py [--turns 5]

A turn starts `latimer serve` in front of a fake llama-server and sends it blocks of streamed
requests in random order: chat and responses, each stored and not, with the same text. A block has
short or long answers; a token costs the difference, divided by the number of tokens between them,
and the rest is what a request costs. The engine sends the tokens of an answer at once, so that many
arrive together, or apart to 16 clients, so that each one arrives alone.

The time is the time on a core of all threads of the process, also of those that write the stored
objects of a block. Other work on the machine only adds to it, so the result of a turn is that of
the best blocks. The table has medians of turns. The exit code is 1 if the median of the ratios of
turns is above 1.10.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES, HERE, on_core, served
from benchmarks.cpu import send
from benchmarks.fake_engine import STREAM_HEAD, FakeEngine, chunk, event, fake_engine, final
from benchmarks.load import http

# The tokens of short and long answers.
SHORT, LONG = 16, 512
WARM_UP = 200
# Seconds in which the last objects of a block are written.
REST = 0.8
# Seconds between tokens that are sent apart: enough for Latimer to send each on its own.
APART = 0.002


class Way(NamedTuple):
    """The way in which tokens arrive: the clients, the requests of each in a block, the blocks."""

    name: str
    clients: int
    requests: Mapping[int, int]
    blocks: int


WAYS = (Way("at once", 1, {SHORT: 100, LONG: 24}, 8), Way("apart", 16, {SHORT: 4, LONG: 1}, 4))
# The limit for a token of a response, as a share of a token of chat.
MOST = 1.10
KINDS = ("chat", "responses", "stored chat", "stored responses")


class Streaming(FakeEngine):
    """A llama-server that answers with `n_predict` tokens; `apart` in a prompt sends each alone."""

    def _answer(self, head: bytes, body: bytes) -> None:
        if b" /completion" not in head[:40]:
            super()._answer(head, body)
            return
        asked = json.loads(body)
        count = asked["n_predict"]
        parts = [chunk(event(i)) for i in range(count)]
        parts.append(chunk(final(count)) + b"0\r\n\r\n")
        if "apart" in str(asked["prompt"]):
            self._transport.write(STREAM_HEAD)
            self._next(parts[::-1])
        else:
            self._transport.write(STREAM_HEAD + b"".join(parts))

    def _next(self, left: list[bytes]) -> None:
        if self._transport.is_closing() or not left:
            return
        self._transport.write(left.pop())
        asyncio.get_running_loop().call_later(APART, self._next, left)


def request(kind: str, tokens: int, prompt: str) -> bytes:
    """Return a streamed request of a kind."""
    common: dict[str, Any] = {"model": "fake", "stream": True, "store": kind.startswith("stored")}
    if kind.endswith("chat"):
        messages = [{"role": "user", "content": prompt}]
        body = {**common, "messages": messages, "max_tokens": tokens}
        return http("/v1/chat/completions", body)
    return http("/v1/responses", {**common, "input": prompt, "max_output_tokens": tokens})


def answered(port: int, sent: bytes, clients: int, count: int) -> None:
    """Send requests, and wait for their answers, which all end in time unless one is an error."""

    async def run() -> None:
        each = [send(port, sent, b"0\r\n\r\n", count) for _ in range(clients)]
        await asyncio.wait_for(asyncio.gather(*each), 60)

    asyncio.run(run())


def turn(engine: int, way: Way) -> dict[str, tuple[float, float]]:
    """Return the microseconds per request and per token, by kind."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    with served(HERE, engine) as (process, port):
        for kind in KINDS:
            answered(port, request(kind, SHORT, "at once"), 1, WARM_UP)
        blocks = [(kind, tokens) for kind in KINDS for tokens in way.requests]
        for _ in range(way.blocks):
            for kind, tokens in random.sample(blocks, len(blocks)):
                count = way.requests[tokens]
                before = on_core(process)
                answered(port, request(kind, tokens, way.name), way.clients, count)
                if kind.startswith("stored"):
                    time.sleep(REST)
                found[kind, tokens].append((on_core(process) - before) / count / way.clients)
    times = {block: min(blocks) for block, blocks in found.items()}
    costs = {}
    for kind in KINDS:
        token = (times[kind, LONG] - times[kind, SHORT]) / (LONG - SHORT)
        costs[kind] = times[kind, SHORT] - SHORT * token, token
    return costs


def show(name: str, turns: list[dict[str, tuple[float, float]]]) -> bool:
    """Print a table of turns; return True if no token of a response costs too much."""
    write, good = sys.stdout.write, True
    for kind in KINDS:
        requests, tokens = zip(*(one[kind] for one in turns), strict=True)
        write(
            f"{name:8} {kind:17} request {statistics.median(requests):7.1f} us   "
            f"token {statistics.median(tokens):6.2f} us ({min(tokens):.2f} to {max(tokens):.2f})\n"
        )
    for kind in KINDS[::2]:
        other = kind.replace("chat", "responses")
        ratios = [one[other][1] / one[kind][1] for one in turns]
        middle = statistics.median(ratios)
        ours, chats = (statistics.median([one[each][1] for one in turns]) for each in (other, kind))
        write(
            f"{name:8} {other} / {kind}: a token, turn by turn {min(ratios):.3f} to "
            f"{max(ratios):.3f}, median {middle:.3f}; of the medians {ours / chats:.3f}\n"
        )
        good &= middle <= MOST
    sys.stdout.flush()
    return good


def main() -> int:
    """Measure and print a table; return 1 if a token of a response costs too much."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=5)
    names = [way.name for way in WAYS]
    options.add_argument("--way", choices=names, action="append", help="how tokens arrive")
    arguments = options.parse_args()
    good = True
    with fake_engine(max(CORES), Streaming) as engine:
        for way in WAYS:
            if way.name in (arguments.way or names):
                turns = [turn(engine, way) for _ in range(arguments.turns)]
                good &= show(way.name, turns)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
