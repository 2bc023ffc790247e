"""Tests of a model over several engines: places, failover, draining, and what is noticed."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from latimer.backends.base import EmbeddingModel, Generation, NativeReply
from latimer.backends.errors import (
    Busy,
    ContextFull,
    EngineError,
    EngineUnavailable,
    ModelChanged,
    ModelLoading,
    Refused,
    RequestError,
    Unsupported,
)
from latimer.backends.fleet import pool as module
from latimer.backends.fleet.breaker import FAILURES
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.queue import Ticket
from support.engines.fleet import Engine, job, pool_of
from support.jobs import run


async def said(pool: Pool, one: Generation | None = None) -> str:
    """Return the name of the engine that ran a job."""
    one = one or job()
    if pool.known is not None:
        one.fingerprint = pool.known.fingerprint
    texts, finishes = await run(pool, one)
    assert len(finishes) == len(texts)
    return b"".join(texts).decode()


def idle(pool: Pool) -> bool:
    """Return True if no place is taken, and nobody waits."""
    shares = pool._shares._calls
    return not any(one.running for one in pool.replicas) and not pool.waiting and not shares


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which engines are asked again."""
    monkeypatch.setattr(module, "AGAIN", 0.05)
    monkeypatch.setattr(module, "LOOK", 0.1)
    monkeypatch.setattr(module, "SILENCE", 0.1)
    monkeypatch.setattr(module, "PATIENCE", 0.5)


async def test_an_engine_gets_as_many_calls_as_it_has_places() -> None:
    """Calls wait for a free place of any engine, and each engine runs at most its places."""
    one, other = Engine("one", 2), Engine("other", 3)
    pool = await pool_of(one, other)
    for engine in (one, other):
        engine.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(20)]
    await asyncio.sleep(0.02)
    assert (one.runs, other.runs, pool.waiting) == (2, 3, 15)
    one.gate.set()
    await asyncio.sleep(0.05)
    assert other.runs == 3
    other.gate.set()
    assert len(await asyncio.gather(*tasks)) == 20
    assert (one.most, other.most) == (2, 3)
    assert idle(pool)


async def test_the_engine_is_chosen_when_a_place_is_free() -> None:
    """A call that waits gets the first free place, whichever engine it is on."""
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other, affinity="none")
    one.gate.clear()
    other.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(3)]
    await asyncio.sleep(0.02)
    other.gate.set()
    done = await asyncio.wait_for(asyncio.gather(*tasks[1:]), 2)
    assert [*done] == ["other", "other"]
    one.gate.set()
    assert await tasks[0] == "one"


async def test_processes_do_not_choose_the_same_engine_in_step() -> None:
    """Engines without calls take turns, in an order that two processes do not have in common."""
    chosen = []
    for _ in range(2):
        engines = (Engine(name) for name in ("one", "other"))
        pool = await pool_of(*engines, affinity="none", draw=random.random)
        chosen.append([await said(pool) for _ in range(80)])
    for names in chosen:
        turns = [*zip(names[::2], names[1::2], strict=True)]
        assert {*turns} == {("one", "other"), ("other", "one")}
    assert chosen[0] != chosen[1]


async def test_a_failure_before_the_first_event_is_hidden() -> None:
    """A job whose engine fails before its first event runs on another engine."""
    one, other = Engine("one", 4), Engine("other", 4)
    pool = await pool_of(one, other)
    for error in (EngineUnavailable("It is gone."), EngineError("It is broken.")):
        one.fails = one.error = error
        assert {await said(pool) for _ in range(6)} == {"other"}
    assert idle(pool)


async def test_a_failure_after_the_first_event_is_shown() -> None:
    """A job that has begun is never sent to another engine."""
    one, other = Engine("one", 4), Engine("other", 4)
    pool = await pool_of(one, other)
    one.breaks = other.breaks = EngineError("It is broken.")
    with pytest.raises(EngineError, match="broken"):
        await said(pool)
    assert len(one.jobs) + len(other.jobs) == 1
    assert idle(pool)


