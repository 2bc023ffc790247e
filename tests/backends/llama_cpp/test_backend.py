"""Tests of the backend that runs llama.cpp in process."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import MODELS
from latimer.backends.base import Finish, Generation, Piece, Prompt, Sampling, Stops, Text
from latimer.backends.errors import (
    Busy,
    EngineError,
    Unsupported,
)
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.tasks import Mailbox
from latimer.backends.queue import Ticket
from support import gguf_files
from support.jobs import run
from support.recordings import DEMO_CHATML
from support.windowed import windowed

GREEDY = Sampling(temperature=0.0)
COUNT = Text(DEMO_CHATML.format("Count to 12."))
ENDLESS = Sampling(temperature=0.0, extras={"ignore_eos": True})


@pytest.fixture(scope="module")
async def backend(demo_f32: Path) -> AsyncIterator[LlamaCpp]:
    """A backend with the demo model."""
    made = LlamaCpp(demo_f32, context=2048, exact=True)
    yield made
    await made.aclose()


@pytest.mark.timed
async def test_leaving_ends_the_work(backend: LlamaCpp) -> None:
    """The engine takes the next job within half a second after the client closes a stream."""
    start = time.monotonic()
    async with backend.open(Generation(Prompt(COUNT), 2000, sampling=ENDLESS)) as batches:
        await anext(aiter(batches))
    await run(backend, Generation(Prompt(COUNT), 1, sampling=GREEDY))
    assert time.monotonic() - start < 0.5


async def test_jobs_of_many_threads_do_not_mix() -> None:
    """Event loops in several threads can use one backend."""
    backend = LlamaCpp(context=512)
    answers: list[bytes] = []

    def work() -> None:
        async def ask() -> None:
            texts, _ = await run(backend, Generation(Prompt(COUNT), 64, sampling=GREEDY))
            answers.append(texts[0])

        asyncio.run(ask())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert answers == [b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."] * 8
    await backend.aclose()


async def test_too_many_jobs_are_busy() -> None:
    """A request beyond the running and the waiting ones is rejected."""
    backend = LlamaCpp(context=512, parallel=1, max_waiting=1)
    job = Generation(Prompt(COUNT), 400, sampling=ENDLESS)
    async with backend.open(job) as batches, backend.open(replace(job, ticket=Ticket())) as _:
        await anext(aiter(batches))
        with pytest.raises(Busy):
            await run(backend, Generation(Prompt(COUNT), 5))
    await backend.aclose()


async def test_a_closed_engine_starts_again() -> None:
    """A closed backend loads its model again for the next job."""
    backend = LlamaCpp(context=512)
    for _ in range(2):
        texts, _ = await run(backend, Generation(Prompt(COUNT), 5, sampling=GREEDY))
        assert texts == [b"1, 2, 3"]
        await backend.aclose()


async def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the whole path of a missing model file, in the folder of its start."""
    monkeypatch.chdir(tmp_path)
    backend = LlamaCpp("none.gguf")
    monkeypatch.chdir("/")
    with pytest.raises(EngineError) as caught:
        await backend.model()
    assert caught.value.message == f"There is no model at {tmp_path}/none.gguf."
    await backend.aclose()


async def test_a_failed_load_keeps_no_requests(tmp_path: Path) -> None:
    """Requests that get the error of a failed load are freed."""
    backend = LlamaCpp(tmp_path / "none.gguf")
    for _ in range(10):
        with pytest.raises(EngineError) as caught:
            await backend.model()
    assert len(caught.traceback) < 6
    await backend.aclose()


