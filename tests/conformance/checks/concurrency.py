"""Concurrent requests: each gets its own answer (contract 10.86, 10.87)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ..check import check, expect
from ..raw import connected
from ..target import Api

C = "/completions"

ONE_OF_EIGHT = (
    "A right server fails with about 28q², where q is the probability that batching changes a "
    "text: 0.3 % for a q of 1 %. A server that mixes up two answers fails if their texts differ."
)
PROMPTS = [f"{number}, {number + 1}, {number + 2}," for number in range(1, 9)]


@check("concurrency.answers",
       "Of eight concurrent greedy completions, at least seven have the same text as when run "
       "alone.",
       "must", "10.86", alone=True, chance=ONE_OF_EIGHT)  # fmt: skip
async def answers(api: Api) -> None:
    async def ask(prompt: str) -> str:
        body = await api.complete(prompt, temperature=0, max_tokens=6)
        text: str = body["choices"][0]["text"]
        return text

    alone = [await ask(prompt) for prompt in PROMPTS]
    together = await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))
    different = [(a, b) for a, b in zip(alone, together, strict=True) if a != b]
    # One answer may differ, where two tokens are equally likely.
    expect(len(different) <= 1, f"expected the same texts, but got {different}")


@check("concurrency.echo",
       "Eight concurrent prompts with echo have the same log-probabilities, within 0.5, as when "
       "run alone.",
       "must", "10.86", alone=True)  # fmt: skip
async def echo(api: Api) -> None:
    async def score(prompt: str) -> list[float]:
        full = {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
        arrays = (await api.complete(prompt, **full))["choices"][0]["logprobs"]
        return [value or 0.0 for value in arrays["token_logprobs"]]

    alone = [await score(prompt) for prompt in PROMPTS]
    together = await asyncio.gather(*(score(prompt) for prompt in PROMPTS))
    for one, other in zip(alone, together, strict=True):
        differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
        expect(max(differences) < 0.5, f"expected {one}, but got {other}")


@check("concurrency.streams",
       "Of eight concurrent streams, each has one id, and at least seven the same text as when "
       "run alone.",
       "must", "10.86", alone=True, chance=ONE_OF_EIGHT)  # fmt: skip
async def streams(api: Api) -> None:
    async def ask(prompt: str) -> str:
        chunks = await api.complete_stream(prompt, temperature=0, max_tokens=6)
        ids = {chunk["id"] for chunk in chunks}
        expect(len(ids) == 1, f"expected one id in all chunks, but got {ids}")
        return "".join(c["choices"][0]["text"] for c in chunks if c["choices"])

    alone = [await ask(prompt) for prompt in PROMPTS]
    together = await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))
    different = [(a, b) for a, b in zip(alone, together, strict=True) if a != b]
    expect(len(different) <= 1, f"expected the same texts, but got {different}")


# In seconds: OpenAI's client does not retry after a longer `retry-after` (contract 1.5).
MAX_WAIT = 120


@check("concurrency.load",
       "Each of fifty concurrent requests is served, or rejected with 429 or 503 and a "
       "retry-after of at most 120 s.",
       "must", "10.87", alone=True, seconds=60)  # fmt: skip
async def load(api: Api) -> None:
    body = {"model": api.model, "prompt": "Hello", "max_tokens": 4}
    replies = await asyncio.gather(
        *(api.post("/completions", body, waits=False) for _ in range(50))
    )
    for reply in replies:
        if reply.status == 200:
            continue
        reply.error(429, 503)
        seconds, milliseconds = (reply.headers.get(f"retry-after{unit}") for unit in ("", "-ms"))
        expect(
            seconds or milliseconds, "expected a retry-after header on a rejection, but got none"
        )
        wait = float(milliseconds) / 1000 if milliseconds else float(seconds or 0)
        expect(wait <= MAX_WAIT, f"expected a wait of at most {MAX_WAIT} s, but got {wait:.0f} s")
    expect(
        any(reply.status == 200 for reply in replies),
        "expected at least one completion, but got fifty rejections",
    )


async def _leave(api: Api, seconds: float) -> None:
    """Close a long stream after some seconds."""
    body = {"model": api.model, "prompt": "Hello", "max_tokens": 400, "stream": True}
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), connected(api, "POST", C, body) as (reader, _):
            await reader.read()


async def _expect_served(api: Api, after: float = 0.0) -> None:
    """Send a short request after some seconds."""
    await asyncio.sleep(after)
    reply = await api.post(C, {"model": api.model, "prompt": "Hello", "max_tokens": 4})
    text = f"expected status 200, but got {reply.status}: {reply.text[:200]}"
    expect(reply.status == 200, text)


@check("concurrency.cancelled",
       "After twelve streams that were closed early, one after the other, the next request is "
       "served.",
       "must", "10.85 10.87", alone=True, seconds=60)  # fmt: skip
async def cancelled(api: Api) -> None:
    for seconds in (0.03, 0.1, 0.2) * 4:
        await _leave(api, seconds)
    await _expect_served(api)


@check("concurrency.cancelled-waiting",
       "Requests that wait are served, while twelve others that wait with them are cancelled.",
       "must", "10.85 10.87", alone=True, seconds=60)  # fmt: skip
async def cancelled_waiting(api: Api) -> None:
    await asyncio.gather(
        *(_leave(api, 0.1 + 0.016 * number) for number in range(12)),
        *(_expect_served(api, 0.06 * number) for number in range(6)),
    )