@pytest.mark.parametrize("error", [Refused("prompt", "echo", "no"), RequestError("prompt", "x")])
async def test_errors_of_the_request_are_not_tried_again(error: RequestError) -> None:
    """An error of the request is raised at once, and counts against no engine."""
    one, other = Engine("one"), Engine("other")
    pool = await pool_of(one, other)
    one.fails = other.fails = error
    for _ in range(10):
        with pytest.raises(type(error)):
            await said(pool)
    assert len(one.jobs) + len(other.jobs) == 10
    one.fails = other.fails = None
    assert {one.state for one in pool.replicas} == {"ready"}
    assert idle(pool)


async def test_an_engine_that_fails_is_ejected_but_never_the_last() -> None:
    """Five failures in a row eject an engine; the last one that is ready keeps its requests."""
    one, other = Engine("one", 8), Engine("other", 8)
    pool = await pool_of(one, other, affinity="none")
    one.fails = EngineError("It is broken.")
    for _ in range(30):
        assert await said(pool) == "other"
    assert len(one.jobs) == 5
    assert [replica.state for replica in pool.replicas] == ["unavailable", "ready"]
    other.fails = EngineError("It is broken, too.")
    for _ in range(10):
        with pytest.raises(EngineError):
            await said(pool)
    assert pool.replicas[1].state == "ready"
    other.fails = None
    assert await said(pool) == "other"


class Native(Engine):
    """An engine with native replies."""

    status = 200

    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        """Yield an empty object."""
        yield NativeReply(self.status, "application/json", self._body())

    async def _body(self) -> AsyncIterator[bytes]:
        yield b"{}"


async def test_an_engine_without_native_replies_keeps_its_places() -> None:
    """A native call that an engine refuses at once gives its place back."""
    pool = await pool_of(Engine("one"))
    with pytest.raises(Unsupported):
        async with pool.native(job(), stream=False):
            pass
    assert idle(pool)


@pytest.mark.parametrize(("status", "room"), [(200, 8), (400, 8), (500, 1)])
async def test_a_native_call_shows_that_an_engine_is_well(status: int, room: int) -> None:
    """An engine that is tried after its exclusion has all of its places after a native call, unless
    that is an error of the server."""
    engine = Native("one", 8)
    engine.status = status
    pool = await pool_of(engine)
    (replica,) = pool.replicas
    for _ in range(FAILURES):
        replica.breaker.fail()
    replica.breaker.is_trying = True
    replica.set("ready")
    assert replica.room == 1
    async with pool.native(job(), stream=False) as reply:
        assert reply.status == status
    assert (replica.room, replica.breaker.has_failed) == (room, room == 1)
    assert idle(pool)


async def test_an_engine_with_a_full_context_is_not_ejected() -> None:
    """A context that is full counts against no engine, before or after the first event, and a call
    that has not begun runs on another engine."""
    one, other = Engine("one", 8), Engine("other", 8)
    pool = await pool_of(one, other, affinity="none")
    one.fails = ContextFull("llama-server", "Wait.", 512)
    assert {await said(pool) for _ in range(20)} == {"other"}
    assert pool.retries == {("one", "busy"): len(one.jobs)}
    assert len(one.jobs) > 5
    one.breaks = other.breaks = one.fails
    one.fails = None
    for _ in range(20):
        with pytest.raises(ContextFull):
            await said(pool)
    assert [replica.state for replica in pool.replicas] == ["ready", "ready"]
    assert idle(pool)


async def test_retries_have_a_budget() -> None:
    """If every call fails, at most a share of the calls is sent again."""
    engines = [Engine(str(index), 64) for index in range(3)]
    pool = await pool_of(*engines)
    for engine in engines:
        engine.fails = Busy("It is full.", 1.0)
    for _ in range(1000):
        with pytest.raises(Busy):
            await said(pool)
    tries = sum(len(engine.jobs) for engine in engines)
    assert 1000 + 100 + 200 - 2 <= tries <= 1000 + 100 + 200 + 100


