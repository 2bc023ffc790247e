"""Tests of koboldcpp calls whose clients leave, whose engine is busy, or that begin late."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from latimer.backends.base import Generation, Grammar, Prompt, Sampling, Stops, Text
from latimer.backends.errors import (
    Busy,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    Unsupported,
)
from latimer.backends.koboldcpp import KoboldCpp, call, server
from latimer.backends.koboldcpp import run as koboldcpp_run
from latimer.backends.queue import Ticket
from support.engines.koboldcpp import MOST_WAITING, FakeKoboldcpp
from support.jobs import run
from support.turns import FEW, turns_after_the_first

SHORT = Generation(Prompt(Text("echo:abc")), 8, sampling=Sampling(temperature=0.0))
ENDLESS = Generation(Prompt(Text("endless slow:5")), 2000)


@pytest.fixture
async def fake() -> AsyncIterator[FakeKoboldcpp]:
    """An engine that sleeps between two generations."""
    async with FakeKoboldcpp(lag=0.02) as engine:
        yield engine


@pytest.fixture
async def backend(fake: FakeKoboldcpp) -> AsyncIterator[KoboldCpp]:
    """A backend that knows its model."""
    made = KoboldCpp(fake.url)
    made.server.patience = 5
    await made.model()
    fake.seen.clear()
    yield made
    await made.aclose()


async def leave(backend: KoboldCpp, job: Generation, seconds: float) -> None:
    """Run a job, and leave it after some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await run(backend, job)
    except TimeoutError:
        pass


async def becomes_idle(fake: FakeKoboldcpp) -> float:
    """Return the seconds until the engine runs and queues nothing."""
    begin = time.monotonic()
    async with asyncio.timeout(10), httpx2.AsyncClient() as client:
        while True:
            perf = (await client.get(f"{fake.url}/api/extra/perf")).json()
            if perf["idle"] and not perf["queue"]:
                return time.monotonic() - begin
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02, 0.1])
async def test_cancelled_calls_end_in_the_engine(
    fake: FakeKoboldcpp, backend: KoboldCpp, seconds: float, streamed: bool
) -> None:
    """Jobs that are left one after the other, in any phase, leave an idle engine, and the next job
    is answered."""
    for _ in range(5):
        await leave(backend, replace(ENDLESS, streamed=streamed), seconds)
    texts, _finishes = await run(backend, SHORT)
    assert texts == [b"abc"]
    assert await becomes_idle(fake) < 1
    assert not backend.server.turns.taken


async def test_cancelled_waiting_jobs_never_reach_the_engine(
    fake: FakeKoboldcpp, backend: KoboldCpp
) -> None:
    """Jobs that are left while they wait cost the engine nothing, and the others are answered."""
    running = asyncio.create_task(leave(backend, ENDLESS, 0.5))
    await asyncio.sleep(0.1)
    waiting = [
        asyncio.create_task(leave(backend, replace(ENDLESS, seeds=(1,) * (1 + i % 3)), 0.005 * i))
        for i in range(60)
    ]
    others = [asyncio.create_task(run(backend, SHORT)) for _ in range(5)]
    await asyncio.gather(running, *waiting)
    answers = await asyncio.gather(*others)
    assert [texts for texts, _ in answers] == [[b"abc"]] * 5
    assert len(fake.seen) == 6


async def test_an_abort_before_the_beginning_is_sent_again(
    fake: FakeKoboldcpp, backend: KoboldCpp
) -> None:
    """A call that begins after its first abort, which koboldcpp forgets, is aborted, too."""
    fake.late = 0.3
    await leave(backend, ENDLESS, 0.05)
    await asyncio.sleep(0.3)
    fake.late = 0.0
    assert await becomes_idle(fake) < 1
    assert len(fake.aborted) > 1
    assert (await run(backend, SHORT))[0] == [b"abc"]


