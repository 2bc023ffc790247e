"""Compare the time to the first token of a conversation's turns with llama-server's.

    python tests/benchmarks/turns.py [--memory recurrent window] [--instructions 2000] [--turns 6]
        [--conversations 3] [--width 768] [--model FILE]

The models have random weights and a memory that cannot be cut at any length: a recurrent state in
all layers but the last (`recurrent`), or a window of 512 tokens in every other layer (`window`).
The conversations have the same instructions. Each turn has the tokens of the one before it, a
short answer without its reasoning, and a question. Both servers have two threads and two slots, and
are sent the same tokens. The first figure of a row is that of its first turn; the second is the
median of its other turns, in milliseconds. Both are the medians of `--repeats` starts of each
server, which take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.mrope import QWEN35, Size, language_model
from support.servers import command, llama_server
from support.windowed import windowed

# The dimensions of a head of 64 that turn by time, height and width.
SECTIONS = (11, 11, 10, 0)
# Random tokens are letters of the model's vocabulary.
LETTERS = range(5, 250)
# The last two tokens of a prompt stand for the beginning of reasoning.
START = (7, 8, 9, 10)
ANSWER, QUESTION = 40, 60


def model_of(memory: str, width: int, folder: str) -> Path:
    """Write a model of a kind of memory."""
    size = Size(width, width // 64, 12, 65_536, SECTIONS)
    path = Path(folder) / f"{memory}.gguf"
    return (
        language_model(path, QWEN35, size) if memory == "recurrent" else windowed(path, 512, size)
    )


def first_token(client: httpx2.Client, url: str, body: dict[str, Any]) -> float:
    """Return the milliseconds to the first token of a stream, which is read to its end."""
    begun, first = time.perf_counter(), 0.0
    # llama-server closes its connections.
    headers = {"connection": "close"}
    with client.stream("POST", url, json=body, headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data:") and not first:
                first = time.perf_counter() - begun
    return 1000 * first


def converse(
    url: str, is_native: bool, instructions: Sequence[int], turns: int, seed: int
) -> list[float]:
    """Return the milliseconds to the first token of each turn of a conversation."""
    words = random.Random(seed)
    fields = {"stream": True, "temperature": 0, "ignore_eos": True}
    prompt = [*instructions, *words.choices(LETTERS, k=QUESTION), *START]
    found = []
    with httpx2.Client(timeout=600) as client:
        for _ in range(turns):
            if is_native:
                body = {**fields, "prompt": prompt, "n_predict": 32}
                found.append(first_token(client, f"{url}/completion", body))
            else:
                body = {**fields, "model": "any", "prompt": prompt, "max_tokens": 32}
                found.append(first_token(client, f"{url}/v1/completions", body))
            prompt = [*prompt[:-2], *words.choices(LETTERS, k=ANSWER + QUESTION), *START]
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs="+", default=["recurrent", "window"])
    parser.add_argument("--instructions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    instructions = random.Random(0).choices(LETTERS, k=given.instructions)
    cells = 2 * (given.instructions + (given.turns + 1) * (ANSWER + QUESTION + 32))
    options = ("--context", str(cells), "--parallel", "2", "--threads", "2", "--any-model")
    print("| memory | conversation | Latimer, first | others | llama-server, first | others |")
    print("|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for memory in [str(given.model)] if given.model else given.memory:
            path = given.model or model_of(memory, given.width, folder)
            rows: dict[int, list[list[float]]] = {}
            for _ in range(given.repeats):
                with command(str(path), *options) as (_, url):
                    ours = [
                        converse(url, False, instructions, given.turns, seed)
                        for seed in range(given.conversations)
                    ]
                with llama_server(path, "-t", "2", slots=2, context=cells // 2) as url:
                    theirs = [
                        converse(url, True, instructions, given.turns, seed)
                        for seed in range(given.conversations)
                    ]
                for seed, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                    figures = [
                        *(one[0], statistics.median(one[1:])),
                        *(other[0], statistics.median(other[1:])),
                    ]
                    rows.setdefault(seed + 1, []).append(figures)
            for number, runs in rows.items():
                medians = (statistics.median(column) for column in zip(*runs, strict=True))
                words = " | ".join(f"{value:.0f}" for value in medians)
                print(f"| {memory} | {number} | {words} |", flush=True)


if __name__ == "__main__":
    main()