async def test_the_reasons_of_engines_are_sentences(caplog: pytest.LogCaptureFixture) -> None:
    """Each reason ends before the next one begins, and an ejection names its reason after a
    colon."""
    one, other = Engine("one", 8), Engine("other", 8)
    pool = await pool_of(one, other, affinity="none")
    one.fails = EngineError("The engine at URL failed.")
    for _ in range(12):
        await said(pool)
    assert "engine one is not used for 30 s: The engine at URL failed." in caplog.text
    pool.replicas[0].set("draining", "it is drained by the operator")
    pool.replicas[1].set("unavailable", "It cannot be reached. Is it running?")
    assert pool.unavailable().message == (
        "No engine of the model demo is available. one: it is drained by the operator. "
        "other: It cannot be reached. Is it running?"
    )


async def test_an_engine_that_returns_gets_requests_again() -> None:
    """An engine that does not answer is asked again, and used as soon as it does."""
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other, affinity="none")
    one.fails = one.error = EngineUnavailable("It is gone.")
    for _ in range(3):
        assert await said(pool) == "other"
    pool.start()
    one.fails = one.error = None
    await asyncio.sleep(0.3)
    assert {await said(pool) for _ in range(4)} == {"one", "other"}
    await pool.aclose()


class Generating(Engine):
    """An engine that embeds nothing as long as it generates for others."""

    async def embedding_model(self) -> EmbeddingModel | None:
        """Wait."""
        await asyncio.sleep(60)
        raise AssertionError


async def test_an_engine_that_is_busy_for_others_gets_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine is used although it cannot show yet what it embeds."""
    monkeypatch.setattr(module, "FACTS", 0.1)
    async with asyncio.timeout(5):
        pool = await pool_of(Generating("one"))
        assert await said(pool) == "one"
    await pool.aclose()


class Learning(Engine):
    """An engine that fails when it is asked what it embeds, and then learns that."""

    asked_for_facts = 0

    async def embedding_model(self) -> EmbeddingModel | None:
        """Return the facts as far as they are known."""
        self.asked_for_facts += 1
        if self.asked_for_facts == 1:
            raise EngineError("It is broken.")
        return EmbeddingModel(64 if self.asked_for_facts > 2 else None, None, 512)


async def test_facts_that_are_not_known_yet_are_not_kept() -> None:
    """An engine is asked what it embeds until it knows that, and no longer."""
    engine = Learning("one")
    pool = await pool_of(engine)
    found = [await pool.embedding_model() for _ in range(3)]
    assert [one and one.dimensions for one in found] == [None, 64, 64]
    assert engine.asked_for_facts == 3
    await pool.aclose()


async def test_facts_that_a_look_has_not_found_are_asked_for_again() -> None:
    """A look that finds an engine busy leaves the question of what it embeds to a later one."""
    engine = Learning("one")
    engine.asked_for_facts = 1
    pool = await pool_of(engine)
    await pool.read_facts(engine)
    found = await pool.embedding_model()
    assert found is not None
    assert (found.dimensions, engine.asked_for_facts) == (64, 3)
    await pool.aclose()


async def test_a_request_waits_for_the_first_engine_that_answers() -> None:
    """If no engine answered before, a request asks all of them before it fails."""
    one, other = Engine("one"), Engine("other")
    one.error = other.error = EngineUnavailable("It starts.")
    pool = await pool_of(one, other)
    with pytest.raises(EngineUnavailable, match="No engine of the model demo"):
        await said(pool)
    other.error = None
    assert await said(pool) == "other"
    assert idle(pool)


async def test_an_engine_that_is_away_at_the_start_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says once that an engine has not answered since the start, and once that it does."""
    caplog.set_level("INFO", "latimer")
    one, other = Engine("one"), Engine("other")
    other.error = EngineUnavailable("It cannot be reached.")
    pool = await pool_of(one, other)
    await pool.ask(pool.replicas[1])
    found: list[Any] = caplog.records
    assert [(each.event, each.fields["engine"]) for each in found] == [("engine_lost", "other")]
    assert found[0].fields["reason"] == "It cannot be reached."
    other.error = None
    await pool.ask(pool.replicas[1])
    assert [each.event for each in found] == ["engine_lost", "engine_returned"]
    assert pool.replicas[1].state == "ready"


