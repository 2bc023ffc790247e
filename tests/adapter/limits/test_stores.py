"""Tests of limits in memory, in a real Redis and in a real PostgreSQL."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from latimer.adapter import probe
from latimer.adapter.errors import LimitsUnavailable
from latimer.adapter.limits import postgresql as own_postgresql
from latimer.adapter.limits import redis as own_redis
from latimer.adapter.limits import shared
from latimer.adapter.limits.config import AdmissionConfig, store_of
from latimer.adapter.limits.leases import (
    Account,
    Grant,
    Lease,
    LeaseStore,
    LimitsError,
    Rates,
    Refusal,
)
from support import postgresql, redis_server
from support.postgresql import PostgreSQL
from support.redis_server import RedisServer
from support.servers import free_port

SHARED = ("redis", "postgresql")
Opened = Callable[..., LeaseStore]


def url_of(request: pytest.FixtureRequest, kind: str) -> str:
    """Return the setting `store` of an empty store."""
    return kind if kind == "memory" else request.getfixturevalue(f"{kind}_url")


@pytest.fixture
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    """Return a function that opens another store over the same place."""
    url = url_of(request, request.param)
    made: list[LeaseStore] = []

    def make(**options: Any) -> LeaseStore:
        store = store_of(AdmissionConfig(store=url, **options))
        made.append(store)
        return store

    yield make
    for one in made:
        await one.aclose()


each = pytest.mark.parametrize("opened", ["memory", *SHARED], indirect=True)
both = pytest.mark.parametrize("opened", SHARED, indirect=True)


async def lease_of(store: LeaseStore, grant: Grant, tokens: int = 0) -> Lease:
    """Reserve, and return the lease."""
    found = await store.reserve(grant, tokens)
    assert isinstance(found, Lease), found
    return found


async def refusal_of(store: LeaseStore, grant: Grant, tokens: int = 0) -> Refusal:
    """Reserve, and return the refusal."""
    found = await store.reserve(grant, tokens)
    assert isinstance(found, Refusal), found
    return found


@each
async def test_limits_hold(opened: Opened) -> None:
    """Each limit of a key refuses what exceeds it, and the numbers that are left are right."""
    store = opened()
    grant = Grant("a", Rates(3, 100, 2))
    first = await lease_of(store, grant, 40)
    assert first.left == (2, 60)
    second = await lease_of(store, grant, 40)
    refusal = await refusal_of(store, grant, 10)
    assert (refusal[:4], refusal.left) == (("concurrent", 2, 2, 1), (1, 20))
    first.settle(10)
    third = await lease_of(store, grant, 50)
    assert third.left == (0, 0)
    second.settle(40)
    third.settle(50)
    refusal = await refusal_of(store, grant, 0)
    assert (refusal[:4], refusal.left) == (("requests", 3, 3, 1), (0, 0))
    assert 58 < refusal.wait <= 60.5
    other = await lease_of(store, Grant("b", grant.rates), 100)
    assert other.left == (2, 0)


@each
async def test_a_lease_ends_once(opened: Opened) -> None:
    """A lease that has ended with its usage is not released once more."""
    store = opened()
    grant = Grant("a", Rates(tokens=100, concurrent=1))
    lease = await lease_of(store, grant, 60)
    lease.settle(50)
    lease.release()
    lease.settle(0)
    again = await lease_of(store, grant, 0)
    assert again.left[1] == 50


@each
async def test_parallel_requests_do_not_pass_a_limit(opened: Opened) -> None:
    """Of a hundred requests at once over two connections, exactly the limit is admitted."""
    stores = [store := opened(), store if "memory" in str(type(store)).lower() else opened()]
    grant = Grant("a", Rates(30, 10_000))
    found = await asyncio.gather(*(stores[one % 2].reserve(grant, 5) for one in range(100)))
    leases = [one for one in found if isinstance(one, Lease)]
    assert len(leases) == 30
    for lease in leases:
        lease.settle(0)


@both
async def test_databases_count_as_memory_does(opened: Opened) -> None:
    """Any order of reservations and ends has the results that the arithmetic in memory has."""
    draw = random.Random(7)
    store, account = opened(), Account(rates := Rates(60, 900, 4), lambda: 1e9)
    grant = Grant("a", rates)
    began = time.monotonic()
    running: list[tuple[Lease, Lease]] = []
    for _ in range(150):
        if running and draw.random() < 0.55:
            used = draw.randrange(40)
            for lease in running.pop(draw.randrange(len(running))):
                lease.settle(used)
            continue
        tokens = draw.randrange(40)
        mine = account.reserve(tokens)
        found = await store.reserve(grant, tokens)
        if isinstance(mine, Lease):
            assert isinstance(found, Lease)
            assert (
                found.left == mine.left == (60 - account.requests.used, 900 - account.tokens.used)
            )
            running.append((mine, found))
        else:
            # Of two limits with the same wait, either may be named.
            assert isinstance(found, Refusal)
            used_of = {
                "requests": account.requests.used,
                "tokens": account.tokens.used,
                "concurrent": account.running,
            }
            assert found.used == used_of[found.kind]
            assert found.left == mine.left
            assert found.used + found.requested > found.limit
    # The comparison holds as long as nothing leaves the window.
    assert time.monotonic() - began < 55


async def _older(opened: Opened, url: str, seconds: float) -> None:
    """Move what was used into the past."""
    buckets = int(seconds * 2)
    if url.startswith("redis"):
        from redis import Redis

        with Redis.from_url(url, decode_responses=True) as client:
            for key in client.keys("latimer:limits:*"):
                if client.type(key) == "hash":
                    fields = client.hgetall(key)
                    client.delete(key)
                    moved = {str(int(one) - buckets): amount for one, amount in fields.items()}
                    client.hset(key, mapping=moved)
        return
    import psycopg

    statement = """
        UPDATE latimer_limits SET state = (SELECT jsonb_object_agg(kind, CASE WHEN kind = 'leases'
            THEN value ELSE coalesce((SELECT jsonb_agg(jsonb_build_array((b->>0)::bigint - %s, b->1)
                ORDER BY b->0) FROM jsonb_array_elements(value) AS b), '[]') END)
        FROM jsonb_each(state::jsonb) AS entry (kind, value))::text
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement, [buckets])


