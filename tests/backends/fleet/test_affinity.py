"""Tests of where a prompt runs: hashes of prefixes, their table, sessions, and busy engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from latimer.backends.base import Text
from latimer.backends.errors import EngineUnavailable
from latimer.backends.fleet.affinity import MOST_BLOCKS, Prefixes, blocks_of, matches
from latimer.backends.fleet.place import MOST_SESSIONS, SESSIONS_AN_ENGINE, Sessions
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica, Speed
from latimer.backends.queue import Ticket
from support.engines.fleet import Engine, job, pool_of
from support.jobs import run


async def said(pool: Pool, text: str, owner: str = "", session: str = "") -> str:
    """Return the name of the engine that ran a prompt."""
    ticket = Ticket()
    ticket.session = session
    texts, _ = await run(pool, replace(job(text, owner), ticket=ticket))
    return texts[0].decode()


class Known(Speed):
    """A speed that no measurement changes."""

    slope = 0.0

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope


def test_equal_prefixes_have_equal_hashes() -> None:
    """Prompts have as many hashes in common as whole blocks, and none for another owner."""
    text = "".join(random.Random(1).choices("abcdef ", k=1000))
    whole = blocks_of(Text(text), "owner")
    assert len(whole) == 15
    other = blocks_of(Text(text[:640] + "x" + text[641:]), "owner")
    assert [a == b for a, b in zip(whole, other, strict=True)] == [True] * 10 + [False] * 5
    assert not set(whole) & set(blocks_of(Text(text), "another"))
    ids = tuple(range(100))
    assert blocks_of(ids, "owner")[:3] == blocks_of(ids[:50], "owner")
    assert blocks_of((), "owner") == []
    assert len(blocks_of(Text("x" * 1_000_000), "")) == MOST_BLOCKS


def test_the_table_is_bounded_and_keeps_beginnings() -> None:
    """The least recently used blocks are forgotten first, and never one before its successor."""
    table = Prefixes(100)
    prompts = [[hash((index, step)) for step in range(40)] for index in range(4)]
    for blocks in prompts:
        table.add(blocks)
        assert len(table.used) <= 100
    assert [matches([table], blocks)[0] for blocks in prompts] == [0, 20, 40, 40]
    for blocks in prompts:
        known = [block in table.used for block in blocks]
        assert known == sorted(known, reverse=True)


async def runs_of(pool: Pool, engines: Sequence[Engine], texts: Sequence[str]) -> list[int]:
    """Return how many of these calls, which run at the same time, each engine has."""
    for engine in engines:
        engine.gate.clear()
    tasks = [asyncio.create_task(said(pool, text)) for text in texts]
    await asyncio.sleep(0.02)
    runs = [engine.runs for engine in engines]
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*tasks)
    return runs


async def test_a_conversation_stays_where_its_prompt_is() -> None:
    """Each turn of a conversation runs on the engine that has its earlier turns."""
    engines = [Engine(str(index), 4) for index in range(4)]
    pool = await pool_of(*engines)
    chance = random.Random(2)
    conversations = ["".join(chance.choices("abcdefg ", k=800)) for _ in range(40)]
    first = [await said(pool, text) for text in conversations]
    assert len(set(first)) == 4
    for turn in range(4):
        conversations = [f"{text} {turn} and so on" * 1 for text in conversations]
        assert [await said(pool, text) for text in conversations] == first


async def test_owners_share_no_prefixes() -> None:
    """The same prompt of another owner is not known to be anywhere."""
    pool = await pool_of(Engine("one"), Engine("other"))
    notes: list[str] = []
    for owner in ("a", "b", "a"):
        ticket = Ticket()
        await run(pool, replace(job("x" * 500, owner), ticket=ticket))
        notes.append(ticket.affinity)
    assert notes == ["miss", "miss", "hit"]


@pytest.mark.parametrize("affinity", ["prefix", "session"])
async def test_a_session_stays_where_it_was(affinity: str) -> None:
    """Requests of one session run on one engine, even if their prompts have nothing in common."""
    engines = [Engine(str(index), 4) for index in range(4)]
    pool = await pool_of(*engines, affinity=affinity)
    chance = random.Random(3)
    for session in ("a", "b", "c", "d"):
        names = {
            await said(pool, "".join(chance.choices("abcdefg ", k=500)), session=session)
            for _ in range(5)
        }
        assert len(names) == 1
    assert len({len(engine.jobs) for engine in engines}) == 1


def test_a_pool_knows_as_many_sessions_as_its_engines_need() -> None:
    """The least recently used session is forgotten, and more engines have more sessions."""
    replica, sessions = Replica("one", Engine("one")), Sessions()
    for engines, most in ((2, MOST_SESSIONS), (1_000, 1_000 * SESSIONS_AN_ENGINE)):
        sessions.resize(engines)
        for number in range(most + 5):
            sessions.move(("key", f"{engines} {number}"), replica)
        assert len(sessions.homes) == replica.sessions == most
        assert ("key", f"{engines} 4") not in sessions.homes
        assert ("key", f"{engines} 5") in sessions.homes


async def test_load_goes_before_a_short_prefix() -> None:
    """A prefix that many prompts share does not send all of them to one engine."""
    engines = [Engine(str(index), 4) for index in range(4)]
    pool = await pool_of(*engines)
    await said(pool, "system " * 20)
    chance = random.Random(4)
    texts = ["system " * 20 + "".join(chance.choices("abcdefg ", k=800)) for _ in range(12)]
    runs = await runs_of(pool, engines, texts)
    assert max(runs) <= 4
    assert min(runs) >= 2


async def test_a_prompt_that_ends_with_the_common_beginning_attracts_no_others() -> None:
    """Prompts are spread even if one of them was the common beginning and little more."""
    engines = [Engine(str(index), 8) for index in range(4)]
    pool = await pool_of(*engines)
    chance = random.Random(7)

    def prompt() -> str:
        return "system " * 64 + "".join(chance.choices("abcdefg ", k=400))

    for text in (prompt(), "system " * 64, *(prompt() for _ in range(8)), "system " * 64):
        await said(pool, text)
    assert max(await runs_of(pool, engines, [prompt() for _ in range(16)])) <= 6


async def test_a_call_waits_for_a_busy_engine_if_that_is_sooner() -> None:
    """A call waits for the engine that has its prompt only if evaluating it takes longer."""
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other)
    text = "".join(random.Random(5).choices("abcdefg ", k=4000))
    has = pool.replicas[0] if await said(pool, text) == "one" else pool.replicas[1]
    busy = one if has.name == "one" else other
    for seconds, expected in ((0.0001, False), (0.01, True)):
        # A prompt of 1,000 tokens, and calls of two seconds.
        has.call_seconds = 2.0
        for replica in pool.replicas:
            replica.speed = Known(seconds)
        busy.gate.clear()
        first = asyncio.create_task(said(pool, text))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(said(pool, text + " more"))
        await asyncio.sleep(0.01)
        assert second.done() is not expected
        assert (busy.runs, pool.waiting) == (1, int(expected))
        busy.gate.set()
        assert (await first, await second == has.name) == (has.name, expected)
        await said(pool, text)
        for replica in pool.replicas:
            if replica is not has:
                replica.prefixes.clear()


async def test_a_parked_call_takes_another_engine_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for a busy engine for a bounded time, and then runs on another one."""
    monkeypatch.setattr("latimer.backends.fleet.pool.LONGEST_PARKED", 0.05)
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other)
    text = "".join(random.Random(6).choices("abcdefg ", k=4000))
    busy = one if await said(pool, text) == "one" else other
    has = next(replica for replica in pool.replicas if replica.backend is busy)
    has.call_seconds = 1.0
    for replica in pool.replicas:
        replica.speed = Known(1.0)
    busy.gate.clear()
    first = asyncio.create_task(said(pool, text))
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(said(pool, text), 2) != busy.name
    busy.gate.set()
    assert await first == busy.name