async def test_an_engine_that_ends_while_it_is_drained_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine that is used again after a drain, and does not answer, is lost."""
    one, other = Engine("one"), Engine("other")
    pool = await pool_of(one, other)
    replica = pool.replicas[1]
    replica.set("draining", "it is drained by the operator")
    other.error = EngineUnavailable("It is gone.")
    await pool.ask(replica)
    assert (replica.state, caplog.messages) == ("draining", [])
    replica.set("unavailable", "it was drained")
    for _ in range(2):
        await pool.ask(replica)
    found: list[Any] = caplog.records
    assert [(each.event, each.fields["reason"]) for each in found] == [
        ("engine_lost", "It is gone.")
    ]


async def test_an_engine_that_ends_while_it_loads_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first load is not logged; an engine that ends during it is lost once."""
    caplog.set_level("INFO", "latimer")
    one, other = Engine("one"), Engine("other")
    other.error = ModelLoading("It loads.")
    pool = await pool_of(one, other)
    replica = pool.replicas[1]
    assert (replica.shown, replica.reason, caplog.messages) == ("loading", "It loads.", [])
    for error in (EngineUnavailable("It is gone."), ModelLoading("It loads."), other.error):
        other.error = error
        await pool.ask(replica)
    assert replica.shown == "loading"
    other.error = None
    await pool.ask(replica)
    found: list[Any] = caplog.records
    assert [each.event for each in found] == ["engine_lost", "engine_returned"]
    assert pool.replicas[1].shown == "ready"


async def test_another_model_is_noticed_before_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine that returns with another model gets no job, unless it is the only one."""
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other)
    one.facts = replace(one.facts, name="evil", template="another", fingerprint="fp_evil")
    one.fails = EngineUnavailable("It has loaded another model.")
    for _ in range(4):
        assert await said(pool) == "other"
    one.fails = None
    await asyncio.sleep(0.01)
    assert pool.replicas[0].state == "unavailable"
    assert "another model (evil): its chat template" in pool.replicas[0].reason
    # It is the only one left: the pool serves its model from now on.
    other.fails = other.error = EngineUnavailable("It is gone.")
    with pytest.raises(ModelChanged, match="have loaded another model"):
        await said(pool)
    assert {one.fingerprint for one in one.jobs} <= {"fp_echo"}
    assert await said(pool) == "one"
    assert (await pool.model()).name == "evil"
    records: list[Any] = caplog.records
    assert [each.getMessage() for each in records if each.event == "model_changed"] == [
        "model demo: it serves another model (evil): its chat template is not as before; all "
        "requests get it now"
    ]


async def test_each_engine_gets_its_own_fingerprint() -> None:
    """Engines of one model can have different fingerprints, and each job names its engine's."""
    one, other = Engine("one", 1), Engine("other", 1)
    one.facts = replace(one.facts, fingerprint="fp_one")
    other.facts = replace(other.facts, fingerprint="fp_other")
    pool = await pool_of(one, other, affinity="none")
    assert {await said(pool) for _ in range(4)} == {"one", "other"}
    assert {one.fingerprint for one in one.jobs} == {"fp_one"}
    assert {one.fingerprint for one in other.jobs} == {"fp_other"}
    assert (await pool.model()).fingerprint in ("fp_one", "fp_other")


async def test_a_smaller_context_is_left_out() -> None:
    """An engine with a smaller context is not used, with the reason."""
    one, other = Engine("one"), Engine("other")
    pool = await pool_of(one)
    other.facts = replace(other.facts, context=16)
    pool.update([*pool.replicas, Replica("other", other)], 8, "none")
    await pool.ask(pool.replicas[1])
    assert pool.replicas[1].reason == "its context is 16 tokens, less than 4096"
    assert {await said(pool) for _ in range(4)} == {"one"}
    await pool.aclose()