async def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    """A file that is not a model raises an error, and the process keeps running."""
    (tmp_path / "text.gguf").write_text("not a model")
    backend = LlamaCpp(tmp_path / "text.gguf")
    with pytest.raises(EngineError, match="cannot load"):
        await backend.model()
    await backend.aclose()


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("dream", {}, "is a diffusion model"),
        ("llama", {"tokenizer.ggml.model": "no_vocab"}, "has no vocabulary"),
    ],
)
async def test_a_model_that_cannot_be_served_is_refused(
    tmp_path: Path, architecture: str, fields: dict[str, str], words: str
) -> None:
    """A diffusion model and one without a vocabulary are errors, not answers or an abort."""
    source, target = MODELS / "bpe.gguf", tmp_path / "model.gguf"
    gguf_files.copy(source, target, changes=fields, architecture=architecture)
    with pytest.raises(EngineError, match=words):
        await LlamaCpp(target).model()


async def test_loading_shows_progress() -> None:
    """The progress callback gets increasing fractions up to 1."""
    seen: list[float] = []
    backend = LlamaCpp(MODELS / "bpe.gguf", progress=seen.append)
    await backend.model()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    await backend.aclose()


async def test_a_cancelled_request_leaves_the_load_to_others() -> None:
    """A request that leaves while the model loads does not end the load."""
    backend = LlamaCpp(context=64)
    asked = [asyncio.create_task(backend.model()) for _ in range(2)]
    await asyncio.sleep(0)
    asked[0].cancel()
    assert (await asked[1]).context == 64
    assert (await backend.model()).context == 64
    await backend.aclose()


async def test_there_is_no_native_reply(backend: LlamaCpp) -> None:
    """The backend rejects a native request, because it has no reply of its own."""
    with pytest.raises(Unsupported):
        async with backend.native(Generation(Prompt(COUNT), 5), False):
            pass


