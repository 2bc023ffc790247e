"""Tests of requests that wait for engines which share a machine's memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from latimer.backends.base import Backend, Generation, Model, Prompt, Text
from latimer.backends.errors import EngineError, EngineUnavailable
from latimer.backends.fleet import loading
from latimer.backends.fleet.loading import MOST_RETRY
from latimer.backends.fleet.machine import Machine, Member
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from support.engines.fleet import Engine
from support.jobs import run
from support.loaders import SlowLoader


@asynccontextmanager
async def machine_of(
    *loaders: SlowLoader, most_wait: float = 30.0, memory: int | None = 15
) -> AsyncIterator[list[Member]]:
    """Yield the members of a machine in which one engine of ten bytes fits."""
    machine = Machine("here", None if memory is None else {"gpu": memory}, most_wait)
    try:
        yield [Member(machine, loader) for loader in loaders]
    finally:
        await machine.aclose()


def sized(name: str, **options: object) -> SlowLoader:
    """Return a loader of ten bytes."""
    return SlowLoader(name, memory={"gpu": 10}, **options)  # type: ignore[arg-type]


async def request(member: Member, seconds: float) -> float:
    """Use an engine for a time; return the seconds that the request waited."""
    begun = time.monotonic()
    async with member.use():
        waited = time.monotonic() - begun
        loader = member.loader
        assert isinstance(loader, SlowLoader)
        assert loader.state == "ready"
        loader.users += 1
        await asyncio.sleep(seconds)
        loader.users -= 1
    return waited


async def test_one_load_serves_all_that_wait() -> None:
    """Requests that arrive during a load share it, and one that leaves does not end it."""
    loader = sized("a", seconds=0.1)
    async with machine_of(loader) as [member]:
        first = asyncio.create_task(request(member, 0))
        await asyncio.sleep(0.02)
        others = [asyncio.create_task(request(member, 0)) for _ in range(20)]
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.gather(*others)
        assert loader.starts == 1
        assert not member.running
        assert not member.waiting


async def test_a_request_that_leaves_after_it_was_admitted_lets_go() -> None:
    """A request that is cancelled at the moment of its admission does not keep the engine."""
    async with machine_of(sized("a", seconds=0.01)) as [member]:
        for _ in range(30):
            task = asyncio.create_task(request(member, 10))
            await asyncio.sleep(0)
            while member.waiting:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert not member.running
            await member.unload()


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of the log with their fields."""
    found: list[Any] = caplog.records
    return [(one.event, one.fields) for one in found if hasattr(one, "event")]


async def test_loads_and_unloads_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each load and unload is an event with the engine, its model, the time and the reason."""
    caplog.set_level("INFO", "latimer")
    idle = sized("b", seconds=0.01, idle=0.1)
    async with machine_of(sized("a", seconds=0.01), idle, most_wait=0.02) as [one, two]:
        await request(one, 0)
        await request(two, 0)
        while two.state != "unloaded":
            await asyncio.sleep(0.01)
        await request(one, 0)
        await one.unload()
    found = events(caplog)
    assert [(event, fields["engine"], fields.get("reason")) for event, fields in found] == [
        ("engine_loaded", "a", None),
        ("engine_unloaded", "a", "room for b"),
        ("engine_loaded", "b", None),
        ("engine_unloaded", "b", "it was idle"),
        ("engine_loaded", "a", None),
        ("engine_unloaded", "a", "the operator asked for it"),
    ]
    for _, fields in found:
        assert fields["model"]
        assert fields["seconds"] >= 0
        assert fields["memory"] == {"gpu": 10}


async def test_a_model_that_the_next_load_unloads_has_no_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log does not say how long an unload took that was a part of the next load."""
    caplog.set_level("INFO", "latimer")
    here = {"seconds": 0.01, "place": "http://here"}
    async with machine_of(sized("a", **here), sized("b", **here), most_wait=0.02) as [one, two]:
        await request(one, 0)
        await request(two, 0)
    [unloaded] = [one for one in caplog.records if "unloads" in one.getMessage()]
    text = "engine a unloads a with the next load (0.00 GiB of gpu, room for b)"
    assert unloaded.getMessage() == text
    assert [event for event, fields in events(caplog) if "seconds" not in fields] == [
        "engine_unloaded"
    ]