@pytest.mark.parametrize(("opened", "kind"), [(one, one) for one in SHARED], indirect=["opened"])
async def test_a_minute_passes(opened: Opened, kind: str, request: pytest.FixtureRequest) -> None:
    """Requests and tokens of more than a minute ago do not count, and no wait is longer."""
    url = request.getfixturevalue(f"{kind}_url")
    store = opened()
    grant = Grant("a", Rates(2, 100))
    (await lease_of(store, grant, 60)).settle(60)
    (await lease_of(store, grant, 20)).settle(20)
    await asyncio.sleep(0.2)
    await _older(opened, url, 50)
    refusal = await refusal_of(store, grant, 50)
    assert refusal.kind in ("requests", "tokens")
    assert 8 <= refusal.wait <= 10.5
    await _older(opened, url, 11)
    lease = await lease_of(store, grant, 50)
    assert lease.left == (1, 50)


@both
async def test_a_lease_of_a_dead_process_expires(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is not renewed ends by itself; one that its process renews does not."""
    for module in (own_redis, own_postgresql):
        monkeypatch.setattr(module, "LEASE_SECONDS", 1.0)
    grant = Grant("a", Rates(concurrent=1))
    dead, alive = opened(), opened()
    await lease_of(dead, grant)
    assert isinstance(dead, shared.SharedLimits)
    dead._leases.clear()
    assert (await refusal_of(alive, grant)).kind == "concurrent"
    await asyncio.sleep(1.2)
    monkeypatch.setattr(shared, "RENEW_SECONDS", 0.3)
    await lease_of(alive, grant)
    await asyncio.sleep(1.5)
    assert (await refusal_of(dead, grant)).kind == "concurrent"


@both
async def test_a_client_that_leaves_has_no_lease(opened: Opened) -> None:
    """A request that is cancelled while the database answers leaves neither place nor tokens."""
    store = opened()
    grant = Grant("a", Rates(tokens=1_000, concurrent=1))
    await store.open()
    for _ in range(20):
        asking = asyncio.create_task(store.reserve(grant, 100))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.05)
    lease = await lease_of(store, grant, 0)
    assert lease.left[1] == 1_000


@both
async def test_a_place_that_is_about_to_be_free(opened: Opened) -> None:
    """A request that comes just before the end of the last one, in another process, is admitted."""
    one, two = opened(), opened()
    grant = Grant("a", Rates(concurrent=1))
    for _ in range(20):
        lease = await lease_of(one, grant)
        asyncio.get_running_loop().call_later(0.005, lease.settle, 0)
        (await lease_of(two, grant)).settle(0)
        await asyncio.sleep(0.01)


def own_server(kind: str) -> Any:
    """Return a context with a server of the test's own, and skip the test without the program."""
    module = redis_server if kind == "redis" else postgresql
    reason = module.missing()
    if reason is not None:
        pytest.skip(reason)
    return redis_server.running() if kind == "redis" else postgresql.postgresql()


def address_of(server: RedisServer | PostgreSQL) -> str:
    """Return the setting `store` of a server."""
    return server.url if isinstance(server, RedisServer) else server.url()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
async def test_a_silent_database_holds_nobody(kind: str) -> None:
    """While the database is silent, each process counts alone, or refuses; then it counts again."""
    grant = Grant("a", Rates(requests=5))
    with own_server(kind) as server:
        admits = store_of(AdmissionConfig(store=address_of(server)))
        refuses = store_of(AdmissionConfig(store=address_of(server), unavailable="refuse"))
        try:
            await lease_of(admits, grant)
            await lease_of(refuses, grant)
            with server.paused():
                began = time.monotonic()
                left = [(await lease_of(admits, grant)).left[0] for _ in range(5)]
                assert left == [4, 3, 2, 1, 0]
                assert (await refusal_of(admits, grant)).kind == "requests"
                with pytest.raises(LimitsUnavailable):
                    await refuses.reserve(grant, 0)
                assert time.monotonic() - began < 2 * shared.ANSWER_SECONDS + 1
                for _ in range(2):
                    await asyncio.sleep(shared.DOWN_SECONDS + 0.1)
                    began = time.monotonic()
                    assert (await refusal_of(admits, grant)).kind == "requests"
                    assert time.monotonic() - began < shared.ANSWER_SECONDS / 2
            await asyncio.sleep(shared.DOWN_SECONDS + 0.5)
            assert (await lease_of(refuses, grant)).left[0] <= 2
            async with asyncio.timeout(10):
                while not admits.is_up():
                    await admits.reserve(grant, 0)
                    await asyncio.sleep(0.05)
        finally:
            await admits.aclose()
            await refuses.aclose()


@pytest.mark.slow
async def test_what_a_silent_database_refused_does_not_count() -> None:
    """Requests that were refused while PostgreSQL was silent take nothing when it answers again."""
    grant = Grant("a", Rates(requests=1_000, concurrent=1_000))
    with own_server("postgresql") as server:
        url = address_of(server)
        store = store_of(AdmissionConfig(store=url, unavailable="refuse"))
        (await lease_of(store, grant)).settle(0)
        asking = []
        with server.paused():
            for _ in range(60):
                asking.append(asyncio.create_task(store.reserve(grant, 0)))
                await asyncio.sleep(0.1)
            found = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(one) for one in found} == {LimitsUnavailable}
        # Until what was sent has been done.
        await asyncio.sleep(3)
        await store.aclose()
        other = store_of(AdmissionConfig(store=url))
        assert (await lease_of(other, grant)).left[0] == 998
        await other.aclose()