async def test_two_sequences_answer_as_one_does() -> None:
    """A backend with two sequences gives the same completions as with one."""
    backend = LlamaCpp(context=256, parallel=2)
    jobs = [Generation(Prompt(COUNT), 64, sampling=GREEDY) for _ in range(6)]
    answers = await asyncio.gather(*(run(backend, job) for job in jobs))
    assert {texts[0] for texts, _ in answers} == {b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."}
    await backend.aclose()


@pytest.mark.parametrize("stops", [Stops(), Stops((" 9",))], ids=["end", "stop"])
async def test_a_whole_answer_arrives_at_its_end(backend: LlamaCpp, stops: Stops) -> None:
    """Without a stream all events of a choice are one batch, equal to those of a stream."""
    job = Generation(Prompt(COUNT), 40, sampling=GREEDY, stops=stops, logprobs=1)
    found: list[list[list[object]]] = []
    for streamed in (True, False):
        async with backend.open(replace(job, streamed=streamed)) as batches:
            found.append([[*batch] async for batch in batches])
    apart, whole = found
    assert len(whole) == 1 < len(apart)
    assert whole[0] == [event for batch in apart for event in batch]


async def test_a_stop_of_the_reader_needs_the_events(backend: LlamaCpp) -> None:
    """If the reader finds the stop sequences, it gets the events of a whole answer at once."""
    stops = Stops((" 9",), by_reader=True)
    job = Generation(Prompt(COUNT), 40, sampling=GREEDY, stops=stops, streamed=False)
    async with backend.open(job) as batches:
        assert len([batch async for batch in batches]) > 1


async def test_a_trace_opens_in_perfetto(tmp_path: Path) -> None:
    """The trace is a JSON list of spans with the steps' parts and their CPU time. Those of a thread
    do not overlap, and its threads have names."""
    path = tmp_path / "trace.json"
    made = LlamaCpp(context=512, trace=path)
    await run(made, Generation(Prompt(COUNT), 8, sampling=GREEDY))
    await made.aclose()
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    names = {"between steps", "admit and fill", "decode", "sample", "hand over", "deliver"}
    assert names <= {span["name"] for span in spans}
    assert all(span["dur"] >= 0 for span in spans)
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert sorted(threads.values()) == ["engine", "event loop"]
    for thread in threads:
        own = sorted((span["ts"], span["dur"]) for span in spans if span["tid"] == thread)
        # A double has fractions of a microsecond here.
        assert all(ts + dur <= after + 0.01 for (ts, dur), (after, _) in itertools.pairwise(own))
    waits = [event["ph"] for event in events if event["name"] == "wait for the event loop"]
    assert waits
    assert waits.count("b") == waits.count("e") == len(waits) / 2
    decodes = [span["args"] for span in spans if span["name"] == "decode"]
    assert len(decodes) == 8
    assert all(one["sequences"] == 1 and one["tokens"] >= 1 for one in decodes)


async def test_a_full_disk_ends_the_trace_only(caplog: pytest.LogCaptureFixture) -> None:
    """A trace that cannot be written any more ends with a line of the log; requests go on."""
    backend = LlamaCpp(context=512, trace="/dev/full")
    for _ in range(3):
        texts, _ = await run(backend, Generation(Prompt(COUNT), 100, sampling=ENDLESS))
        assert texts[0]
    await backend.aclose()
    assert caplog.messages == [
        "The trace has ended, because its file cannot be written: No space left on device."
    ]


async def test_a_trace_goes_on_without_its_event_loop(tmp_path: Path) -> None:
    """An engine with a trace serves others after the thread in which it was loaded has ended."""
    backend = LlamaCpp(context=64, trace=tmp_path / "trace.json")
    first = threading.Thread(target=lambda: asyncio.run(backend.model()))
    first.start()
    await asyncio.to_thread(first.join)
    assert (await run(backend, Generation(Prompt(COUNT), 5, sampling=GREEDY)))[0] == [b"1, 2, 3"]
    await backend.aclose()


async def test_a_trace_needs_a_file(tmp_path: Path) -> None:
    """A trace that cannot be written is an error at the start, with the reason."""
    made = LlamaCpp(trace=tmp_path / "missing" / "trace.json")
    with pytest.raises(EngineError, match=r"Cannot write the trace.*No such file"):
        await made.model()


async def test_a_prompt_counts_after_its_sequence() -> None:
    """A client that leaves before it has read the end leaves all tokens of its prompt to count,
    also if the sequence is no longer in the KV cache."""
    backend, ticket = LlamaCpp(context=64), Ticket()
    generator = (await backend._engine()).generator
    assert generator is not None
    with pytest.raises(ConnectionError):
        job = Generation(Prompt(COUNT), 1, sampling=GREEDY, ticket=ticket)
        async with backend.open(job) as batches:
            assert isinstance(batches, Mailbox)
            while not batches._events or generator.scheduler.is_busy:
                await asyncio.sleep(0.01)
            raise ConnectionError
    assert ticket.prompt == ticket.looked_up == ticket.input > 1
    assert ticket.generated == 1
    await backend.aclose()


async def test_what_has_left_a_window_is_not_reused(tmp_path: Path) -> None:
    """A prompt reuses the start of a conversation only with the sliding window before its end,
    which a conversation that came back from host memory no longer has."""
    path = windowed(tmp_path / "windowed.gguf", 16)
    backend, fresh = LlamaCpp(path, context=1024), LlamaCpp(path, context=1024, cache_memory=0)

    async def answer(prompt: list[int], by: LlamaCpp = backend) -> tuple[list[int], int]:
        job = Generation(Prompt(tuple(prompt)), 40, sampling=ENDLESS, logprobs=0)
        ids: list[int] = []
        cached = -1
        async with by.open(job) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Piece):
                        ids += [token.id for token in event.tokens]
                    elif isinstance(event, Finish):
                        cached = event.cached_tokens
        return ids, cached

    start = [*range(270, 370)]
    await answer([*start, 400])
    other = [*start, 401]
    ids, cached = await answer(other)
    assert (ids, cached) == ((await answer(other, fresh))[0], 100)
    # A conversation in between sends it to host memory.
    await answer([*range(400, 500)])
    _, cached = await answer([*other, *ids])
    assert cached == len(other) + len(ids) - 1
    shorter = [*start[:80], 402]
    assert await answer(shorter) == ((await answer(shorter, fresh))[0], 0)
    for made in (backend, fresh):
        await made.aclose()