async def test_new_conversations_are_spread() -> None:
    """Conversations that only begin alike are spread over the engines, as far as these are busy."""
    engines = [Engine(str(index), 4) for index in range(4)]
    pool = await pool_of(*engines)
    chance = random.Random(7)
    system = "system " * 40
    await said(pool, system + "a" * 200)
    texts = [system + "".join(chance.choices("abcdefg ", k=400)) for _ in range(8)]
    assert {*await runs_of(pool, engines, texts)} == {2}


async def test_calls_that_wait_for_an_engine_are_counted() -> None:
    """A call does not wait for an engine if so many wait there that evaluating it is sooner."""
    one, other = Engine("one", 1), Engine("other", 8)
    pool = await pool_of(one, other)
    text = "".join(random.Random(5).choices("abcdefg ", k=4000))
    has, free = pool.replicas
    has.prefixes.add(blocks_of(Text(text), ("demo", "")))
    # Evaluating the prompt of about 1,000 tokens counts as 4 seconds, and a call takes 1.8.
    free.speed, has.call_seconds = Known(0.001), 1.8
    one.gate.clear()
    tasks = []
    for index in range(3):
        tasks.append(asyncio.create_task(said(pool, f"{text} {index}")))
        await asyncio.sleep(0.01)
    assert (one.runs, pool.waiting) == (1, 2)
    assert await said(pool, text) == "other"
    one.gate.set()
    assert (await asyncio.gather(*tasks))[0] == "one"


async def test_the_reported_cache_corrects_what_is_expected() -> None:
    """An engine that reports fewer cached tokens than expected is not waited for any more."""
    one, other = Engine("one", 1), Engine("other", 1)
    other.error = EngineUnavailable("It is away.")
    pool = await pool_of(one, other)
    text = "".join(random.Random(5).choices("abcdefg ", k=4000))
    has = pool.replicas[0]
    one.cached = 2**20
    for _ in range(3):
        await said(pool, text)
    assert has.trust == 1.0
    one.cached = 16
    for _ in range(60):
        await said(pool, text)
    assert has.trust < 0.05
