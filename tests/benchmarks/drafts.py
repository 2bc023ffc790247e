"""Compare the speed of the in-process engine with and without drafts.

    python tests/benchmarks/drafts.py [--model 110m|FILE] [--repeats 5]

Prompt lookup: a small model cannot edit code. So a grammar forces the tokens of each answer: a file
with a renamed function, and a summary that quotes its source. The free text is sampled. Each token
is evaluated and sampled as in any answer.

Draft model: the larger model computes what the demo model does, with 110 million weights. The demo
model drafts for it, or a copy with noise in its weights, which it agrees with less often.

The runs with and without drafts alternate. Each has a process's only engine: OpenMP's threads wait
in another way while there are more of them than cores. The first run of an engine is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

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


class Question(NamedTuple):
    """A prompt, the answer that it gets, which is free if empty, and the temperature."""

    prompt: str
    answer: str = ""
    temperature: float = 1.0

    async def job(self, backend: LlamaCpp) -> Generation:
        """Return the job for an engine."""
        sampling = Sampling(self.temperature, extras={"ignore_eos": not self.answer})
        job = Generation(Prompt(Text(self.prompt)), TOKENS, sampling=sampling)
        if self.answer:
            tokens = await backend.tokenize(self.answer, add_special=False, parse_special=False)
            rule = " ".join(f"<[{token}]>" for token in tokens[:TOKENS])
            job.grammar = Grammar("lark", f"start: {rule}", "grammar", is_own=True)
        return job


STORY = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
REPEATED = {
    "code edit": Question(f"Rename a function in this file:\n{CODE}\nThe new file:\n", EDITED),
    "summary with quotes": Question(f"{SOURCE}\nSummarize this page, with quotes.\n", QUOTES),
    "free text": Question("Tell a story of a cat and a dog.\n"),
}
STORIES = {"greedy": Question(STORY, temperature=0.0), "temperature 1": Question(STORY)}


async def speed(backend: LlamaCpp, job: Generation, clients: int) -> tuple[float, float]:
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


async def turn(
    make: Callable[[], LlamaCpp], question: Question, clients: int
) -> tuple[float, float]:
    """Return the speed of an engine of its own, after a run that loads it."""
    backend = make()
    job = await question.job(backend)
    await speed(backend, job, clients)
    found = await speed(backend, job, clients)
    await backend.aclose()
    return found


async def compare(
    name: str,
    engines: Sequence[Callable[[], LlamaCpp]],
    question: Question,
    clients: int,
    repeats: int,
) -> None:
    """Print a row with the medians of engines without and with drafts."""
    found = [[await turn(one, question, clients) for one in engines] for _ in range(repeats)]
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
        lookups = [
            partial(LlamaCpp, path, context=16384, prompt_lookup=drafts) for drafts in (False, True)
        ]
        sys.stdout.write(HEAD.format("prompt lookup"))
        for name, question in REPEATED.items():
            for clients in given.clients:
                await compare(name, lookups, question, clients, given.repeats)
        large = gguf_files.widened(DEMO_MODEL, Path(folder) / "wide.gguf", INNER)
        noisy = gguf_files.noisy(DEMO_MODEL, Path(folder) / "noisy.gguf", KIND)
        plain = partial(LlamaCpp, large, context=8192, prompt_lookup=False)
        sys.stdout.write("\n" + HEAD.format("draft model"))
        for title, draft in (("the same", DEMO_MODEL), ("with noise", noisy)):
            pair = plain, partial(plain, draft_model=draft)
            for name, question in STORIES.items():
                for clients in given.clients:
                    await compare(f"{title}, {name}", pair, question, clients, given.repeats)


if __name__ == "__main__":
    asyncio.run(main())
