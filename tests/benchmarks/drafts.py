"""Compare the speed of the in-process engine with and without drafts, with one client.

    python tests/benchmarks/drafts.py [--model 110m|FILE] [--repeats 5]

A small model cannot edit code. So a regular expression forces each answer: a file with a renamed
function, and a summary that quotes its source. The free text is sampled. Each token is evaluated
and sampled as in any answer. The runs with and without drafts alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import calls
from benchmarks.engine import model_of
from latimer.backends.base import Finish, Generation, Grammar, Prompt, Sampling, Text
from latimer.backends.llama_cpp import LlamaCpp

CODE = inspect.getsource(calls.Engine) + inspect.getsource(calls.Wire)
EDITED = CODE.replace("_burst", "_at_once").replace("Wire", "Cable")
SOURCE = (Path(__file__).parent.parent.parent / "docs" / "engine.md").read_text()[:3000]
LINES = [line for line in SOURCE.splitlines() if len(line) > 100]
QUOTES = "The page says three things. " + " It also says: ".join(line[:200] for line in LINES[:3])
# Whether each prompt has the text that the answer has to be.
TASKS: dict[str, tuple[str, str | None]] = {
    "code edit": (f"Rename a function in this file:\n{CODE}\nThe new file:\n", EDITED),
    "summary with quotes": (f"{SOURCE}\nSummarize this page, with quotes.\n", QUOTES),
    "free text": ("Tell a story of a cat and a dog.\n", None),
}
TOKENS = 256


async def speed(backend: LlamaCpp, task: str) -> tuple[float, float]:
    """Return the tokens per second after the first one, and the share of drafted tokens."""
    prompt, answer = TASKS[task]
    grammar = None if answer is None else Grammar("regex", re.escape(answer), "regex")
    sampling = Sampling(1.0, extras={"ignore_eos": answer is None})
    job = Generation(Prompt(Text(prompt)), TOKENS, sampling=sampling, grammar=grammar)
    start, count, accepted = 0.0, 0, 0
    async with backend.open(job) as batches:
        async for batch in batches:
            start = start or time.perf_counter()
            for event in batch:
                if isinstance(event, Finish):
                    count, accepted = event.completion_tokens, event.accepted_tokens
    return (count - 1) / (time.perf_counter() - start), accepted / count


async def main() -> None:
    """Print a table of medians."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--model", default="110m", help="demo, 110m, or a file")
    options.add_argument("--repeats", type=int, default=5)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(arguments.model, folder)
        engines = [LlamaCpp(path, context=8192, prompt_lookup=drafts) for drafts in (False, True)]
        sys.stdout.write("| | without | with drafts | ratio | drafted |\n|---|--:|--:|--:|--:|\n")
        for task in TASKS:
            found = [[await speed(one, task) for one in engines] for _ in range(arguments.repeats)]
            before, after = (statistics.median(run[side][0] for run in found) for side in (0, 1))
            share = statistics.median(run[1][1] for run in found)
            row = f"| {task} | {before:.0f} | {after:.0f} | {after / before:.2f} | {share:.0%} |\n"
            sys.stdout.write(row)
            sys.stdout.flush()
        for one in engines:
            await one.aclose()


if __name__ == "__main__":
    asyncio.run(main())
