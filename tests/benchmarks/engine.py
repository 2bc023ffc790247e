"""Compare the in-process engine with llama-server and llama-cpp-python's server, over HTTP.

    python tests/benchmarks/engine.py [--model demo|110m|FILE] [--tokens 128] [--repeats 3]

All servers run on one machine with the same model and two threads each. Latimer has as many
sequences as llama-server has slots. The same clients send the same streamed requests, and the
servers alternate. Results are medians of tokens per second, the time to the first token, and CPU
time per token of the server and its threads. The last result is the cost of a prompt of a thousand
tokens the second time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from latimer.backends.llama_cpp import DEMO_MODEL
from support import gguf_files
from support.servers import command, llama_cpp_python, llama_server

CONTEXT = 8192
# The demo vocabulary's end tokens, banned so that no completion ends early.
ENDS = {"0": -100, "2": -100}


def cpu_seconds() -> float:
    """Return the CPU time of all running child processes."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def ask(address: str, model: str, prompt: str, tokens: int) -> tuple[float, int]:
    """Stream a completion; return the seconds to its first event and the number of events."""
    parts = urlsplit(address)
    body = json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0,
         "logit_bias": ENDS}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    start = time.perf_counter()
    first, events = 0.0, 0
    while data := await reader.read(65536):
        found = data.count(b"data: {")
        if found and not first:
            first = time.perf_counter() - start
        events += found
    writer.close()
    assert events >= min(tokens, 4), "the server refused, or ended early"
    return first, events


async def load(address: str, model: str, clients: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the figures of clients that send requests in a row, each with its own prompts."""
    firsts: list[float] = []

    async def client(number: int) -> None:
        for turn in range(rounds):
            prompt = f"Client {number} asks for the {turn}th time: one day, "
            firsts.append((await ask(address, model, prompt, tokens))[0])

    await ask(address, model, "Hello", 4)
    cpu, start = cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    took, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    count = clients * rounds * tokens
    firsts.sort()
    return {
        "tokens_per_s": round(count / took, 1),
        "first_ms_p50": round(statistics.median(firsts) * 1000, 1),
        "first_ms_p99": round(firsts[int(len(firsts) * 0.99)] * 1000, 1),
        "cpu_us_per_token": round(cpu / count * 1e6),
    }


async def prefix(address: str, model: str) -> dict[str, float]:
    """Return the milliseconds to the first token of a 1,000-token prompt, and of a similar one."""
    await ask(address, model, "Hello", 4)
    long = "one day, the cat and the dog " * 125
    first, _ = await ask(address, model, f"{long} one", 4)
    second, _ = await ask(address, model, f"{long} other", 4)
    return {"first_ms": round(first * 1000, 1), "second_ms": round(second * 1000, 1),
            "share": round(second / first, 3)}  # fmt: skip


@contextlib.contextmanager
def servers(path: Path, parallel: int) -> Iterator[dict[str, Any]]:
    """Yield a function that starts each server, by name."""
    options = ("--parallel", str(parallel), "--context", str(CONTEXT), "--threads", "2")
    yield {
        "latimer": lambda: command(str(path), *options),
        "llama-server": lambda: llama_server(
            path, "--kv-unified", slots=parallel, context=CONTEXT // parallel
        ),
        # By default a new request ends the stream of another one.
        "llama-cpp-python": lambda: llama_cpp_python(
            path, CONTEXT, "--interrupt_requests", "false"
        ),
    }


def model_of(name: str, folder: str) -> Path:
    """Return the file of the demo model, of one with 110 million parameters, or the named file."""
    if name == "110m":
        larger = Path(folder) / "110m.gguf"
        return gguf_files.larger(DEMO_MODEL, larger, width=768, layers=16, inner=2048)
    return DEMO_MODEL if name == "demo" else Path(name)


def measure(
    path: Path, clients: list[int], tokens: int, rounds: int, repeats: int
) -> dict[str, Any]:
    """Return all figures: medians of several repeats, in which the servers take turns."""
    goes: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        with servers(path, max(clients)) as makers:
            for name, make in makers.items():
                # llama-cpp-python serves one client at a time.
                few = rounds if name != "llama-cpp-python" else 1
                with make() as made:
                    address = made[1] if isinstance(made, tuple) else made
                    found = {
                        f"{count} clients": asyncio.run(
                            load(address, path.stem, count, tokens, few)
                        )
                        for count in clients
                    }
                    found["prefix"] = asyncio.run(prefix(address, path.stem))
                sys.stderr.write(f"{name}: {json.dumps(found)}\n")
                goes.setdefault(name, []).append(found)
    return {name: _medians(found) for name, found in goes.items()}


def _medians(goes: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        part: {
            figure: round(statistics.median(go[part][figure] for go in goes), 3)
            for figure in figures
        }
        for part, figures in goes[0].items()
    }


def table(figures: dict[str, Any], clients: list[int]) -> str:
    """Return a table of tokens per second for the documentation."""
    lines = [f"| clients | {' | '.join(figures)} |", "|--:|" + "--:|" * len(figures)]
    for count in clients:
        row = [f"{found[f'{count} clients']['tokens_per_s']:,.0f}" for found in figures.values()]
        lines.append(f"| {count} | {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, 110m, or a file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            model_of(arguments.model, folder),
            arguments.clients, arguments.tokens, arguments.rounds, arguments.repeats,
        )  # fmt: skip
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    sys.stdout.write(table(found, arguments.clients) + "\n")