async def test_loads_that_fail_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A load that fails is an event with the reason; one that can never succeed is logged once."""
    failing, large = sized("a"), SlowLoader("b", memory={"gpu": 100})
    failing.fails = "it is broken"
    async with machine_of(failing, large) as members:
        for member in members * 2:
            with pytest.raises(EngineUnavailable):
                await request(member, 0)
    (one, other) = events(caplog)
    for (event, fields), name in ((one, "a"), (other, "b")):
        assert (event, fields["engine"]) == ("load_failed", name)
        assert fields["reason"]
    assert "it needs 9.31e-08 GiB of the memory 'gpu'" in other[1]["reason"]


async def test_alternating_clients_do_not_swap_with_each_request() -> None:
    """Two clients of two models that do not fit together cause few loads, and none waits long."""
    loaders = [sized(name, seconds=0.05) for name in "ab"]
    async with machine_of(*loaders, most_wait=0.2) as members:
        waits: list[float] = []
        end = time.monotonic() + 1.5

        async def client(member: Member) -> None:
            while time.monotonic() < end:
                waits.append(await request(member, 0.01))
                await asyncio.sleep(0.0025)

        await asyncio.gather(*map(client, members))
        loads = sum(member.loads for member in members)
        assert 4 <= loads <= 10
        assert len(waits) > 5 * loads
        # The bound, a request that runs, an unload and a load; the rest is the test machine's.
        assert max(waits) < 0.2 + 0.01 + 0.0125 + 0.05 + 0.5


async def test_a_machine_under_load_evicts_no_busy_engine() -> None:
    """Random requests for five models all end, and no model is unloaded while it is used."""
    loaders = [sized(str(number), seconds=0.01) for number in range(5)]
    async with machine_of(*loaders, most_wait=0.05, memory=25) as members:
        work = [request(members[number % 5], 0.001 * (number % 7)) for number in range(400)]
        await asyncio.gather(*work)
        assert all(not member.running and not member.waiting for member in members)


async def test_a_failed_load_fails_all_that_wait() -> None:
    """A load that fails is an error for every request that waits, and the next ones fail fast."""
    loader = sized("a", seconds=0.05)
    loader.fails = "no such file"
    async with machine_of(loader) as [member]:
        work = [request(member, 0) for _ in range(5)]
        found = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(error, EngineUnavailable) for error in found)
        assert "no such file" in str(found[0])
        with pytest.raises(EngineUnavailable, match="no such file") as raised:
            await request(member, 0)
        assert loader.starts == 1
        assert 0 < (raised.value.retry_after or 0) <= loading.MOST_RETRY
        assert (loader.state, loader.tail) == ("failed", "the last line")


async def test_the_pause_after_failures_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure in a row doubles the pause before the next load, and a success ends it."""
    monkeypatch.setattr(loading, "FIRST_PAUSE", 0.01)
    loader = sized("a", seconds=0)
    loader.fails = "out of memory"
    async with machine_of(loader) as [member]:
        begun = time.monotonic()
        while loader.starts < 5:
            with pytest.raises(EngineUnavailable):
                await request(member, 0)
            await asyncio.sleep(0.002)
        # 10, 20, 40 and 80 ms.
        assert time.monotonic() - begun > 0.15
        loader.fails = ""
        await asyncio.sleep(0.17)
        await request(member, 0)
        assert loader.failure == ""


async def test_a_plain_request_waits_up_to_its_limit() -> None:
    """A request that waits for too long is a 503 with a delay that clients accept."""
    machine = Machine("here", None)
    member = Member(machine, sized("a", seconds=10, start_timeout=20), load_wait=0.05)
    try:
        with pytest.raises(EngineUnavailable, match="loading a") as raised:
            await member.take()
        assert raised.value.status == 503
        assert 1 <= (raised.value.retry_after or 0) <= 60
        assert not member.waiting
    finally:
        await machine.aclose()