async def test_a_full_queue_is_a_429() -> None:
    """A request beyond the queue is rejected, and those that wait are served."""
    one = Engine("one", 1)
    pool = await pool_of(one, queue=2)
    one.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(Busy) as caught:
        await said(pool)
    assert 0 < (caught.value.retry_after or 0) <= 60
    one.gate.set()
    assert await asyncio.gather(*tasks) == ["one"] * 3
    assert idle(pool)


async def test_a_request_may_have_more_calls_than_the_queue() -> None:
    """The calls of a request that waits already are not rejected."""
    one = Engine("one", 1)
    pool = await pool_of(one, queue=1)
    one.gate.clear()
    first = asyncio.create_task(said(pool))
    await asyncio.sleep(0.01)
    ticket = Ticket()
    jobs = [replace(job(), ticket=ticket) for _ in range(5)]
    tasks = [asyncio.create_task(said(pool, one)) for one in jobs]
    await asyncio.sleep(0.01)
    one.gate.set()
    assert await asyncio.gather(first, *tasks) == ["one"] * 6
    assert idle(pool)


@pytest.mark.parametrize("wait", [0.0, 0.001, 0.01, 0.03])
async def test_a_client_that_leaves_gives_its_place_back(wait: float) -> None:
    """A cancelled call leaves no place, no share and no task, in any phase."""
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other)
    one.gate.clear()
    other.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(8)]
    await asyncio.sleep(wait)
    for task in tasks[::2]:
        task.cancel()
    one.gate.set()
    other.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks].count(False) >= 4
    assert idle(pool)
    assert one.runs == other.runs == 0


@pytest.mark.parametrize("cancels", [False, True])
async def test_an_engine_whose_end_fails_gives_its_place_back(cancels: bool) -> None:
    """A place is free again if the end of a failed call is an error, or is cancelled itself."""

    class Ends(Engine):
        @asynccontextmanager
        async def open(self, job: Generation) -> Any:
            async def batches() -> Any:
                await asyncio.sleep(10 if cancels else 0)
                raise EngineError("The engine broke.")
                yield

            try:
                yield batches()
            finally:
                await asyncio.sleep(10 if cancels else 0)
                raise EngineError("The end failed, too.")

    pool = await pool_of(Ends("one", 1))
    task = asyncio.create_task(said(pool))
    for _ in range(2 if cancels else 0):
        await asyncio.sleep(0.02)
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cancels else EngineError):
        await task
    assert idle(pool)


async def test_draining_an_engine_loses_nothing() -> None:
    """A draining engine ends what it runs and gets nothing more."""
    one, other = Engine("one", 2), Engine("other", 2)
    pool = await pool_of(one, other, affinity="none")
    one.gate.clear()
    other.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(10)]
    await asyncio.sleep(0.01)
    pool.replicas[0].set("draining")
    other.gate.set()
    await asyncio.sleep(0.05)
    one.gate.set()
    assert sorted(await asyncio.gather(*tasks)) == ["one"] * 2 + ["other"] * 8
    assert {await said(pool) for _ in range(4)} == {"other"}
    assert idle(pool)


async def test_choices_take_a_place_each() -> None:
    """A job of several choices takes as many places of one engine as it has."""
    one, other = Engine("one", 4), Engine("other", 4)
    pool = await pool_of(one, other)
    one.gate.clear()
    other.gate.clear()
    tasks = [asyncio.create_task(said(pool, job(choices=9))) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert (one.runs, other.runs) == (9, 9)
    assert [replica.running for replica in pool.replicas] == [4, 4]
    third = asyncio.create_task(said(pool))
    await asyncio.sleep(0.01)
    assert not third.done()
    one.gate.set()
    other.gate.set()
    await asyncio.gather(*tasks, third)
    assert idle(pool)


async def test_an_engine_that_hangs_is_left() -> None:
    """Calls that wait for their first event leave an engine that no longer answers."""
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other, affinity="none")
    one.gate.clear()
    other.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(2)]
    await asyncio.sleep(0.01)
    other.gate.set()

    async def never() -> None:
        await asyncio.sleep(60)

    one.health = never  # type: ignore[method-assign]
    pool.start()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 2) == ["other", "other"]
    assert pool.replicas[0].state == "unavailable"
    await pool.aclose()
    assert one.runs == 0


