"""Tests of many requests for few slots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpcore2
import httpx2
import pytest
from latimer.backends.base import Finish, Generation, Prompt, Sampling, Text
from latimer.backends.connection import Connection
from latimer.backends.errors import Busy
from latimer.backends.http import ConnectionPool, Request, Response
from latimer.backends.llama_server import LlamaServer
from latimer.backends.llama_server.embeddings import embedder
from latimer.backends.llama_server.server import QUESTIONS
from latimer.backends.queue import Ticket
from latimer.backends.streams import merge_streams
from support.jobs import run
from support.servers import canned, llama_server
from support.turns import FEW, turns_after_the_first

SPM = Path(__file__).parent.parent.parent / "models" / "spm.gguf"
SLOTS = 2
SHORT = Generation(Prompt(Text("a")), 2, sampling=Sampling(temperature=0.0))
LONG = replace(SHORT, max_tokens=300, sampling=Sampling(0.0, extras={"ignore_eos": True}))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server with two slots."""
    # One thread: two would wait for each other while other tests run in parallel.
    with llama_server(SPM, slots=SLOTS, context=512) as made:
        yield made


class Counted(ConnectionPool):
    """A pool that counts its concurrent requests."""

    running = most = 0

    async def handle_async_request(self, request: Request | httpcore2.Request) -> Response:
        """Send a request."""
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await super().handle_async_request(request)
        except BaseException:
            self.running -= 1
            raise

    def release(self, connection: Connection) -> None:
        """Take a connection back."""
        self.running -= 1
        super().release(connection)


async def test_choices_that_have_ended_count_with_those_that_are_cut(address: str) -> None:
    """The tokens of a request that is cut are those of all its choices, with one prompt."""
    ticket, ends = Ticket(), list[Finish]()
    job = replace(LONG, max_tokens=30, seeds=(1, 2, 3, 4, 5), ticket=ticket)
    backend = LlamaServer(address)
    async with backend.open(job) as batches:
        async for batch in batches:
            ends += [event for event in batch if isinstance(event, Finish)]
            if len(ends) >= SLOTS:
                break
    await backend.aclose()
    assert len(ends) < len(job.seeds)
    assert ticket.generated >= sum(end.completion_tokens for end in ends) >= 30 * SLOTS
    assert ticket.prompt == ends[0].prompt_tokens


async def test_hundreds_of_requests_open_few_connections(address: str) -> None:
    """400 concurrent requests use one connection per slot and two for other calls."""
    pool = Counted(address)
    backend = LlamaServer(address, client=pool)
    ids = await backend.tokenize("Hello", add_special=True, parse_special=True)
    jobs = [
        SHORT,
        replace(SHORT, prompt=Prompt(ids)),
        replace(SHORT, prompt=Prompt(Text("b", False))),
    ]
    found = await asyncio.gather(*(run(backend, jobs[i % 3]) for i in range(400)))
    assert all(finishes[0].completion_tokens == 2 for _, finishes in found)
    assert SLOTS <= pool.most <= SLOTS + QUESTIONS
    assert len(pool._idle) <= SLOTS + QUESTIONS
    await backend.aclose()


async def test_a_full_queue_is_busy_and_empties(address: str) -> None:
    """A full queue rejects a request with a time to retry after, and cancelled requests leave the
    queue."""
    backend = LlamaServer(address, max_waiting=3)
    await backend.model()
    tasks = [asyncio.create_task(run(backend, LONG)) for _ in range(SLOTS + 3)]
    await asyncio.sleep(0.05)
    with pytest.raises(Busy) as caught:
        await run(backend, SHORT)
    assert 0 < (caught.value.retry_after or 0) <= 60
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await run(backend, SHORT))[0][0]
    await backend.aclose()


async def test_a_large_request_does_not_hold_up_small_ones(address: str) -> None:
    """A small request runs before the 300 prompts of a large one are finished."""
    backend = LlamaServer(address, max_waiting=2)
    ticket = Ticket()
    done = 0

    async def large() -> None:
        nonlocal done
        jobs = [replace(SHORT, ticket=ticket, max_tokens=16) for _ in range(300)]
        async with merge_streams([backend.open(job) for job in jobs], ticket) as batches:
            async for batch in batches:
                done += sum(hasattr(event, "reason") for event in batch)

    task = asyncio.create_task(large())
    while not done:
        await asyncio.sleep(0.001)
    await run(backend, SHORT)
    assert done < 150
    await task
    assert done == 300
    await backend.aclose()


async def test_scoring_takes_turns_too(address: str) -> None:
    """Requests for log-probabilities of prompts and completions share the same few connections."""
    pool = Counted(address)
    backend = LlamaServer(address, client=pool)
    await backend.server.facts()
    pool.most = 0
    job = replace(
        SHORT, prompt=Prompt(Text("Hello there, little one " * 4), logprobs=1), logprobs=1
    )
    alone = await run(backend, job)
    found = await asyncio.gather(*(run(backend, job) for _ in range(20)))
    assert all(texts == alone[0] for texts, _ in found)
    assert pool.most <= SLOTS + QUESTIONS + 1
    await backend.aclose()


async def test_the_facts_of_a_server_change_no_answer(address: str) -> None:
    """Reading what is known about a server leaves the request alone that runs in its first slot."""
    body = {
        "prompt": [40] * 12, "n_predict": 400, "temperature": 0, "ignore_eos": True, "id_slot": 0,
    }  # fmt: skip
    first, second = LlamaServer(address), LlamaServer(address)
    async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
        # Its slot is free, so it may be named.
        alone = (await client.post("/completion", json=body)).json()["content"]
        await first.server.facts()
        running = asyncio.create_task(client.post("/completion", json=body))
        while not (await client.get("/slots")).json()[0]["is_processing"]:
            await asyncio.sleep(0)
        await second.server.facts()
        assert (await running).json()["content"] == alone
    await first.aclose()
    await second.aclose()


async def test_who_waits_for_the_facts_of_a_server_goes_on_at_once(address: str) -> None:
    """The first calls of many requests, which need what is known about a server, end together."""
    backend = LlamaServer(address)
    server = backend.server
    model = await backend.model()
    assert await turns_after_the_first(server.facts() for _ in range(64)) < FEW
    assert await turns_after_the_first(server.special_tokens() for _ in range(64)) < FEW
    calls = (embedder(server, model, Ticket()) for _ in range(64))
    assert await turns_after_the_first(calls) < FEW
    await backend.aclose()


async def test_questions_use_the_places_of_calls_that_are_free(address: str) -> None:
    """16 texts to tokenize use the connections of calls as long as there are no calls."""
    pool = Counted(address)
    backend = LlamaServer(address, client=pool)
    await backend.model()
    pool.most = 0
    await asyncio.gather(
        *(backend.tokenize("a", add_special=False, parse_special=False) for _ in range(16))
    )
    assert pool.most == SLOTS + QUESTIONS
    await backend.aclose()


async def test_a_server_keeps_a_connection_for_each_of_its_slots() -> None:
    """Calls that end together keep their connections, which the next calls need."""
    props = (
        b'{"default_generation_settings":{"n_ctx":512},"model_path":"a.gguf","build_info":"b1",'
        b'"total_slots":100}'
    )
    answers = {"/props": (200, props), "/v1/models": (404, b"{}"), "*": (200, b'{"tokens":[]}')}
    with canned(answers) as (address, _):
        backend = LlamaServer(address)
        await backend.model()
        pool = backend.server.client.pool
        assert pool is not None
        many = [await pool._connect() for _ in range(100)]
        for connection in many:
            pool._keep(connection)
        assert len(pool._idle) == 100
        await backend.aclose()