async def test_an_idle_engine_is_unloaded() -> None:
    """An engine is unloaded after its idle time, and not while a request uses it."""
    loader = sized("a", seconds=0, idle=0.1)
    async with machine_of(loader) as [member]:
        await request(member, 0.3)
        assert loader.state == "ready"
        await asyncio.sleep(0.05)
        assert loader.state == "ready"
        await asyncio.sleep(0.15)
        state: str = loader.state
        assert state == "unloaded"
        await request(member, 0)
        assert loader.starts == 2


async def test_an_unload_by_the_operator_is_no_swap() -> None:
    """Unloads for another engine are counted, and those by hand are not."""
    async with machine_of(sized("a"), sized("b"), most_wait=0.02) as [one, two]:
        await request(one, 0)
        await one.unload()
        assert (one.loads, one.unloads) == (1, 0)
        await request(one, 0)
        await request(two, 0)
        assert (one.loads, one.unloads, two.unloads) == (2, 1, 0)


async def test_an_unload_waits_for_requests() -> None:
    """An engine that is unloaded by hand finishes its requests first, and new ones wait."""
    loader = sized("a", seconds=0)
    async with machine_of(loader) as [member]:
        running = asyncio.create_task(request(member, 0.2))
        await asyncio.sleep(0.02)
        unloading = asyncio.create_task(member.unload())
        await asyncio.sleep(0.02)
        assert loader.state == "ready"
        later = asyncio.create_task(request(member, 0))
        await asyncio.gather(running, unloading)
        assert await later > 0.05
        assert loader.starts == 2


async def test_an_unload_ends_when_its_engine_is_removed() -> None:
    """An unload that waits for requests ends with the engine, if a reload removes that first."""
    async with machine_of(sized("a"), sized("b")) as [member, other]:
        await member.take()
        unloading = asyncio.create_task(member.unload())
        await asyncio.sleep(0.02)
        await member.aclose()
        await asyncio.wait_for(unloading, 1)
        await other.take()
        unloading = asyncio.create_task(other.unload())
        await asyncio.sleep(0.02)
    await asyncio.wait_for(unloading, 1)


async def test_an_unload_ends_a_load() -> None:
    """A load that is ended by hand is an error for those that wait for it."""
    loader = sized("a", seconds=10)
    async with machine_of(loader) as [member]:
        waiting = asyncio.create_task(request(member, 0))
        await asyncio.sleep(0.02)
        await member.unload()
        with pytest.raises(EngineUnavailable):
            await waiting
        assert loader.state == "unloaded"


async def test_an_unload_during_the_end_of_a_load_waits_for_it() -> None:
    """A load that is ended twice, or while it fails, has its memory until the engine has ended."""
    for fails in ("", "it is broken"):
        slow, other = sized("a", seconds=0.2), sized("b")
        slow.fails = fails
        async with machine_of(slow, other) as [first, second]:
            tasks = [asyncio.create_task(first.load())]
            while not slow.starts:
                await asyncio.sleep(0.001)
            if not fails:
                tasks.append(asyncio.create_task(first.unload()))
            while not slow.stops:
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(first.unload()))
            await second.load()
            assert slow.ends
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_engine_opens_again_when_nobody_waits_for_its_memory() -> None:
    """An engine that was closed for another model accepts requests when that one's have left."""
    async with machine_of(sized("a"), sized("b"), most_wait=0.05) as [first, second]:
        await request(first, 0)
        long = asyncio.create_task(request(first, 0.3))
        await asyncio.sleep(0.01)
        other = asyncio.create_task(request(second, 0))
        await asyncio.sleep(0.1)
        assert first.is_closed
        other.cancel()
        assert await request(first, 0) < 0.1
        await long