async def test_a_full_engine_is_asked_again(fake: FakeKoboldcpp, backend: KoboldCpp) -> None:
    """A call that koboldcpp rejects, because other clients fill its queue, waits for a place; a job
    that is left meanwhile ends immediately."""
    fake.waiting = MOST_WAITING
    begin = time.monotonic()
    await leave(backend, SHORT, 0.05)
    assert time.monotonic() - begin < 0.5
    impatient = KoboldCpp(fake.url)
    impatient.server.patience = 0.1
    impatient.server.monitor = backend.server.monitor
    with pytest.raises(Busy, match="busy with requests from other clients"):
        await run(impatient, replace(SHORT, streamed=False))
    await impatient.aclose()
    job = asyncio.create_task(run(backend, SHORT))
    await asyncio.sleep(0.2)
    fake.waiting = 0
    assert (await job)[0] == [b"abc"]


@pytest.mark.parametrize("text", ["echo:former", "echo:x"])
async def test_a_late_stream_never_has_the_text_of_another(
    fake: FakeKoboldcpp, backend: KoboldCpp, text: str
) -> None:
    """A stream that sends the text of the generation before it, because its own begins late, is
    replaced by the call's own text."""
    await run(backend, replace(SHORT, prompt=Prompt(Text(text))))
    fake.late = 0.1
    texts, finishes = await run(backend, SHORT)
    assert (texts, finishes[0].completion_tokens) == ([b"abc"], 3)


async def test_a_quiet_end_is_noticed_before_the_next_generation(
    fake: FakeKoboldcpp, backend: KoboldCpp
) -> None:
    """A stream without a final event has its text, its reason and its tokens, although the call of
    another client follows it immediately."""
    fake.quiet, fake.lag = True, 0.3
    busy = True

    async def other() -> None:
        async with httpx2.AsyncClient(timeout=30) as client:
            while busy:
                body = {"prompt": "echo:xyz", "max_length": 8, "genkey": "other"}
                await client.post(f"{fake.url}/api/v1/generate", json=body)

    # Its next call is in the queue before the engine has slept.
    another = asyncio.create_task(other())
    try:
        job = replace(SHORT, prompt=Prompt(Text("slow:10 echo:abc")))
        for tokens, reason in ((8, "end"), (2, "length")):
            texts, finishes = await run(backend, replace(job, max_tokens=tokens))
            count = min(tokens, 3)
            assert texts == [b"abc"[:count]]
            assert (finishes[0].reason, finishes[0].completion_tokens) == (reason, count)
    finally:
        busy = False
        await another


async def test_whole_answers_take_few_calls(fake: FakeKoboldcpp, backend: KoboldCpp) -> None:
    """A whole answer of four choices takes four generations and no count of tokens; its numbers are
    those of the stream."""
    job = replace(SHORT, seeds=(1, 2, 3, 4))
    streamed = await run(backend, job)
    fake.calls.clear()
    assert await run(backend, replace(job, streamed=False)) == streamed
    assert fake.calls.pop("/api/extra/perf") <= 5
    assert fake.calls == {"/api/v1/generate": 4}


async def test_whole_answers_end_at_stop_sequences(fake: FakeKoboldcpp, backend: KoboldCpp) -> None:
    """A stop sequence cuts a whole answer, and the tokens before it count."""
    job = replace(SHORT, stops=Stops(("c",)), streamed=False)
    texts, finishes = await run(backend, job)
    assert fake.calls["/api/extra/generate/stream"] == 0
    assert texts[0][:2] == b"ab"
    assert (finishes[0].reason, finishes[0].stop, finishes[0].completion_tokens) == ("stop", "c", 2)


async def test_whole_answers_may_not_be_another_text(
    fake: FakeKoboldcpp, backend: KoboldCpp
) -> None:
    """A whole answer without a token, or of an endless size, raises an error."""
    for fault in ("set/last/results.0.completion_tokens/zero", "no-line"):
        fake.faults = {"/api/v1/generate": fault}
        with pytest.raises(EngineError, match=r"before it was finished|bytes for 8 tokens"):
            await run(backend, replace(SHORT, streamed=False))


