"""Compare the speed of the in-process engine with and without drafts.

    python tests/benchmarks/drafts.py [--model 110m|FILE] [--repeats 5]

Prompt lookup: a small model cannot edit code. So a regular expression forces each answer: a file
with a renamed function, and a summary that quotes its source. The free text is sampled. Each token
is evaluated and sampled as in any answer.

Draft model: the larger model computes what the demo model does, with 110 million weights. The demo
model drafts for it, or a copy with noise in its weights, which it agrees with less often.

The runs with and without drafts alternate.
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
from collections.abc import Sequence
from pathlib import Path

import gguf

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import calls
from benchmarks.engine import model_of
from latimer.backends.base import Finish, Generation, Grammar, Prompt, Sampling, Text
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from support import gguf_files

CODE = inspect.getsource(calls.Engine) + inspect.getsource(calls.Wire)
EDITED = CODE.replace("_burst", "_at_once").replace("Wire", "Cable")
SOURCE = (Path(__file__).parent.parent.parent / "docs" / "engine.md").read_text()[:3000]
LINES = [line for line in SOURCE.splitlines() if len(line) > 100]
QUOTES = "The page says three things. " + " It also says: ".join(line[:200] for line in LINES[:3])
TOKENS = 256
# The length of the feed-forward layers that give the demo model 110 million weights.
INNER, KIND = 48_000, gguf.GGMLQuantizationType.Q8_0


def job_of(prompt: str, answer: str | None = None, temperature: float = 1.0) -> Generation:
    """Return a job with a forced answer, or with a free one."""
    grammar = None if answer is None else Grammar("regex", re.escape(answer), "regex")
    sampling = Sampling(temperature, extras={"ignore_eos": answer is None})
    return Generation(Prompt(Text(prompt)), TOKENS, sampling=sampling, grammar=grammar)


STORY = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
REPEATED = {
    "code edit": job_of(f"Rename a function in this file:\n{CODE}\nThe new file:\n", EDITED),
    "summary with quotes": job_of(f"{SOURCE}\nSummarize this page, with quotes.\n", QUOTES),
    "free text": job_of("Tell a story of a cat and a dog.\n"),
}
STORIES = {"greedy": job_of(STORY, temperature=0.0), "temperature 1": job_of(STORY)}


async def speed(backend: LlamaCpp, job: Generation, clients: int = 1) -> tuple[float, float]:
    """Return the tokens per second after the first one, and the share of drafted tokens."""
    starts: list[float] = []
    count = accepted = 0

    async def client() -> None:
        nonlocal count, accepted
        begun = False
        async with backend.open(job) as batches:
            async for batch in batches:
                if not begun:
                    begun = True
                    starts.append(time.perf_counter())
                for event in batch:
                    if isinstance(event, Finish):
                        count += event.completion_tokens
                        accepted += event.accepted_tokens

    await asyncio.gather(*(client() for _ in range(clients)))
    return (count - clients) / (time.perf_counter() - min(starts)), accepted / count


async def compare(
    name: str, engines: Sequence[LlamaCpp], job: Generation, clients: int, repeats: int
) -> None:
    """Print a row with the medians of engines without and with drafts."""
    found = [[await speed(one, job, clients) for one in engines] for _ in range(repeats)]
    before, after = (statistics.median(run[side][0] for run in found) for side in (0, 1))
    ratios = sorted(run[1][0] / run[0][0] for run in found)
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    share = statistics.median(run[1][1] for run in found)
    sys.stdout.write(
        f"| {name} | {clients} | {before:.0f} | {after:.0f} | {ratio} | {share:.0%} |\n"
    )
    sys.stdout.flush()


HEAD = "| {} | clients | without | with | ratio | drafted |\n|---|--:|--:|--:|--:|--:|\n"


async def main() -> None:
    """Print two tables of tokens per second."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--model", default="110m", help="demo, 110m, or a file")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(given.model, folder)
        engines = [LlamaCpp(path, context=16384, prompt_lookup=drafts) for drafts in (False, True)]
        sys.stdout.write(HEAD.format("prompt lookup"))
        for name, job in REPEATED.items():
            for clients in given.clients:
                await compare(name, engines, job, clients, given.repeats)
        for one in engines:
            await one.aclose()
        large = gguf_files.widened(DEMO_MODEL, Path(folder) / "wide.gguf", INNER)
        noisy = gguf_files.noisy(DEMO_MODEL, Path(folder) / "noisy.gguf", KIND)
        engines = [
            LlamaCpp(large, context=8192, prompt_lookup=False, draft_model=draft)
            for draft in (None, DEMO_MODEL, noisy)
        ]
        sys.stdout.write("\n" + HEAD.format("draft model"))
        for title, draft in (("the same", engines[1]), ("with noise", engines[2])):
            for name, job in STORIES.items():
                for clients in given.clients:
                    pair = (engines[0], draft)
                    await compare(f"{title}, {name}", pair, job, clients, given.repeats)
        for one in engines:
            await one.aclose()


if __name__ == "__main__":
    asyncio.run(main())
