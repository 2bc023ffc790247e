"""Compare log-probabilities with the model's own, and the time to score with that to generate.

    python tests/benchmarks/logprobs.py exactness [--texts 200]
    python tests/benchmarks/logprobs.py speed [--tokens 512] [--rounds 5] [--model MODEL.gguf]

`exactness` compares engines, weights and flags. The reference is one plain `llama_decode` without
flash attention, with 32-bit memory and a log-softmax in double precision. The texts are those of
the fidelity tests, alone and 8 at once. The second table generates as many answers in process,
alone and among fifteen others, and compares their texts and log-probabilities.

`speed` runs llama-servers with one slot, two and four on one machine. The server generates the
tokens by itself (`ignore_eos`). Latimer's backend scores as many, and scores a text in which every
second token is part of a character. The in-process engine scores them too, compared with a bare
`llama_decode`. Results are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import gguf
from latimer.backends.base import Backend, Generation, Prompt, PromptTokens, Text, TokenIds
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_server import LlamaServer
from support import gguf_files
from support.reference import Reference, apart, engines, prompt_tokens, reference
from support.servers import llama_server
from support.texts import demo_texts


async def differences(backend: Backend, truth: Reference, text: str) -> list[float]:
    """Return the difference of each token's logprob from the reference."""
    tokens = await prompt_tokens(backend, Text(text))
    expected = truth.scores([token.id for token in tokens])
    got = [token.logprob or 0.0 for token in tokens[1:]]
    return [abs(a - b) for a, b in zip(got, expected, strict=True)]


def settings() -> Iterator[tuple[str, Path, bool]]:
    """Yield the first cells of a row, a model, and True for exact arithmetic."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f32.gguf"
        plain = gguf_files.copy(DEMO_MODEL, path, kind=gguf.GGMLQuantizationType.F32)
        for name, model in (("F32", plain), ("Q8_0", DEMO_MODEL)):
            yield f"| {name} | exact", model, True
            yield f"| {name} | default", model, False


async def prompts(count: int) -> None:
    """Print the table of prompts."""
    texts = demo_texts(count)
    print("| weights | flags | engine | at once | mean | largest |\n|---|---|---|--:|--:|--:|")
    for row, model, exact in settings():
        with reference(model) as truth:
            async with engines(model, exact=exact) as backends:
                for engine, backend in backends.items():
                    for at_once in (1, 8):
                        found = await run(backend, truth, texts, at_once)
                        mean, worst = statistics.fmean(found), max(found)
                        cells = f"{engine} | {at_once} | {mean:.1e} | {worst:.1e}"
                        print(f"{row} | {cells} |", flush=True)


async def neighbours(count: int) -> None:
    """Print the differences of generated answers alone and among fifteen others."""
    print("\n| weights | flags | requests | other texts | largest |\n|---|---|--:|--:|--:|")
    for row, model, exact in settings():
        async with aclosing(LlamaCpp(model, context=2048, exact=exact)) as backend:
            found = await apart(backend, count)
        print(f"{row} | {found.requests} | {found.texts} | {found.worst:.1e} |", flush=True)


async def run(backend: Backend, truth: Reference, texts: list[str], at_once: int) -> list[float]:
    """Return the differences of all tokens of all texts."""
    found: list[float] = []
    for start in range(0, len(texts), at_once):
        part = texts[start : start + at_once]
        for values in await asyncio.gather(*(differences(backend, truth, t) for t in part)):
            found += values
    return found


async def score(backend: Backend, ids: TokenIds) -> None:
    """Score a prompt."""
    async with backend.open(Generation(Prompt(ids, logprobs=1), 0)) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, PromptTokens):
                    assert len(event.tokens) == len(ids)


async def generate(backend: LlamaServer, prompt: TokenIds, count: int) -> None:
    """Generate tokens on the server itself, without a stream."""
    payload = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "cache_prompt": False}
    body = json.dumps(payload).encode()
    async with await backend.server.client.send("POST", "/completion", body) as response:
        assert json.loads(await response.aread())["tokens_predicted"] == count


async def median(work: Callable[[], Awaitable[None]], rounds: int) -> float:
    """Return the median duration in milliseconds, after one warm-up round."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        await work()
        times.append((time.perf_counter() - start) * 1000)
    return round(statistics.median(times[1:]), 1)


async def prompt_of(backend: Backend, count: int, *, pieces: bool) -> TokenIds:
    """Return the ids of a text, with or without partial characters."""
    text = " ".join(demo_texts(count // 4))
    ids = await backend.tokenize(text, add_special=False, parse_special=True)
    spelled = await backend.token_bytes()
    assert spelled is not None
    plain = [token for token in ids if spelled[token].isascii() and spelled[token]]
    if not pieces:
        return tuple(plain[:count])
    character = await backend.tokenize("漢", add_special=False, parse_special=True)
    mixed = [token for at, one in enumerate(plain) for token in (one, character[at % 3])]
    return tuple(mixed[:count])


async def measure(model: Path, count: int, rounds: int) -> dict[str, Any]:
    """Return all figures."""
    figures: dict[str, Any] = {"machine": platform.platform(), "tokens": count}
    for slots in (1, 2, 4):
        with llama_server(model, slots=slots, context=2048) as address:
            backend = LlamaServer(address)
            plain = await prompt_of(backend, count, pieces=False)
            mixed = await prompt_of(backend, count, pieces=True)
            generated = await median(lambda: generate(backend, plain[:1], count), rounds)  # noqa: B023
            scored = await median(lambda: score(backend, plain), rounds)  # noqa: B023
            in_pieces = await median(lambda: score(backend, mixed), rounds)  # noqa: B023
            figures[f"{slots} slots"] = {
                "generate_ms": generated,
                "score_ms": scored,
                "times": round(scored / generated, 2),
                "score_pieces_ms": in_pieces,
                "pieces_times": round(in_pieces / generated, 2),
            }
            await backend.aclose()
    local = LlamaCpp(model)
    scored = await median(lambda: score(local, plain), rounds)
    await local.aclose()
    decode, close = bare(model, plain)
    decoded = await median(decode, rounds)
    close()
    times = round(scored / decoded, 2)
    figures["in process"] = {"score_ms": scored, "decode_ms": decoded, "times": times}
    return figures


def bare(model: Path, ids: TokenIds) -> tuple[Callable[[], Awaitable[None]], Callable[[], None]]:
    """Return a function that only decodes tokens with all logits, and one to free the model."""
    options = Options()
    loaded = LoadedModel(model, options)
    context = Context(loaded, options, 2048)

    async def decode() -> None:
        context.remove(0)
        for start in range(0, len(ids), options.batch):
            part = ids[start : start + options.batch]
            context.add(0, start, part, len(part))
            context.decode()
            context.logits(0, len(part))

    def close() -> None:
        context.close()
        loaded.close()

    return decode, close


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    exactness = commands.add_parser("exactness")
    exactness.add_argument("--texts", type=int, default=200)
    speed = commands.add_parser("speed")
    speed.add_argument("--tokens", type=int, default=512)
    speed.add_argument("--rounds", type=int, default=5)
    speed.add_argument("--model", type=Path, default=DEMO_MODEL)
    arguments = parser.parse_args()
    if arguments.command == "exactness":
        asyncio.run(prompts(arguments.texts))
        asyncio.run(neighbours(arguments.texts))
    else:
        found = asyncio.run(measure(arguments.model, arguments.tokens, arguments.rounds))
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
