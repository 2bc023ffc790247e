"""Compare embeddings in process with llama-server's endpoint and with sentence-transformers.

    python tests/benchmarks/embeddings.py [--repeats 5] [--sentence-transformers PYTHON]
    python tests/benchmarks/embeddings.py --chat [--model demo|110m] [--repeats 5]

The model is a BERT in the shape of all-MiniLM-L6 (6 layers of width 384) with random F32 weights.
The same client sends the same requests to both servers, which use two threads each, and all take
turns. The first table has medians of texts per second. llama-server runs with 4 slots, its default,
and with 32. sentence-transformers has no server: it encodes the same lists of texts in a process of
its own (`sentence_transformers_speed.py`), which needs a Python with that package and gguf.

With `--chat`, a chat model embeds 1,000 texts while it generates. The second table has tokens per
second and milliseconds to the first token, alone and during the embedding.
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import gguf
import httpx2
from benchmarks.engine import ask, model_of
from models.make_embeddings import Shape, bert
from support.servers import command, llama_server

MINILM = Shape(width=384, layers=6, heads=12, inner=1536)
WORDS = ("the", "cat", "kato", "mira", "is", "blue", "sky", "of", "and", "world", "12", "with")
# Words in a text, texts in a request, requests at once.
LOADS = {"a word or two, 256 in a request": (2, 256, 2), "a sentence, 32": (16, 32, 4),
         "a paragraph, 32": (100, 32, 2), "a sentence, 1": (16, 1, 8)}  # fmt: skip
ROUNDS = 4


def texts(words: int, count: int, seed: int) -> list[str]:
    """Return texts of about this many words."""
    rng = random.Random(seed)
    sizes = [max(rng.randint(words // 2, words * 3 // 2), 1) for _ in range(count)]
    return [" ".join(rng.choices(WORDS, k=size)) for size in sizes]


def lists(load: str) -> list[list[str]]:
    """Return the inputs of all requests of a load."""
    words, count, at_once = LOADS[load]
    rounds = ROUNDS * (16 if count == 1 else 1)
    return [texts(words, count, seed) for seed in range(rounds * at_once)]


async def speed(address: str, load: str) -> float:
    """Return texts per second."""
    work = lists(load)
    count = sum(map(len, work))
    async with httpx2.AsyncClient(timeout=300) as client:

        async def embed(inputs: list[str]) -> None:
            reply = await client.post(
                f"{address}/v1/embeddings",
                json={"model": "m", "input": inputs, "encoding_format": "base64"},
            )
            assert len(reply.json()["data"]) == len(inputs), reply.text[:200]

        async def one() -> None:
            while work:
                await embed(work.pop())

        await embed(["Hello"])
        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(LOADS[load][2])))
        return count / (time.perf_counter() - begun)


@contextlib.contextmanager
def latimer(model: Path, *options: str) -> Iterator[str]:
    """Run `latimer serve`, and yield its address."""
    with command(str(model), "--any-model", "--threads", "2", *options) as (_, address):
        yield address


def servers(model: Path) -> dict[str, Callable[[], AbstractContextManager[str]]]:
    """Return functions that start the servers, by name."""
    batch = ("--embeddings", "-t", "2", "-b", "2048", "-ub", "2048")
    return {
        "Latimer": lambda: latimer(model),
        "llama-server, 4 slots": lambda: llama_server(model, *batch, slots=4, context=512),
        "llama-server, 32 slots": lambda: llama_server(model, *batch, slots=32, context=512),
    }


def sentence_transformers(python: str, model: Path) -> dict[str, float]:
    """Return texts per second of sentence-transformers for each load."""
    work = {load: lists(load) for load in LOADS}
    script = Path(__file__).with_name("sentence_transformers_speed.py")
    found = subprocess.run(
        [python, str(script), str(model)],
        input=json.dumps(work).encode(), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    result: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return result


def compare(folder: Path, repeats: int, python: str | None) -> str:
    """Return the table of texts per second."""
    model = folder / "minilm.gguf"
    bert(model, gguf.PoolingType.MEAN, 1, eos=False, shape=MINILM)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for name, start in servers(model).items():
            with start() as address:
                for load in LOADS:
                    rate = asyncio.run(speed(address, load))
                    found.setdefault(name, {}).setdefault(load, []).append(rate)
        if python is not None:
            for load, rate in sentence_transformers(python, model).items():
                rates = found.setdefault("sentence-transformers", {})
                rates.setdefault(load, []).append(rate)
    lines = [f"| texts per second | {' | '.join(found)} |", "|---|" + "--:|" * len(found)]
    for load in LOADS:
        row = [f"{statistics.median(rates[load]):,.0f}" for rates in found.values()]
        lines.append(f"| {load} | {' | '.join(row)} |")
    return "\n".join(lines)


async def chat(address: str, seconds: float) -> tuple[float, list[float]]:
    """Return tokens per second of one stream after another, and their seconds to the first."""
    end = time.perf_counter() + seconds
    begun, count, firsts = time.perf_counter(), 0, []
    turn = 0
    while time.perf_counter() < end:
        turn += 1
        first, events = await ask(address, "m", f"{turn}: one day, the ", 64)
        firsts.append(first * 1000)
        count += events
    return count / (time.perf_counter() - begun), firsts


async def together(address: str, seconds: float) -> dict[str, Any]:
    """Return the chat's figures alone and while 1,000 texts at a time are embedded."""
    await ask(address, "m", "Hello", 4)
    alone = await chat(address, seconds)
    done = [0]

    async def embed() -> None:
        async with httpx2.AsyncClient(timeout=300) as client:
            while True:
                inputs = texts(30, 1000, done[0])
                body = {"model": "m", "input": inputs, "encoding_format": "base64"}
                reply = await client.post(f"{address}/v1/embeddings", json=body)
                assert reply.status_code == 200, reply.text[:200]
                done[0] += 1

    task = asyncio.create_task(embed())
    await asyncio.sleep(0.5)
    during = await chat(address, seconds)
    is_embedding = not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert is_embedding
    return {
        "tokens/s alone": alone[0], "tokens/s during": during[0],
        "share of half": during[0] / (alone[0] / 2),
        "first token alone, ms": statistics.median(alone[1]),
        "first token during, ms": statistics.median(during[1]),
        "later, ms": statistics.median(during[1]) - statistics.median(alone[1]),
        "later at most, ms": max(during[1]) - statistics.median(alone[1]),
    }  # fmt: skip


def during(model: Path, repeats: int) -> str:
    """Return the table of a chat during embeddings."""
    found = []
    for _ in range(repeats):
        with latimer(model, "--embeddings") as address:
            found.append(asyncio.run(together(address, 6)))
            sys.stderr.write(json.dumps(found[-1]) + "\n")
    rows = [f"| {name} | {statistics.median(one[name] for one in found):,.2f} |"
            for name in found[0]]  # fmt: skip
    return "\n".join(["| | median |", "|---|--:|", *rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sentence-transformers", metavar="PYTHON")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--model", choices=["demo", "110m"], default="demo")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if given.chat:
            shown = during(model_of(given.model, name), given.repeats)
        else:
            shown = compare(Path(name), given.repeats, given.sentence_transformers)
    sys.stdout.write(shown + "\n")