async def test_measured_sizes_replace_unknown_ones() -> None:
    """An engine without a declared size has the largest size that was measured."""
    async with machine_of(SlowLoader("a", size=9), SlowLoader("b", size=3)) as [first, second]:
        # A load takes that long as far as they know, and an engine is kept for a time that fits.
        first.load_seconds = second.load_seconds = 0.05
        await request(first, 0)
        assert first.loader.memory == {"gpu": 9}
        await request(second, 0)
        # The first time nothing else is loaded; from then on both fit.
        assert (first.loader.state, second.loader.state) == ("unloaded", "ready")
        await request(first, 0)
        assert (first.loader.state, second.loader.state) == ("ready", "ready")


async def test_pinned_engines_leave_no_room() -> None:
    """A request for a model that does not fit next to pinned ones fails at once."""
    async with machine_of(sized("a", is_pinned=True), sized("b")) as [first, second]:
        await request(first, 0)
        with pytest.raises(EngineUnavailable, match="pinned engines: 'a'"):
            await request(second, 0)


async def test_calls_of_pools_do_not_wait_for_pinned_engines() -> None:
    """A model without room next to pinned ones fails at once with the reason, until there is."""
    async with machine_of(sized("a", is_pinned=True), sized("b")) as [first, second]:
        replica = Replica("b", second.backend, 2, second)
        pool = Pool("demo", [replica])
        job = Generation(Prompt(Text("Hello")), max_tokens=2)

        async def call() -> None:
            async with pool.open(job) as batches:
                assert [batch async for batch in batches]

        await first.load()
        async with asyncio.timeout(5):
            for _ in range(2):
                with pytest.raises(EngineUnavailable, match="pinned engines: 'a'") as found:
                    await call()
                assert found.value.retry_after == MOST_RETRY
            assert (replica.state, pool.waiting, pool.is_available) == ("failed", 0, False)
            await first.unload()
            while replica.state == "failed":
                await asyncio.sleep(0)
            await call()
        await pool.aclose()


async def test_a_refused_model_is_served_when_its_machine_gets_more_memory() -> None:
    """More memory ends the refusal of a model without room, and so may time."""
    async with machine_of(sized("a", is_pinned=True), sized("b")) as [first, second]:
        replica = Replica("b", second.backend, 2, second)
        pool = Pool("demo", [replica])
        job = Generation(Prompt(Text("Hello")), max_tokens=2)
        await first.load()
        with pytest.raises(EngineUnavailable, match="pinned engines: 'a'"):
            await run(pool, job)
        assert second.pause == MOST_RETRY
        machine: Machine = first._machine
        assert machine._act() == MOST_RETRY, "it plans again by itself"
        machine.limit({"gpu": 20}, 1.0)
        async with asyncio.timeout(5):
            while replica.state == "failed":
                await asyncio.sleep(0)
            await run(pool, job)
        await pool.aclose()


async def test_calls_wait_while_a_pinned_engine_of_unknown_size_loads() -> None:
    """No call is refused before a pinned engine has loaded, which shows how much it leaves."""
    slow = SlowLoader("a", seconds=0.1, is_pinned=True)
    async with machine_of(slow, sized("b"), memory=25) as [first, second]:
        pool = Pool("demo", [Replica("b", second.backend, 2, second)])
        loading = asyncio.create_task(first.load())
        while slow.state != "loading":
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await run(pool, Generation(Prompt(Text("Hello")), max_tokens=2))
        await loading
        await pool.aclose()


async def test_models_that_share_an_engine_are_served_by_its_first_load() -> None:
    """Each model of an engine knows what it serves, whichever model's request loads the engine."""
    for number in range(2):
        async with machine_of(sized("a")) as [member]:
            replica = Replica("a", member.backend, 2, member)
            pools = [Pool(name, [replica]) for name in ("first", "second")]
            assert (await pools[number].model()).context
            assert [pool.known is not None for pool in pools] == [True, True]
            for pool in pools:
                await pool.aclose()