@pytest.mark.parametrize("kind", SHARED)
def test_event_loops_follow_each_other(kind: str, request: pytest.FixtureRequest) -> None:
    """A store counts in one event loop after the other, also a request that ends with its loop."""
    store = store_of(AdmissionConfig(store=url_of(request, kind), unavailable="refuse"))
    grant = Grant("a", Rates(requests=100, tokens=1_000, concurrent=1))

    async def ask() -> tuple[float, float]:
        lease = await lease_of(store, grant, 500)
        lease.settle(10)
        # The task that ends the lease begins.
        await asyncio.sleep(0)
        return lease.left

    for number in range(4):
        assert asyncio.run(ask()) == (99 - number, 500 - 10 * number)
    asyncio.run(store.aclose())


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
async def test_a_database_that_starts_again(kind: str) -> None:
    """A server that was stopped and started again counts the next requests."""
    grant = Grant("a", Rates(requests=1_000))
    with own_server(kind) as server:
        store = store_of(AdmissionConfig(store=address_of(server), unavailable="refuse"))
        try:
            await lease_of(store, grant)
            server.stop()
            with pytest.raises(LimitsUnavailable):
                await store.reserve(grant, 0)
            server.start()
            await asyncio.sleep(shared.DOWN_SECONDS)
            for _ in range(3):
                await lease_of(store, grant)
        finally:
            await store.aclose()


@pytest.mark.parametrize("kind", SHARED)
async def test_a_database_that_nobody_uses_is_asked(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a request, a store notices that its server is gone, and that it is back."""
    monkeypatch.setattr(probe, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(probe, "LOST_SECONDS", 0.1)
    with own_server(kind) as server:
        store = store_of(AdmissionConfig(store=address_of(server)))
        try:
            await store.open()
            for change, is_up in ((server.stop, False), (server.start, True)):
                await asyncio.sleep(0.5)
                assert store.is_up() is not is_up
                change()
                async with asyncio.timeout(10):
                    while store.is_up() is not is_up:
                        await asyncio.sleep(0.02)
        finally:
            await store.aclose()
    assert [one.levelname for one in caplog.records if one.name == "latimer"] == [
        "ERROR", "WARNING",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
async def test_a_database_that_is_not_there(scheme: str) -> None:
    """Opening a store whose server does not run fails at once, and says why without a password."""
    store = store_of(AdmissionConfig(store=f"{scheme}://u:s3cr3t@127.0.0.1:{free_port()}/0"))
    with pytest.raises(LimitsUnavailable) as raised:
        await store.open()
    assert "127.0.0.1" in raised.value.detail
    assert "s3cr3t" not in raised.value.detail
    await store.aclose()


@pytest.mark.parametrize("url", ["redis://h/0?nonsense=s3cr3t", "postgresql://h/x?nonsense=s3cr3t"])
async def test_a_wrong_url(url: str) -> None:
    """A URL with an option that does not exist cannot be used, and the error does not repeat it."""
    store = store_of(AdmissionConfig(store=url))
    with pytest.raises((LimitsError, LimitsUnavailable)) as raised:
        await store.open()
    assert "s3cr3t" not in f"{raised.value} {getattr(raised.value, 'detail', '')}"
    await store.aclose()
