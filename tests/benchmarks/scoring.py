"""Compare the time to score a prompt with the time to generate as many tokens.

    python tests/benchmarks/scoring.py [--tokens 512] [--rounds 5] [--model MODEL.gguf]

All measurements run together on one machine, for llama-servers with one slot, two and four. The
server generates the tokens by itself (`ignore_eos`). Latimer's backend scores as many, and scores a
text in which every third token is part of a character. The in-process engine scores them too,
compared with a bare `llama_decode`. Results are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from latimer.backends.base import Prompt

sys.path.insert(0, str(Path(__file__).parent.parent))

from latimer.backends.base import Backend, Generation, PromptTokens, TokenIds
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_server import LlamaServer
from support.servers import llama_server
from support.texts import demo_texts


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
    async with await backend.server.client.send(
        "POST", "/completion", json.dumps(payload).encode()
    ) as reply:
        assert json.loads(await reply.aread())["tokens_predicted"] == count


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
    spelled = await backend.pieces()
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
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.model, arguments.tokens, arguments.rounds))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
