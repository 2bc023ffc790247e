"""Tests of limits over HTTP: headers, errors, and what a request is charged in the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.errors import LimitsUnavailable, RateLimited, render
from latimer.adapter.limits.config import KeyConfig, digest_of
from latimer.adapter.limits.leases import Account, Grant
from latimer.adapter.limits.memory import MemoryLimits
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.request_log import RequestLog
from latimer.backends.base import Batch, Embedding, Embeddings, Finish, Generation, Piece
from latimer.backends.errors import EngineError
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from support.clients import Leaving, client_of
from support.engines.echo import Echo, Slow
from support.servers import serving

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 20},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 20},
    RESPONSES: {"input": "Hi", "max_output_tokens": 20},
}


def keys(**limits: Any) -> dict[str, KeyConfig]:
    """Return the tables of a key with limits."""
    return {"team": KeyConfig(digest=digest_of("sk-team"), **limits)}


@asynccontextmanager
async def limited(
    engine: Any = None, **limits: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, Account]]:
    """Yield a client with a key of these limits, and the account of the key."""
    app = OpenAIAdapter(engine or Echo("one two"), any_model=True, keys=keys(**limits))
    store = app._service.limits
    assert isinstance(store, MemoryLimits)
    grant = next(iter(app._api_keys.grants.values()))
    account = store._account(grant)
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer sk-team"
        yield client, account
    await app.aclose()


def rates_of(reply: httpx2.Response) -> dict[str, str]:
    """Return the headers about limits."""
    start = "x-ratelimit-"
    return {
        name.removeprefix(start): value
        for name, value in reply.headers.items()
        if name.startswith(start)
    }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_headers_say_what_is_left(path: str, stream: bool) -> None:
    """Each response, streamed or not, has OpenAI's headers about the limits of its key."""
    async with limited(requests_per_minute=10, tokens_per_minute=1_000) as (client, account):
        reply = await client.post(path, json={"model": "m", **BODIES[path], "stream": stream})
        assert reply.status_code == 200
        size = len(reply.request.content) // 4 + 1
        assert rates_of(reply) == {
            "limit-requests": "10",
            "remaining-requests": "9",
            "reset-requests": "1m0s",
            "limit-tokens": "1000",
            "remaining-tokens": str(1_000 - size - 20),
            "reset-tokens": "1m0s",
        }
        # The usage replaces the estimate.
        assert account.tokens.used != size + 20
        assert not account.running


@pytest.mark.parametrize("kind", ["requests", "tokens", "concurrent"])
async def test_a_refusal_has_the_headers_of_all_limits(kind: str) -> None:
    """A 429 says what is left of each limit of its key, and when the request fits into its own."""
    limits = {"requests_per_minute": 10, "tokens_per_minute": 1_000, "concurrent": 5}
    async with limited(**limits) as (client, account):
        account.requests.used, account.tokens.used = 4, 300
        if kind == "requests":
            account.requests.used = 10
        elif kind == "tokens":
            account.tokens.used = 1_001
        else:
            account.running = 5
        reply = await client.post(CHAT, json={"model": "m", **BODIES[CHAT]})
        account.running = 0
    assert reply.status_code == 429
    rates = rates_of(reply)
    for one, limit, used in (("requests", 10, 4), ("tokens", 1_000, 300)):
        left, reset = rates[f"remaining-{one}"], rates[f"reset-{one}"]
        assert rates[f"limit-{one}"] == str(limit)
        assert left == ("0" if kind == one else str(limit - used))
        assert kind == one or reset == "1m0s"


async def test_only_limits_that_exist_have_headers() -> None:
    """A key has the headers of its own limits, and a key without limits has none."""
    for limits, count in (({"requests_per_minute": 5}, 3), ({"concurrent": 5}, 0), ({}, 0)):
        async with limited(**limits) as (client, account):
            reply = await client.post(CHAT, json={"model": "m", **BODIES[CHAT]})
            assert reply.status_code == 200
            assert len(rates_of(reply)) == count
            assert not account.running


