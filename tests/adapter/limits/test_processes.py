"""Tests that limits hold over three processes of `latimer serve` that share a database."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
from latimer.adapter.limits.config import digest_of
from latimer.adapter.limits.shared import LEASE_SECONDS
from support.servers import free_port

PROCESSES = 3
CONFIG = """
[keys.requests]
digest = "{requests}"
requests_per_minute = 120

[keys.tokens]
digest = "{tokens}"
tokens_per_minute = 3000

[keys.places]
digest = "{places}"
concurrent = 3

[admission]
store = "{store}"
unavailable = "refuse"
"""
COMPLETIONS = "/v1/completions"
# The most tokens that a request reserves, with those that another one may not give back.
TOKENS = 32
# Longer than the test takes to end the process that runs it.
LONG = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@contextlib.asynccontextmanager
async def servers(
    folder: Path, store: str
) -> AsyncIterator[list[tuple[asyncio.subprocess.Process, str]]]:
    """Run three servers with the same keys, and yield each with its address."""
    file = folder / "latimer.toml"
    digests = {name: digest_of(f"sk-{name}") for name in ("requests", "tokens", "places")}
    file.write_text(CONFIG.format(store=store, **digests))
    found = []
    try:
        for _ in range(PROCESSES):
            port = free_port()
            process = await asyncio.create_subprocess_exec(
                "latimer", "serve", "--config", str(file), "--port", str(port), "--wait",
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            found.append((process, f"http://127.0.0.1:{port}"))
        for process, address in found:
            assert process.stderr is not None
            lines = [(await process.stderr.readline()).decode() for _ in range(2)]
            assert "counts the limits of keys in" in lines[0], lines
            assert address in lines[1], lines
        yield found
    finally:
        for process, _ in found:
            if process.returncode is None:
                process.kill()
            # `wait` never returns while the pipe holds more lines than asyncio reads ahead.
            await process.communicate()


class Admitted(NamedTuple):
    """The requests and tokens that a key was admitted for, and the answers that came too late.

    A store that answers too late is a 503, as `unavailable = "refuse"` says. It may have counted
    the request, and may have lost what another one gave back.
    """

    requests: int
    tokens: int
    late: int


async def hammer(address: str, key: str) -> Admitted:
    """Send requests until the key has nothing left."""
    count = tokens = refused = late = 0
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": "Hello", "max_tokens": 10, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
        while refused < 5:
            reply = await client.post(COMPLETIONS, json=body)
            if reply.status_code == 200:
                count, refused = count + 1, 0
                tokens += reply.json()["usage"]["total_tokens"]
            elif reply.status_code == 503:
                late += 1
                await asyncio.sleep(1)
            else:
                # Requests that run have reserved more than they will have used.
                assert reply.status_code == 429, reply.text
                refused += 1
                await asyncio.sleep(0.1)
    return Admitted(count, tokens, late)


async def hold(client: httpx2.AsyncClient, stack: contextlib.AsyncExitStack) -> None:
    """Begin three streams, which take all places of their key; again if the store is late."""
    for _ in range(20):
        async with contextlib.AsyncExitStack() as begun:
            streams = (client.stream("POST", COMPLETIONS, json=LONG) for _ in range(3))
            replies = await asyncio.gather(*map(begun.enter_async_context, streams))
            if all(reply.status_code == 200 for reply in replies):
                stack.push_async_exit(begun.pop_all())
                return
            assert {reply.status_code for reply in replies} <= {200, 503}
        await asyncio.sleep(1)
    raise AssertionError("the store does not answer")


async def answered(client: httpx2.AsyncClient) -> int:
    """Return the status of a request that the store has judged; a busy machine delays that."""
    for _ in range(20):
        reply = await client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1})
        if reply.status_code != 503:
            break
        await asyncio.sleep(1)
    return reply.status_code


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["redis", "postgresql"])
async def test_limits_hold_over_processes(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Three processes admit the limit together, within 2 %, also after one of them was killed."""
    url: str = request.getfixturevalue(f"{kind}_url")
    async with servers(tmp_path, url) as running:
        for key, limit, kind, one in (
            ("sk-requests", 120, "requests", 1), ("sk-tokens", 3_000, "tokens", TOKENS),
        ):  # fmt: skip
            began = time.monotonic()
            found = await asyncio.gather(
                *(hammer(address, key) for _, address in running for _ in range(2))
            )
            # The window of a minute has not moved on.
            assert time.monotonic() - began < 59
            assert all(each.requests for each in found)
            total = sum(getattr(each, kind) for each in found)
            late = sum(each.late for each in found)
            assert 0.98 * limit - late * one <= total <= limit
        # The streams of a killed process keep their places until their leases expire.
        process, address = running[0]
        headers = {"authorization": "Bearer sk-places"}
        async with (
            httpx2.AsyncClient(base_url=address, headers=headers, timeout=60) as client,
            contextlib.AsyncExitStack() as stack,
        ):
            await hold(client, stack)
            process.kill()
            await process.communicate()
            killed = time.monotonic()
        async with httpx2.AsyncClient(base_url=running[1][1], headers=headers) as client:
            assert await answered(client) == 429
            while await answered(client) == 429:
                assert time.monotonic() - killed < LEASE_SECONDS + 5
                await asyncio.sleep(0.5)
            assert time.monotonic() - killed > LEASE_SECONDS / 2
