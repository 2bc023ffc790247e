"""Compare the in-process engine with llama-server, over HTTP, on one machine in one run.

    python tests/benchmarks/engine.py [--model demo|110m|FILE] [--vocabulary 32000]
        [--clients 1 4 8] [--modes "sampled, whole" ...] [--repeats 5] [--load 0.5 ...]
        [--trace FILE]

Both servers have the same model, two threads, and as many slots as there are clients at most.
Latimer reads the model into huge pages, which llama-server cannot; `--mmap` maps it in both. For
each row of the table they take turns, and clients send them the same requests, one after the other.
An answer has half to one and a half times `--tokens`. A ratio above 1 means that Latimer is faster.
It is the median over the turns, with the smallest and the largest. CPU time is the
server's with all of its threads. With `--load`, other processes need shares of a core meanwhile.

The model `110m` has random weights in 16 layers of width 768, and a vocabulary of `--vocabulary`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from latimer.backends.llama_cpp import DEMO_MODEL
from support import gguf_files
from support.servers import command, free_port, llama_server_command, wait_for

CONTEXT = 16_384
# Seconds after which Latimer has imported what its start did not need.
SETTLED = 2.0
# OpenAI's defaults, in words that both servers know, and no end before the last token.
NEUTRAL = {"top_k": 0, "top_p": 1, "min_p": 0, "ignore_eos": True}
WORDS = ("the", "cat", "and", "dog", "saw", "a", "red", "bird", "one", "day")
# The tokens of a long and a short prompt of the mode with mixed prompts, and of all others.
LENGTHS, LENGTH = (8, 512, 32, 128), 12


class Mode(NamedTuple):
    """A kind of request: fields of its body, whether it streams, and whether prompts differ."""

    fields: Mapping[str, Any]
    streamed: bool = False
    mixed: bool = False


GREEDY, SAMPLED = {**NEUTRAL, "temperature": 0}, {**NEUTRAL, "temperature": 1}
MODES = {
    "greedy, whole": Mode(GREEDY),
    "greedy, streamed": Mode(GREEDY, streamed=True),
    "sampled, whole": Mode(SAMPLED),
    "sampled, streamed": Mode(SAMPLED, streamed=True),
    "top-k, top-p, min-p": Mode(
        {**SAMPLED, "top_k": 40, "top_p": 0.95, "min_p": 0.05}, streamed=True
    ),
    "log-probabilities": Mode({**SAMPLED, "logprobs": 5}, streamed=True),
    "mixed prompts": Mode(SAMPLED, streamed=True, mixed=True),
}


class Answer(asyncio.Protocol):
    """A client's request and its answer.

    Attributes:
        first: the seconds until the first event.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._data = bytearray()
        self._begun = time.perf_counter()
        self.first = 0.0
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Receive a part of the answer."""
        if not self.first and b"data: {" in data:
            self.first = time.perf_counter() - self._begun
        self._data += data

    def connection_lost(self, error: Exception | None) -> None:
        """Finish."""
        self.done.set_result(bytes(self._data))


async def answered(address: str, body: Mapping[str, Any]) -> tuple[float, int]:
    """Send a completion request; return the seconds to its first event, and its tokens."""
    parts = urlsplit(address)
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    _, answer = await loop.create_connection(
        lambda: Answer(head.encode() + data), parts.hostname or "", parts.port or 80
    )
    found = (await answer.done).rpartition(b'"completion_tokens":')[2]
    tokens = int(found[: found.find(b",")])
    assert tokens == body["max_tokens"], "the answer ended early"
    return answer.first, tokens


async def ask(address: str, model: str, prompt: str, tokens: int) -> tuple[float, int]:
    """Stream a greedy completion; return the seconds to its first event, and its tokens."""
    return await answered(address, body_of(MODES["greedy, streamed"], model, prompt, tokens))


def body_of(mode: Mode, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the body of a request."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, **mode.fields}
    if mode.streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def requests_of(mode: Mode, clients: int, rounds: int, tokens: int, turn: int) -> list[Any]:
    """Return the requests of each client, whose prompts no other row or turn has.

    llama-server would find them in its prompt cache, even the short ones.
    """
    chance = random.Random(f"{mode} {clients} {turn}")
    found = []
    for client in range(clients):
        bodies = []
        for number in range(rounds):
            length = LENGTHS[(client + number) % len(LENGTHS)] if mode.mixed else LENGTH
            words = [chance.choice(WORDS) for _ in range(length)]
            prompt = f"{chance.randrange(10**6)} " + " ".join(words)
            length = chance.randint(tokens // 2, tokens * 3 // 2)
            bodies.append(body_of(mode, "m", prompt, length))
        found.append(bodies)
    return found


@dataclass
class Server:
    """A running server, and what it has done in each turn of one row."""

    address: str
    pid: int
    turns: list[dict[str, float]]

    async def run(self, mode: Mode, clients: int, rounds: int, tokens: int, turn: int) -> None:
        """Send the requests of a turn, and add its figures."""
        firsts: list[float] = []
        generated = 0

        async def client(bodies: Sequence[dict[str, Any]]) -> None:
            nonlocal generated
            for body in bodies:
                first, count = await answered(self.address, body)
                firsts.append(first * 1000)
                generated += count

        requests = requests_of(mode, clients, rounds, tokens, turn)
        cpu, begun = cpu_seconds(self.pid), time.perf_counter()
        await asyncio.gather(*map(client, requests))
        took, cpu = time.perf_counter() - begun, cpu_seconds(self.pid) - cpu
        firsts.sort()
        self.turns.append(
            {
                "speed": generated / took,
                "cpu": cpu / generated * 1e3,
                "first": statistics.median(firsts),
                "last": firsts[int(len(firsts) * 0.95)],
            }
        )

    def median(self, figure: str) -> float:
        """Return the median of a figure over the turns."""
        return statistics.median(turn[figure] for turn in self.turns)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all of its threads."""
    # The clock of another process, as `clock_getcpuclockid` makes it.
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def servers(path: Path, parallel: int, *options: str) -> Iterator[tuple[Server, Server]]:
    """Run Latimer and llama-server.

    Args:
        options: more options for Latimer.
    """
    port = free_port()
    shared = ("--threads", "2", "--parallel", str(parallel))
    theirs = llama_server_command(
        path, port, "--kv-unified", *shared, "--no-slots", "--no-webui", "--alias", "m",
        slots=parallel, context=CONTEXT // parallel,
    )  # fmt: skip
    ours = (str(path), "--model-name", "m", "--context", str(CONTEXT), *shared, *options)
    quiet = subprocess.DEVNULL
    with (
        command(*ours) as (process, address),
        subprocess.Popen(theirs, stdout=quiet, stderr=quiet) as other,
    ):
        try:
            wait_for(f"http://127.0.0.1:{port}/health", other)
            yield (
                Server(address, process.pid, []),
                Server(f"http://127.0.0.1:{port}", other.pid, []),
            )
        finally:
            other.kill()