async def test_the_usage_is_charged() -> None:
    """In the end a request is charged the tokens of its usage, and not those that it reserved."""
    async with limited(tokens_per_minute=10_000) as (client, account):
        total = 0
        for path, body in BODIES.items():
            for stream in (False, True):
                asked = {"model": "m", **body, "stream": stream}
                if path != RESPONSES:
                    asked["stream_options"] = {"include_usage": True} if stream else None
                await client.post(path, json=asked)
                plain = await client.post(path, json={"model": "m", **body})
                total += 2 * plain.json()["usage"]["total_tokens"]
        assert account.tokens.used == total


@pytest.mark.parametrize("path", BODIES)
async def test_too_many_requests(path: str) -> None:
    """A request beyond the limit of requests gets OpenAI's 429, and a time to wait."""
    async with limited(requests_per_minute=2) as (client, _):
        for _ in range(2):
            assert (await client.post(path, json={"model": "m", **BODIES[path]})).status_code == 200
        reply = await client.post(path, json={"model": "m", **BODIES[path]})
        assert reply.status_code == 429
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        start, _, wait = error["message"].partition(" Please try again in ")
        assert start == (
            "Rate limit reached for m in key team on requests per min (RPM): Limit 2, Used 2, "
            "Requested 1."
        )
        assert wait.endswith("s.")
        assert 55_000 < int(reply.headers["retry-after-ms"]) <= 60_000
        assert 55 < int(reply.headers["retry-after"]) <= 60
        assert rates_of(reply)["remaining-requests"] == "0"


def test_a_wait_of_more_than_a_minute() -> None:
    """`retry-after` is not too early, and ends where clients would ignore it or give up."""
    for wait, milliseconds, seconds in ((60.2, 60_000, 60), (59.0002, 59_001, 60), (0.0, 1, 1)):
        error = RateLimited("m", "team", "requests per min (RPM)", 2, 2, 1, wait)
        assert render(error)[2] == [
            (b"retry-after-ms", b"%d" % milliseconds),
            (b"retry-after", b"%d" % seconds),
        ]


async def test_too_many_tokens() -> None:
    """A request beyond the limit of tokens gets OpenAI's 429 with the type `tokens`."""
    async with limited(tokens_per_minute=100) as (client, account):
        account.reserve(0)
        body = {"model": "m", "prompt": "x" * 200, "max_tokens": 20}
        first = await client.post(COMPLETIONS, json=body)
        used = first.json()["usage"]["total_tokens"]
        assert used == 207
        error = (await client.post(COMPLETIONS, json=body)).json()["error"]
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert f"tokens per min (TPM): Limit 100, Used {used}, Requested" in error["message"]


async def test_a_request_beyond_the_limit_is_not_refused_for_ever() -> None:
    """A request that may take more than the whole limit is admitted when nothing else was used."""
    async with limited(tokens_per_minute=50) as (client, account):
        body = {"model": "m", "prompt": "Hi", "max_tokens": 4_000}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert account.tokens.used == 9


async def test_too_many_at_once() -> None:
    """A key runs as many requests at a time as its limit, and the next when one has ended."""
    engine = Echo("one two three", pause=0.02)
    async with limited(engine, concurrent=2) as (client, account):
        body = {"model": "m", **BODIES[CHAT]}
        replies = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(4)))
        assert sorted(one.status_code for one in replies) == [200, 200, 429, 429]
        refused = next(one for one in replies if one.status_code == 429)
        assert "on concurrent requests: Limit 2, Used 2" in refused.json()["error"]["message"]
        assert refused.headers["retry-after-ms"] == "1000"
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert not account.running


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_not_charged(stream: bool) -> None:
    """A request that fails before its response has a place and tokens no more."""
    engine = Echo(error=EngineError("It failed."))
    async with limited(engine, tokens_per_minute=1_000, concurrent=1) as (client, account):
        for path, body in BODIES.items():
            reply = await client.post(path, json={"model": "m", **body, "stream": stream})
            assert reply.status_code == 502
            assert account.tokens.used == 0
            assert not account.running