async def test_calls_of_pools_load_engines_in_turns() -> None:
    """A pool's call that waits is served when the last call of the engine in its way has ended."""
    async with machine_of(sized("a"), sized("b"), most_wait=0.05) as members:
        pools = [
            Pool(member.name, [Replica(member.name, member.backend, 2, member)])
            for member in members
        ]

        async def call(pool: Pool, seconds: float) -> None:
            job = Generation(Prompt(Text("Hello")), max_tokens=2)
            async with pool.open(job) as batches:
                await asyncio.sleep(seconds)
                assert [batch async for batch in batches]

        async with asyncio.timeout(20):
            first = asyncio.create_task(call(pools[0], 0.25))
            await asyncio.sleep(0.1)
            await call(pools[1], 0)
            assert first.done()
            await first
            await asyncio.gather(*(call(pools[number % 2], 0.01) for number in range(20)))
        assert [member.state for member in members].count("ready") == 1
        assert not any(member.is_used for member in members)
        for pool in pools:
            await pool.aclose()


@pytest.mark.parametrize("has_room", [True, False])
async def test_an_engine_that_was_killed_is_loaded_again(has_room: bool) -> None:
    """Calls that wait load a killed engine next to those that run, if its memory is still free."""
    loaders = sized("a"), sized("b"), sized("c")
    async with machine_of(*loaders, memory=25) as members:
        replicas = [Replica(one.name, one.backend, 1, one) for one in members[:2]]
        pool = Pool("demo", replicas)
        for member in members[:2]:
            await member.load()
        await asyncio.gather(*(pool.ask(one) for one in replicas))
        loaders[1].lost("it was killed")
        assert (replicas[1].state, replicas[1].reason) == ("unloaded", "it was killed")
        if not has_room:
            await members[2].load()
        job = Generation(Prompt(Text("Hello")), max_tokens=2)

        async def call() -> None:
            async with pool.open(job) as batches:
                await asyncio.sleep(0.05)
                assert [batch async for batch in batches]

        async with asyncio.timeout(20):
            await asyncio.gather(*(call() for _ in range(6)))
        assert [one.starts for one in loaders] == ([1, 2, 0] if has_room else [1, 1, 1])
        assert not (has_room and replicas[1].reason)
        await pool.aclose()


@pytest.mark.parametrize("memory", [25, 15])
async def test_a_call_that_a_loaded_engine_fails_loads_the_next_one(memory: int) -> None:
    """A call that fails on the loaded engine of a model runs on the other one, which is loaded."""
    engines = Engine("a"), Engine("b")
    loaders = [sized(one.name, engine=one) for one in engines]
    async with machine_of(*loaders, most_wait=0.02, memory=memory) as members:
        pool = Pool("demo", [Replica(one.name, one.backend, 1, one) for one in members])
        await members[0].load()
        engines[0].fails = EngineError("it cannot compute")
        async with asyncio.timeout(5):
            texts, _ = await run(pool, Generation(Prompt(Text("Hello")), max_tokens=2))
        assert texts == [b"b"]
        assert (members[0].state, members[1].state) == (
            "ready" if memory == 25 else "unloaded", "ready",
        )  # fmt: skip
        await pool.aclose()


async def test_an_engine_that_is_loaded_again_is_used() -> None:
    """A load ends the time for which an engine that failed gets no requests."""
    async with machine_of(sized("a"), sized("b"), most_wait=0.02) as members:
        replicas = [Replica(one.name, one.backend, 1, one) for one in members]
        pool = Pool("demo", replicas)
        await members[0].load()
        replicas[0].breaker.eject()
        replicas[0].set("unavailable", "it failed several times")
        async with asyncio.timeout(5):
            await run(pool, Generation(Prompt(Text("Hello")), max_tokens=2))
        assert sum(one.loads for one in members) <= 3
        await pool.aclose()


class Demand:
    """A model for which a call waits."""

    name, waiting, oldest = "a", 1, 1.0
    stranded: frozenset[Replica] = frozenset()

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = [*replicas]

    def admit(self, replica: Replica, model: Model) -> None:
        """Do nothing."""

    async def read_facts(self, backend: Backend) -> None:
        """Do nothing."""


