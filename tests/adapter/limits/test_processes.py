"""Tests that limits hold over three processes of `latimer serve` that share a database."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

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
            await process.wait()


async def hammer(address: str, key: str) -> tuple[int, int]:
    """Send requests until the key has nothing left; return the admitted ones and their tokens."""
    count = tokens = refused = 0
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": "Hello", "max_tokens": 10, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
        while refused < 5:
            reply = await client.post(COMPLETIONS, json=body)
            if reply.status_code == 200:
                count, refused = count + 1, 0
                tokens += reply.json()["usage"]["total_tokens"]
            elif reply.status_code == 503:
                # The store answers late on a busy machine.
                await asyncio.sleep(1)
            else:
                # Requests that run have reserved more than they will have used.
                assert reply.status_code == 429, reply.text
                refused += 1
                await asyncio.sleep(0.1)
    return count, tokens


async def answered(client: httpx2.AsyncClient) -> int:
    """Return the status of a request that the store has judged; a busy machine delays that."""
    for _ in range(10):
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
        began = time.monotonic()
        for key, limit, index in (("sk-requests", 120, 0), ("sk-tokens", 3_000, 1)):
            found = await asyncio.gather(
                *(hammer(address, key) for _, address in running for _ in range(2))
            )
            assert all(count for count, _ in found)
            total = sum(one[index] for one in found)
            assert 0.98 * limit <= total <= limit
        # The window of a minute has not moved on.
        assert time.monotonic() - began < 59
        # The streams of a killed process keep their places until their leases expire.
        process, address = running[0]
        headers = {"authorization": "Bearer sk-places"}
        async with (
            httpx2.AsyncClient(base_url=address, headers=headers, timeout=60) as client,
            contextlib.AsyncExitStack() as stack,
        ):
            for _ in range(3):
                sent = client.stream("POST", COMPLETIONS, json=LONG)
                reply = await stack.enter_async_context(sent)
                assert reply.status_code == 200
            process.kill()
            await process.wait()
            killed = time.monotonic()
        async with httpx2.AsyncClient(base_url=running[1][1], headers=headers) as client:
            assert await answered(client) == 429
            while await answered(client) == 429:
                assert time.monotonic() - killed < LEASE_SECONDS + 5
                await asyncio.sleep(0.5)
            assert time.monotonic() - killed > LEASE_SECONDS / 2