async def test_an_invalid_request_is_not_charged() -> None:
    """A request that is found invalid after its admission has a place and tokens no more."""
    async with limited(tokens_per_minute=1_000, concurrent=1) as (client, account):
        body = {"model": "m", **BODIES[CHAT], "response_format": {"type": "json_schema"}}
        assert (await client.post(CHAT, json={**body, "oai_compat": False})).status_code == 400
        assert (account.tokens.used, account.running) == (0, 0)


async def test_a_stream_that_breaks_is_charged_what_it_sent() -> None:
    """A stream that an engine ends with an error is charged its prompt and what it has sent."""
    engine = Slow(error=EngineError("It broke."))
    async with limited(engine, tokens_per_minute=1_000, concurrent=1) as (client, account):
        body = {"model": "m", **BODIES[COMPLETIONS]}
        reply = await client.post(COMPLETIONS, json={**body, "stream": True})
        assert "It broke." in reply.text
        assert account.tokens.used == len(reply.request.content) // 4 + 1 + 2
        plain = await client.post(COMPLETIONS, json=body)
        assert plain.status_code == 502
        assert account.tokens.used == len(reply.request.content) // 4 + 1 + 2
        assert not account.running


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_charged_what_was_generated(stream: bool) -> None:
    """The lease of a client that disconnects ends, charged with what was generated by then."""
    engine = Slow()
    app = OpenAIAdapter(engine, keys=keys(tokens_per_minute=1_000, concurrent=1))
    store = app._service.limits
    assert isinstance(store, MemoryLimits)
    with serving(lambda: app) as address:
        headers = {"authorization": "Bearer sk-team"}
        async with httpx2.AsyncClient(base_url=address, headers=headers) as client:
            body = {"model": "demo", **BODIES[CHAT], "stream": stream}
            for turn in (1, 2):
                await _leave(client, engine, CHAT, body)
                async with asyncio.timeout(10):
                    while store._accounts["team"].running:
                        await asyncio.sleep(0.01)
                assert 0 < store._accounts["team"].tokens.used <= turn * 60


class Joined(Slow):
    """A backend that yields fifty tokens as one piece, and nothing more."""

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Yield the piece, then wait for an hour."""
        assert job.is_joined
        yield [Piece(0, b"one " * 50, (), False, 50)]
        await asyncio.sleep(3600)


async def test_each_token_of_a_joined_text_is_charged() -> None:
    """A client that leaves a plain answer is charged for each token of a piece that joins many."""
    body = {"prompt": "one", "max_tokens": 100}
    assert 50 <= await _charged(Joined(), "/v1/completions", body) < 80


class Half(Slow):
    """A backend that ends the first job, and generates nothing for the others."""

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Yield a joined piece of fifty tokens and its end, or wait for an hour."""
        if len(self.jobs) > 1:
            await asyncio.sleep(3600)
        yield [Piece(0, b"one " * 50, (), False, 50), Finish(0, "length", None, 7, 50)]


async def test_the_jobs_that_have_ended_are_charged() -> None:
    """A client that leaves is charged the usage of those of its prompts that are done."""
    body = {"prompt": ["one", "two"], "max_tokens": 50}
    assert await _charged(Half(), "/v1/completions", body) == 7 + 50