async def test_batched_calls_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A koboldcpp that batches calls is named in a warning, and no job is batched."""
    for batches in (False, True):
        caplog.clear()
        async with FakeKoboldcpp(batches=batches) as fake:
            made = KoboldCpp(fake.url)
            with caplog.at_level(logging.WARNING):
                await made.model()
            assert ("--parallelrequests" in caplog.text) is batches
            assert (await run(made, SHORT))[0] == [b"abc"]
            # Only the call that finds out is batched.
            assert fake.batched == ["a"] * batches
            await made.aclose()


async def test_a_grammar_is_not_continued_after_another_call(
    fake: FakeKoboldcpp, backend: KoboldCpp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer with a grammar that takes two calls is an error if another client's call ran
    between them, which may have replaced the grammar's state."""
    monkeypatch.setattr(koboldcpp_run, "longest_call", lambda _: 2)
    grammar = Grammar("gbnf", "root ::= [a-z]+", "grammar")
    job = replace(SHORT, grammar=grammar, streamed=False)
    assert (await run(backend, job))[0] == [b"abababab"]
    generate = fake._generate

    async def beside(*given: Any) -> None:
        fake._total += 1
        await generate(*given)

    monkeypatch.setattr(fake, "_generate", beside)
    with pytest.raises(EngineError, match="another client in the middle"):
        await run(backend, job)
    monkeypatch.undo()
    assert (await run(backend, job))[0] == [b"abc"]


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_a_call_ends_if_the_engine_has_another_model(
    fake: FakeKoboldcpp, backend: KoboldCpp, streamed: bool
) -> None:
    """A job whose call began while koboldcpp loaded another model is an error without any text, and
    the call is aborted."""
    await run(backend, SHORT)
    other = replace(fake.model, name="koboldcpp/other")

    async def opened() -> None:
        async with backend.open(replace(ENDLESS, streamed=streamed)) as batches:
            # A process that has just started has other facts.
            fake.model, fake._since = other, time.monotonic()
            async for batch in batches:
                pytest.fail(f"{batch} is of another model")

    async with asyncio.timeout(3):
        with pytest.raises(EngineUnavailable, match=r"another model \(koboldcpp/other"):
            await opened()
    assert await becomes_idle(fake) < 1
    assert (await backend.model()).name == "koboldcpp/other"
    assert (await run(backend, SHORT))[0] == [b"abc"]


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_the_tokens_of_a_job_without_an_end(
    fake: FakeKoboldcpp, backend: KoboldCpp, streamed: bool
) -> None:
    """A job that its client leaves notes the prompt's tokens and those that koboldcpp has
    generated, of all choices; one that was not begun notes none."""
    left, ended, waiting = Ticket(), Ticket(), Ticket()
    endless = replace(ENDLESS, streamed=streamed, seeds=(1, 2))
    three = replace(endless, prompt=Prompt(Text("count:3 slow:200")))
    for job, ticket, begun, tokens in ((endless, left, 1, 20), (three, ended, 2, 1)):
        before = fake._total
        task = asyncio.create_task(run(backend, replace(job, ticket=ticket)))
        async with asyncio.timeout(10):
            while fake._total == before:
                await asyncio.sleep(0.005)
            await leave(backend, replace(job, ticket=waiting), 0.05)
            while fake._total < before + begun or len(fake._last.tokens) < tokens:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
    assert left.prompt == len(b"endless slow:5")
    assert 10 < left.generated <= 100
    assert (ended.prompt, ended.generated) == (len(b"count:3 slow:200"), 4)
    assert (waiting.prompt, waiting.generated) == (0, 0)


@pytest.mark.parametrize("hangs", [True, False], ids=["hung", "ended"])
@pytest.mark.parametrize(("size", "tokens"), [(4, 10), (1, 40)], ids=["events", "bytes"])
async def test_the_tokens_of_a_stream_that_breaks(
    fake: FakeKoboldcpp,
    backend: KoboldCpp,
    monkeypatch: pytest.MonkeyPatch,
    hangs: bool,
    size: int,
    tokens: int,
) -> None:
    """A stream whose koboldcpp ends, or stops answering, notes the prompt and the tokens of what
    has arrived, and waits for koboldcpp no longer than it may take to answer."""
    monkeypatch.setattr(koboldcpp_run, "NOTE_SECONDS", 0.2)
    monkeypatch.setattr(koboldcpp_run, "BYTES", size)
    text, ticket, begin = f"echo:{'🎉' * 100} slow:20", Ticket(), 0.0
    job, read = replace(ENDLESS, prompt=Prompt(Text(text)), ticket=ticket), 0
    with pytest.raises(EngineError):
        async with backend.open(job) as batches:
            async for _ in batches:
                read += 1
                if read == 10:
                    begin = time.monotonic()
                    if hangs:
                        monkeypatch.setattr(backend.server, "generated", lambda _: asyncio.sleep(9))
                        raise EngineError("a failure of the reader")
                    await fake.stop()
    assert time.monotonic() - begin < 2
    assert (ticket.prompt, ticket.generated) == (len(text.encode()), tokens)


