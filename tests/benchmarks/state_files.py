"""Measure what a conversation gains from saved prompts on disk (`--cache-dir`).

    python tests/benchmarks/state_files.py [--model demo|110m|FILE] [--tokens 4000]

Results are seconds to the first token of a conversation's first turn, of its next turn from the KV
cache, of the same after a restart without and with the folder, and the bytes of its file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.engine import model_of
from latimer.backends.base import Generation, Prompt, Sampling
from latimer.backends.llama_cpp import LlamaCpp


async def first(backend: LlamaCpp, ids: list[int]) -> float:
    """Return the seconds to the first token of a prompt."""
    job = Generation(Prompt(tuple(ids)), 1, sampling=Sampling(0.0, extras={"ignore_eos": True}))
    start = time.perf_counter()
    async with backend.open(job) as batches:
        async for _ in batches:
            return time.perf_counter() - start
    raise AssertionError


async def measure(path: Path, tokens: int, folder: Path) -> dict[str, float]:
    """Return all figures."""
    turn = [100 + number % 200 for number in range(tokens)]
    longer = [*turn, *range(50, 60)]
    found: dict[str, float] = {}

    async def run(options: dict[str, Any], **prompts: list[int]) -> None:
        async with aclosing(LlamaCpp(path, context=2 * tokens, **options)) as backend:
            await first(backend, [50])
            for name, ids in prompts.items():
                found[name] = round(await first(backend, ids), 3)

    await run({"cache_dir": folder}, first_turn=turn, next_turn=longer)
    await run({}, restarted_without=longer)
    await run({"cache_dir": folder}, restarted_with=longer)
    return found


def main() -> None:
    """Run the measurement and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="110m")
    parser.add_argument("--tokens", type=int, default=4000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(given.model, folder)
        cache = Path(folder) / "cache"
        found = asyncio.run(measure(path, given.tokens, cache))
        found["file_bytes"] = max(file.stat().st_size for file in cache.iterdir())
        print(json.dumps(found))


if __name__ == "__main__":
    main()