@pytest.mark.parametrize("leaves", ["drained", "removed"])
async def test_an_engine_that_leaves_is_not_waited_for(leaves: str) -> None:
    """A call that waits is for the engines that may run it: none is loaded to be drained."""
    async with machine_of(sized("a")) as [member]:
        old, other = Replica("a", member.backend, 2, member), Replica("b", Engine("b"))
        demand = Demand(old, other)
        member.attach(demand, old)
        assert member.view(time.monotonic()).waited == 1.0
        if leaves == "drained":
            old.set("draining")
        else:
            demand.replicas = [other]
        assert member.view(time.monotonic()).waited is None


async def test_an_engine_that_leaves_has_its_memory_until_it_has_ended() -> None:
    """The successor of a changed engine is loaded once that one has ended."""
    old, new = sized("a", seconds=0.4, is_pinned=True), sized("a")
    async with machine_of(old, new) as [first, second]:
        await first.load()
        leaves = asyncio.create_task(first.aclose())
        await asyncio.sleep(0)
        await second.load()
        assert (old.ends, new.starts) == (1, 1)
        await leaves


async def test_a_changed_engine_and_its_successor_are_told_apart() -> None:
    """An idle engine is unloaded without the busy one that has its name on the same machine."""
    loaders = [sized("a"), sized("a", idle=0.05)]
    async with machine_of(*loaders, memory=25) as [old, new], old.use():
        await request(new, 0)
        await asyncio.sleep(0.3)
        assert (old.state, new.state) == ("ready", "unloaded")


async def test_a_failed_engine_is_unloaded_at_once() -> None:
    """An unload by hand ends the pause of a failed engine instead of waiting for it."""
    loader = sized("a")
    loader.fails = "no such file"
    async with machine_of(loader) as [member]:
        with pytest.raises(EngineUnavailable):
            await member.load()
        assert loader.pause > 0.5
        async with asyncio.timeout(0.5):
            await member.unload()
        assert loader.state == "unloaded"


async def test_a_failed_load_says_when_it_is_repeated() -> None:
    """A request for a model that has failed hears of the next attempt, in `retry-after`, too."""
    loader = sized("a")
    loader.fails = "it is broken"
    job = Generation(Prompt(Text("Hello")), max_tokens=2)
    for failures, seconds, shown in ((1, 2.0, 2), (3, 8.0, 8), (9, MOST_RETRY, 300)):
        async with machine_of(loader) as [member]:
            pool = Pool("demo", [Replica("a", member.backend, 2, member)])
            loader.state, loader._failures, loader._again = "unloaded", failures, 0.0
            for _ in range(2):
                with pytest.raises(EngineUnavailable) as raised:
                    await run(pool, job)
                assert raised.value.message == (
                    "No engine of the model demo is available. a: it is broken. "
                    f"The next attempt is in {shown} s."
                )
                assert raised.value.retry_after == pytest.approx(seconds, abs=0.5)
            await pool.aclose()


@pytest.mark.parametrize("error", [EngineError("The engine has no model."), ValueError("what")])
@pytest.mark.parametrize("step", ["learn", "remember"])
async def test_every_error_of_a_load_is_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, step: str
) -> None:
    """An engine that cannot be used once it is loaded has failed, and those that wait hear that."""

    async def fail(_: Member) -> None:
        raise error

    monkeypatch.setattr(Member, step, fail)
    loader = sized("a")
    async with machine_of(loader) as [member]:
        pool = Pool("demo", [Replica("a", member.backend, 2, member)])
        job = Generation(Prompt(Text("Hello")), max_tokens=2)
        async with asyncio.timeout(5):
            found = await asyncio.gather(
                member.load(), request(member, 0), run(pool, job), return_exceptions=True
            )
        for one in found:
            assert isinstance(one, EngineError)
            assert "no model" in str(one) or "could not be loaded" in str(one)
        assert (loader.starts, loader.stops, loader.state) == (1, 1, "failed")
        assert not member.running
        with pytest.raises(EngineUnavailable, match="could not be loaded: "):
            await request(member, 0)
        await pool.aclose()