@pytest.mark.parametrize(
    ("stream", "count", "observed"),
    [(True, 1, True), (False, 1, False), (False, 2, True), (True, 3, False)],
)
@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_client_that_leaves_is_charged_what_the_engine_counts(
    make_backend: Any, engine: str, stream: bool, count: int, observed: bool
) -> None:
    """The engine's numbers replace the estimate, as in the log and without one."""
    lines: list[bytes] = []
    app = OpenAIAdapter(
        make_backend(engine),
        any_model=True,
        keys=keys(tokens_per_minute=100_000),
        metrics=False,
        observers=[RequestLog(lines.append)] if observed else (),
    )
    store = app._service.limits
    assert isinstance(store, MemoryLimits)
    body = {"model": "m", "prompt": "Count.", "max_tokens": 1500, "ignore_eos": True}
    # The estimate is more than the whole answer.
    body |= {"n": count, "stream": stream, "user": "x" * 40_000}
    leaving = Leaving(app)
    async with client_of(app) as client, client_of(leaving) as other:
        client.headers["authorization"] = other.headers["authorization"] = "Bearer sk-team"
        short = {**body, "max_tokens": 100, "stream": False}
        first = await client.post(COMPLETIONS, json=short)
        begun = time.perf_counter()
        await client.post(COMPLETIONS, json=short)
        took = time.perf_counter() - begun
        before = store._accounts["team"].tokens.used
        task = asyncio.create_task(other.post(COMPLETIONS, json=body))
        # The time of a hundred tokens is that of one to 1,500, also if other work begins or ends.
        await asyncio.sleep(took)
        assert not task.done()
        leaving.gone.set()
        await asyncio.wait([task])
        task.exception()
        charged = store._accounts["team"].tokens.used - before
    await app.aclose()
    prompt = first.json()["usage"]["prompt_tokens"]
    assert prompt < charged < prompt + 1500 * count
    if observed:
        events = map(json.loads, b"".join(lines).splitlines())
        event = next(one for one in events if one.get("client_gone"))
        assert charged == event["prompt_tokens"] + event["completion_tokens"]


async def test_a_client_that_leaves_early_is_not_charged() -> None:
    """The lease of a client that disconnects before the first token ends without a charge."""
    assert await _charged(Echo("one", pause=3600), CHAT, BODIES[CHAT]) == 0


async def _leave(client: httpx2.AsyncClient, engine: Echo, path: str, body: Any) -> None:
    """Send a request, and leave when its engine has generated what it does at once."""
    before = len(engine.jobs)
    task = asyncio.create_task(client.post(path.removeprefix("/v1"), json=body))
    async with asyncio.timeout(10):
        while len(engine.jobs) == before:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def _charged(engine: Echo, path: str, body: dict[str, Any]) -> int:
    """Return the tokens that a key is charged for a request whose client disconnects."""
    app = OpenAIAdapter(engine, keys=keys(tokens_per_minute=1_000, concurrent=1))
    store = app._service.limits
    assert isinstance(store, MemoryLimits)
    with serving(lambda: app) as address:
        headers = {"authorization": "Bearer sk-team"}
        async with httpx2.AsyncClient(base_url=address, headers=headers) as client:
            await _leave(client, engine, path, {"model": "demo", **body})
            async with asyncio.timeout(10):
                while store._accounts["team"].running:
                    await asyncio.sleep(0.01)
            return store._accounts["team"].tokens.used


async def test_a_response_in_the_background_has_its_lease() -> None:
    """A response in the background has a place until it ends, also when it is cancelled."""
    engine = Echo("one two three four", pause=0.02)
    async with limited(engine, tokens_per_minute=10_000, concurrent=1) as (client, account):
        body = {"model": "m", "input": "Hi", "background": True}
        found = (await client.post(RESPONSES, json=body)).json()
        assert account.running == 1
        assert (await client.post(RESPONSES, json=body)).status_code == 429
        # Listing and retrieving are not limited.
        async with asyncio.timeout(30):
            while True:
                reply = (await client.get(f"{RESPONSES}/{found['id']}")).json()
                if reply["status"] == "completed":
                    break
                await asyncio.sleep(0.01)
        assert not account.running
        assert account.tokens.used == reply["usage"]["total_tokens"]
        found = (await client.post(RESPONSES, json=body)).json()
        await client.post(f"{RESPONSES}/{found['id']}/cancel")
        assert not account.running


