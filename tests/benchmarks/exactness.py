"""Compare log-probabilities with the model's own, by engine, weights and flags.

    python tests/benchmarks/exactness.py [--texts 200]

The reference is one plain `llama_decode` without flash attention, with 32-bit memory and a
log-softmax in double precision. The texts are those of the fidelity tests, alone and 8 at once.
The second part generates as many answers in process, alone and among fifteen others, and compares
their texts and log-probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import gguf
from latimer.backends.base import Backend, Text
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from support import gguf_files
from support.reference import Reference, apart, engines, prompt_tokens, reference
from support.texts import demo_texts


async def differences(backend: Backend, truth: Reference, text: str) -> list[float]:
    """Return the difference of each token's logprob from the reference."""
    tokens = await prompt_tokens(backend, Text(text))
    expected = truth.scores([token.id for token in tokens])
    got = [token.logprob or 0.0 for token in tokens[1:]]
    return [abs(a - b) for a, b in zip(got, expected, strict=True)]


async def main(count: int) -> None:
    """Print the table of prompts."""
    texts = demo_texts(count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f32.gguf"
        plain = gguf_files.copy(DEMO_MODEL, path, kind=gguf.GGMLQuantizationType.F32)
        print("| weights | flags | engine | at once | mean | largest |\n|---|---|---|--:|--:|--:|")
        for name, model in (("F32", plain), ("Q8_0", DEMO_MODEL)):
            for exact in (True, False):
                with reference(model) as truth:
                    async with engines(model, exact=exact) as backends:
                        for engine, backend in backends.items():
                            for at_once in (1, 8):
                                found = await run(backend, truth, texts, at_once)
                                flags = "exact" if exact else "default"
                                mean, worst = statistics.fmean(found), max(found)
                                print(
                                    f"| {name} | {flags} | {engine} | {at_once} | {mean:.1e} "
                                    f"| {worst:.1e} |",
                                    flush=True,
                                )


async def neighbours(count: int) -> None:
    """Print the differences of generated answers alone and among fifteen others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f32.gguf"
        plain = gguf_files.copy(DEMO_MODEL, path, kind=gguf.GGMLQuantizationType.F32)
        print("\n| weights | flags | requests | other texts | largest |\n|---|---|--:|--:|--:|")
        for name, model in (("F32", plain), ("Q8_0", DEMO_MODEL)):
            for exact in (True, False):
                async with aclosing(LlamaCpp(model, context=2048, exact=exact)) as backend:
                    found = await apart(backend, count)
                flags = "exact" if exact else "default"
                print(
                    f"| {name} | {flags} | {found.requests} | {found.texts} | {found.worst:.1e} |",
                    flush=True,
                )


async def run(backend: Backend, truth: Reference, texts: list[str], at_once: int) -> list[float]:
    """Return the differences of all tokens of all texts."""
    found: list[float] = []
    for start in range(0, len(texts), at_once):
        part = texts[start : start + at_once]
        for values in await asyncio.gather(*(differences(backend, truth, t) for t in part)):
            found += values
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=200)
    texts = parser.parse_args().texts
    asyncio.run(main(texts))
    asyncio.run(neighbours(texts))