async def test_waiting_calls_fail_when_no_engine_is_left() -> None:
    """Calls that wait fail as soon as no engine can run them."""
    one = Engine("one", 1)
    pool = await pool_of(one)
    one.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(3)]
    await asyncio.sleep(0.01)
    one.error = EngineUnavailable("It is gone.")
    await pool.ask(pool.replicas[0])
    done = await asyncio.wait_for(asyncio.gather(*tasks[1:], return_exceptions=True), 2)
    assert [type(error) for error in done] == [EngineUnavailable] * 2
    one.gate.set()
    assert await tasks[0] == "one"
    assert idle(pool)


async def test_two_models_share_the_places_of_an_engine() -> None:
    """An engine of two pools runs at most its places in all, and both have their turns."""
    one = Engine("one", 1)
    first = await pool_of(one)
    second = Pool("second", first.replicas)
    await second.ask(first.replicas[0])
    one.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(3) for pool in (first, second)]
    await asyncio.sleep(0.01)
    one.gate.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 2) == ["one"] * 6
    assert one.most == 1
    assert idle(first)
    assert idle(second)


async def test_the_request_learns_its_engine() -> None:
    """A request learns which engine runs it, and if that has its prompt."""
    one, other = Engine("one", 4), Engine("other", 4)
    pool = await pool_of(one, other)
    notes: list[tuple[str, str]] = []
    for _ in range(2):
        ticket = Ticket()
        await said(pool, replace(job("once upon a time " * 50), ticket=ticket))
        notes.append((ticket.engine, ticket.affinity))
    assert notes[0][1] == "miss"
    assert notes[1] == (notes[0][0], "hit")


async def test_questions_need_no_place() -> None:
    """The tokenizer answers while all places are taken, from any engine that is ready."""
    one, other = Engine("one", 1), Engine("other", 1)
    pool = await pool_of(one, other)
    one.gate.clear()
    other.gate.clear()
    tasks = [asyncio.create_task(said(pool)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert await pool.tokenize("ab", add_special=False, parse_special=False) == (97, 98)
    await pool.health()
    one.gate.set()
    other.gate.set()
    await asyncio.gather(*tasks)


async def test_prompts_are_checked_as_the_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that an engine refuses before it runs is refused while all places are taken."""
    one = Engine("one", 1)
    pool = await pool_of(one)
    one.gate.clear()
    task = asyncio.create_task(said(pool))

    async def check(_job: Generation) -> None:
        raise Refused("prompt", "one", "it is too long")

    monkeypatch.setattr(one, "check", check)
    with pytest.raises(Refused):
        await pool.check(job())
    one.gate.set()
    assert await task == "one"


async def test_an_engine_that_has_left_a_model_is_freed() -> None:
    """A model keeps nothing of an engine that is not in its table any more."""
    pool = await pool_of(Engine("one"), Engine("other"))
    pool.start()
    await said(pool)
    left = weakref.ref(pool.replicas[0])
    pool.update(pool.replicas[1:], 64, "prefix")
    await asyncio.sleep(0.05)
    gc.collect()
    assert left() is None
    await pool.aclose()


def test_a_model_is_served_in_one_event_loop_after_the_other() -> None:
    """A model over several engines is looked after in the event loop that uses it now."""
    closed = asyncio.new_event_loop()
    pool = closed.run_until_complete(pool_of(Engine("a"), Engine("b")))
    closed.call_soon(pool.start)
    assert closed.run_until_complete(said(pool)) in ("a", "b")
    (left,) = asyncio.all_tasks(closed)
    # The event loop neither cancels nor ends it. Its end as garbage is not what is tested.
    left._log_destroy_pending = False  # type: ignore[attr-defined]
    closed.close()

    async def again() -> None:
        pool.start()
        assert len(asyncio.all_tasks()) == 2
        assert await said(pool) in ("a", "b")
        assert idle(pool)
        await pool.aclose()

    asyncio.run(again())