class Vectors(Echo):
    """A backend that embeds."""

    async def embed(self, job: Embedding) -> Embeddings:
        """Return a vector for each input."""
        from array import array

        return Embeddings([array("f", [1.0])] * len(job.inputs), 7 * len(job.inputs))


async def test_embeddings_are_charged() -> None:
    """A request for embeddings counts as one request, with the tokens of its usage."""
    async with limited(Vectors(), tokens_per_minute=1_000, concurrent=1) as (client, account):
        body = {"model": "m", "input": ["a", "b"]}
        reply = await client.post("/v1/embeddings", json=body)
        assert reply.status_code == 200, reply.text
        assert account.tokens.used == 14
        assert account.requests.used == 1
        assert not account.running


async def test_counting_tokens_is_a_request() -> None:
    """A request for a number of tokens counts as a request, and its tokens do not."""
    async with limited(requests_per_minute=5, tokens_per_minute=1_000) as (client, account):
        body = {"model": "m", "input": "Hi"}
        assert (await client.post(f"{RESPONSES}/input_tokens", json=body)).status_code == 200
        assert (account.requests.used, account.tokens.used) == (1, 0)


async def test_the_ticket_has_the_key() -> None:
    """The queue of a model gets the key of each request, and the share of the key."""
    engine = Echo("one")
    replica = Replica("a", engine, 2)
    pool = Pool("demo", [replica], 8, "prefix")
    await pool.ask(replica)
    entries = [ModelEntry(pool, ("demo",))]
    app = OpenAIAdapter(entries, keys=keys(weight=2), api_keys=["sk-plain"])
    async with client_of(app) as client:
        for key, weight in (("sk-team", 2.0), ("sk-plain", 1.0)):
            for path, body in BODIES.items():
                for stream in (False, True):
                    asked = {"model": "demo", **body, "stream": stream}
                    headers = {"authorization": f"Bearer {key}"}
                    await client.post(path, json=asked, headers=headers)
                    ticket = engine.jobs[-1].ticket
                    assert ticket is not None
                    assert (ticket.key, ticket.weight) == (digest_of(key)[7:39], weight)
    await app.aclose()


class Unavailable(MemoryLimits):
    """A store that does not answer."""

    def try_reserve(self, grant: Grant, tokens: int) -> Any:
        """Say that the store has to be asked."""

    async def reserve(self, grant: Grant, tokens: int) -> Any:
        """Raise the error."""
        raise LimitsUnavailable("it is down")


async def test_a_store_that_does_not_answer() -> None:
    """A request that is refused without the store gets a 503, and can be sent again."""
    async with limited(requests_per_minute=5) as (client, _):
        app = client._transport.app  # type: ignore[attr-defined]
        app._service.limits = Unavailable()
        reply = await client.post(CHAT, json={"model": "m", **BODIES[CHAT]})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "limits_unavailable"
        assert reply.headers["retry-after-ms"] == "1000"
        assert "down" not in reply.text


async def test_openais_client_waits_and_succeeds() -> None:
    """OpenAI's client raises RateLimitError, or waits as long as the error says and succeeds."""
    engine = Echo("one two three", pause=0.02)
    app = OpenAIAdapter(engine, keys=keys(concurrent=1))
    with serving(lambda: app) as address:
        async with openai.AsyncOpenAI(base_url=address, api_key="sk-team") as client:

            async def ask(retries: int) -> str | None:
                made = await client.with_options(max_retries=retries).chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "Hi"}]
                )
                return made.choices[0].message.content

            found = await asyncio.gather(*(ask(0) for _ in range(2)), return_exceptions=True)
            assert sum(isinstance(one, openai.RateLimitError) for one in found) == 1
            assert await asyncio.gather(*(ask(3) for _ in range(2))) == ["one two three"] * 2