_LOAD = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.01 * share
    while time.perf_counter() < end:
        pass
    if share < 1:
        time.sleep(0.01 * (1 - share))
"""


@contextlib.contextmanager
def busy(shares: Sequence[float]) -> Iterator[None]:
    """Run a process for each share of a core that is to be busy."""
    with contextlib.ExitStack() as stack:
        for share in shares:
            process = subprocess.Popen([sys.executable, "-c", _LOAD, str(share)])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def model_of(name: str, folder: str, vocabulary: int = 0) -> Path:
    """Return the file of the demo model, of a random one, or the named file.

    Args:
        vocabulary: the tokens of the random one, if more than the demo model's.
    """
    if name == "110m":
        shape = {"width": 768, "layers": 16, "inner": 2048, "vocabulary": vocabulary}
        return gguf_files.larger(DEMO_MODEL, Path(folder) / "110m.gguf", **shape)
    return DEMO_MODEL if name == "demo" else Path(name)


HEAD = (
    "| | clients | Latimer | llama-server | ratio | CPU ms per token | first token, ms, p50 "
    "| first token, ms, p95 |\n|---|--:|--:|--:|--:|--:|--:|--:|\n"
)


def row(name: str, clients: int, ours: Server, theirs: Server) -> str:
    """Return a row of the table."""
    pairs = zip(ours.turns, theirs.turns, strict=True)
    ratios = sorted(one["speed"] / other["speed"] for one, other in pairs)
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    cells = [name, str(clients), f"{ours.median('speed'):,.0f}", f"{theirs.median('speed'):,.0f}"]
    cells += [ratio, f"{ours.median('cpu'):.2f}, {theirs.median('cpu'):.2f}"]
    for figure in ("first", "last"):
        both = f"{ours.median(figure):,.0f}, {theirs.median(figure):,.0f}"
        cells.append(both if ours.turns[0]["first"] else "")
    return f"| {' | '.join(cells)} |\n"


async def measure(given: argparse.Namespace, ours: Server, theirs: Server) -> None:
    """Print the rows of the table as they are measured."""
    for server in (ours, theirs):
        await answered(server.address, body_of(MODES["greedy, whole"], "m", "Hello", 4))
    await asyncio.sleep(SETTLED)
    sys.stdout.write(HEAD)
    for name in given.modes:
        for clients in given.clients:
            rounds = max(given.rounds, -(-given.rounds * 4 // clients))
            ours.turns, theirs.turns = [], []
            for turn in range(given.repeats):
                order = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
                for server in order:
                    await server.run(MODES[name], clients, rounds, given.tokens, turn)
            sys.stdout.write(row(name, clients, ours, theirs))
            sys.stdout.flush()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="110m", help="demo, 110m, or a file")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokens of the random model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=[*MODES], metavar="MODE")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each server")
    parser.add_argument("--tokens", type=int, default=64, help="mean length of an answer")
    parser.add_argument("--rounds", type=int, default=1, help="requests of a client in a turn")
    parser.add_argument("--load", type=float, nargs="+", default=(), help="busy shares of a core")
    parser.add_argument("--mmap", action="store_true", help="map the model in Latimer, too")
    parser.add_argument("--drafts", action="store_true", help="let Latimer draft repeated text")
    parser.add_argument("--trace", help="a file for Latimer's trace")
    given = parser.parse_args()
    options = [] if given.drafts else ["--no-prompt-lookup"]
    options += [] if given.mmap else ["--no-mmap"]
    options += ["--trace", given.trace] if given.trace else []
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(given.model, folder, given.vocabulary)
        with servers(path, max(given.clients), *options) as (ours, theirs), busy(given.load):
            asyncio.run(measure(given, ours, theirs))


if __name__ == "__main__":
    main()