async def test_null_characters_are_refused(backend: KoboldCpp) -> None:
    """A prompt with a null character, at which koboldcpp would cut it, is rejected."""
    for streamed in (True, False):
        job = replace(SHORT, prompt=Prompt(Text("a\0b")), streamed=streamed)
        with pytest.raises(Unsupported, match="null character"):
            await run(backend, job)
    with pytest.raises(Unsupported, match="null character"):
        await backend.tokenize("a\0b", add_special=False, parse_special=True)


async def test_a_hung_engine_gives_the_turn_back(
    fake: FakeKoboldcpp, backend: KoboldCpp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that koboldcpp never ends keeps its turn for a limited time."""
    monkeypatch.setattr(call, "HUNG_SECONDS", 0.3)
    monkeypatch.setattr(fake, "_abort", lambda _: {"success": "false"})
    await leave(backend, ENDLESS, 0.05)
    assert backend.server.turns.taken
    async with asyncio.timeout(3):
        while backend.server.turns.taken:
            await asyncio.sleep(0.02)


async def test_a_hung_engine_is_an_error(
    fake: FakeKoboldcpp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that runs, and one that begins, end when the engine answers no more questions."""
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.3)
    backend = KoboldCpp(fake.url, silence=0.2)
    running = asyncio.create_task(run(backend, ENDLESS))
    while not fake.seen:
        await asyncio.sleep(0.02)
    fake.faults["/api/extra/perf"] = "silence/request"
    async with asyncio.timeout(5):
        with pytest.raises(EngineSilent, match="did not answer"):
            await running
        backend.server.monitor.invalidate()
        with pytest.raises(EngineSilent, match="did not answer"):
            await run(backend, SHORT)
    fake.faults.clear()
    await backend.aclose()


async def test_special_tokens_are_asked_for_once(backend: KoboldCpp) -> None:
    """16 concurrent calls cost the tokenizer as many questions as one."""
    server, asked = backend.server, 0
    tokenizer = server._tokenizer

    async def counted(path: str, payload: Any, size: int) -> Any:
        nonlocal asked
        asked += 1
        return await tokenizer(path, payload, size)

    server._tokenizer = counted  # type: ignore[method-assign]
    await asyncio.gather(*(backend.special_tokens() for _ in range(16)))
    many, asked = asked, 0
    server._forget()
    await backend.special_tokens()
    assert asked == many


async def test_the_tokenizer_is_never_idle(backend: KoboldCpp) -> None:
    """The next of 64 texts is sent in the turn of the event loop in which the last one is done."""

    async def ask(method: str, path: str, payload: Any = None, size: int = 0) -> Any:
        del method, path, payload, size
        await asyncio.sleep(0)
        return {"ids": [1]}

    backend.server.ask = ask  # type: ignore[method-assign]
    calls = (backend.server.token_count("a", False) for _ in range(64))
    assert await turns_after_the_first(calls) < 64 + FEW


async def test_a_text_whose_caller_leaves_is_not_sent(backend: KoboldCpp) -> None:
    """Cancelled callers leave the queue for the tokenizer, and the others get their own tokens."""
    texts = [f"text {number}" for number in range(16)]
    tasks = [asyncio.create_task(backend.server.token_count(one, False)) for one in texts]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for text, one in zip(texts[1::2], found[1::2], strict=True):
        assert one == await backend.server.token_count(text, False)
    assert not [one for one in found[::2] if not isinstance(one, asyncio.CancelledError)]
