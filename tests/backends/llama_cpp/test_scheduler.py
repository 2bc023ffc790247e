"""Tests of the engine's loop, step by step, over a real context."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.calls import Profile
from latimer.backends.base import Sampling, Stops
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp import DEMO_MODEL, threads
from latimer.backends.llama_cpp.drafts import Lookup
from latimer.backends.llama_cpp.library import Context, DecodeFailed
from latimer.backends.llama_cpp.padding import Padding
from latimer.backends.llama_cpp.states import BLOCK
from latimer.backends.llama_cpp.tasks import Run
from latimer.backends.llama_cpp.threads import Threads
from support.recordings import DEMO_CHATML, prompts
from support.scheduled import ENDLESS, Box, Engine, finish

# The calls of a step with two sequences, which took 108.
MOST_CALLS = 75
RECURRENT = Path(__file__).parent.parent.parent / "models" / "recurrent.gguf"


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with one sequence, and one with two."""
    made = Engine(request.param)
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Engine]:
    """An engine with two sequences."""
    made = Engine(2, 1024)
    yield made
    made.close()


def test_answers_are_the_recorded_ones(engine: Engine) -> None:
    """Eight concurrent jobs each give the recorded greedy completion."""
    known = prompts()[:8]
    boxes = [engine.submit(prompt["prompt"], 64)[1] for prompt in known]
    finish(engine, *boxes)
    assert [box.text.decode() for box in boxes] == [prompt["greedy"] for prompt in known]


def test_two_sequences_share_a_step(two: Engine) -> None:
    """Two sequences each get a token in the same step, delivered in one post."""
    _, one = two.submit(DEMO_CHATML.format("Count to 12."), 20)
    _, other = two.submit(DEMO_CHATML.format("Count to 7."), 20)
    for _ in range(5):
        two.scheduler.step()
    assert len(one.events) == len(other.events) == 5
    assert all(len(post) == 2 for post in two.posts)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pad every batch that may be padded; the sizes of these batches."""
    sizes: list[int] = []

    def wants(_padding: Padding, tokens: int) -> bool:
        sizes.append(tokens)
        return True

    monkeypatch.setattr(Padding, "wants", wants)
    # A trial of numbers of threads would pad nothing meanwhile.
    monkeypatch.setattr(Threads, "add", lambda *_: None)
    return sizes


def test_padded_batches_give_the_recorded_answers(two: Engine, padded: list[int]) -> None:
    """Another token in each batch changes no greedy completion, and nobody gets it."""
    known = prompts()[:8]
    boxes = [two.submit(prompt["prompt"], 64)[1] for prompt in known]
    finish(two, *boxes)
    assert [box.text.decode() for box in boxes] == [prompt["greedy"] for prompt in known]
    assert len(padded) > 20


def test_a_seeded_job_shares_no_padded_batch(two: Engine, padded: list[int]) -> None:
    """Batches with a seeded sequence do not depend on measured times; others may."""
    seeded = Sampling(temperature=1.0, extras={"ignore_eos": True})
    _, one = two.submit("1", 12, sampling=seeded, seeds=(1,))
    _, other = two.submit("2", 40, sampling=ENDLESS)
    _, third = two.submit("3", 40, sampling=ENDLESS)
    finish(two, one)
    assert padded == []
    finish(two, other, third)
    assert len(padded) > 20
    assert set(padded) == {2}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of each decode, on a machine where a core of two is missing."""
    found: list[int] = []
    decode, clock = Context.decode, [0.0, 0.0]

    def counted(context: Context) -> int:
        found.append(context.threads)
        # One thread needs less time than two.
        clock[0] += 0.03 if context.threads == 2 else 0.02
        clock[1] += 0.036 if context.threads == 2 else 0.02
        return decode(context)

    monkeypatch.setattr(Context, "decode", counted)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: clock[1])
    # The count of free cores reads the same clocks.
    monkeypatch.setattr(threads, "free_cores", lambda _: 2)
    return found


@pytest.fixture
def shared() -> Iterator[Engine]:
    """An engine of two threads and two sequences."""
    made = Engine(2)
    made.context.use_threads(2)
    made.scheduler._threads = Threads(2)
    yield made
    made.close()


SAMPLED = Sampling(temperature=1.0, extras={"ignore_eos": True})


@pytest.mark.parametrize("free", [1, 2])
def test_fewer_threads_decode_on_a_busy_machine(
    shared: Engine, counts: list[int], monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """After a trial, one thread decodes the batches of two sequences. A prompt then has one, too,
    unless the other program is found asleep."""
    boxes = [shared.submit(str(number), 60, sampling=SAMPLED)[1] for number in range(2)]
    finish(shared, *boxes)
    assert counts[:8] == [2] * 8
    assert counts[-30:] == [1] * 30
    monkeypatch.setattr(threads, "free_cores", lambda _: free)
    _, box = shared.submit("3", 1, sampling=SAMPLED)
    finish(shared, box)
    assert counts[-1] == free


def test_a_prompt_leaves_cores_to_other_programs(
    shared: Engine, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt has the cores that are free, and the tokens after it begin a trial."""
    monkeypatch.setattr(threads, "free_cores", lambda _: 1)
    _, box = shared.submit("a longer prompt", 40, sampling=SAMPLED)
    finish(shared, box)
    assert counts[:7] == [1, 2, 2, 2, 1, 1, 2]
    assert counts[-10:] == [1] * 10


def test_a_seeded_prompt_leaves_cores_and_its_tokens_do_not(
    shared: Engine, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of several tokens have the same numbers with any threads; single tokens do not."""
    monkeypatch.setattr(threads, "free_cores", lambda _: 1)
    _, box = shared.submit("a longer prompt", 5, sampling=SAMPLED, seeds=(1,))
    finish(shared, box)
    assert counts == [1, 2, 2, 2, 2]


def test_a_trial_of_threads_has_no_padded_batch(
    shared: Engine, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While numbers of threads are compared, all batches of a size are equal."""
    tried = []

    def wants(_padding: Padding, _tokens: int) -> bool:
        tried.append(shared.scheduler._threads.is_trying)
        return True

    monkeypatch.setattr(Padding, "wants", wants)
    boxes = [shared.submit(str(number), 60, sampling=SAMPLED)[1] for number in range(2)]
    finish(shared, *boxes)
    assert 1 in counts
    assert tried
    assert not any(tried)


@pytest.mark.parametrize(
    "job",
    [
        {"sampling": SAMPLED, "seeds": (1,)},
        {"sampling": ENDLESS},
        {"sampling": SAMPLED, "logprobs": 2},
    ],
    ids=["seeded", "greedy", "log-probabilities"],
)
def test_numbers_that_users_compare_have_all_threads(
    shared: Engine, counts: list[int], job: Any
) -> None:
    """A sequence that runs alone has all threads if it is seeded, greedy or has numbers."""
    shared.scheduler._threads.used = shared.scheduler._threads.next = 1
    _, box = shared.submit("1", 30, **job)
    finish(shared, box)
    assert set(counts) == {2}


def test_a_seeded_sequence_has_all_threads_only_alone(shared: Engine, counts: list[int]) -> None:
    """Batches with others have the threads that are faster, and a seeded one alone has all."""
    shared.scheduler._threads.used = shared.scheduler._threads.next = 1
    _, one = shared.submit("1", 20, sampling=SAMPLED, seeds=(1,))
    _, other = shared.submit("2", 12, sampling=SAMPLED)
    finish(shared, other)
    assert counts[-1] == 1
    before = len(counts)
    finish(shared, one)
    assert set(counts[before:]) == {2}


def test_a_full_context_is_not_padded(padded: list[int]) -> None:
    """A batch that takes the last cell gets no other token, and does not fail."""
    engine = Engine(2, 64)
    _, box = engine.submit("1", 256, sampling=ENDLESS)
    _, other = engine.submit("2", 256, sampling=ENDLESS)
    while engine.cache.free:
        engine.scheduler.step()
    before = len(padded)
    engine.scheduler.step()
    assert box.error is None
    assert other.error is None
    assert 0 < before < 64
    engine.scheduler.abandon(EngineError("the test is over"))
    engine.close()


def test_a_step_takes_few_calls(two: Engine) -> None:
    """A token takes few Python calls, since both cores wait for them between two decodes."""
    boxes = [two.submit(str(number), 40, sampling=ENDLESS)[1] for number in range(2)]
    for _ in range(30):
        two.scheduler.step()
    # The first trials of batches with one token more have other calls.
    with Profile() as profile:
        two.scheduler.step()
    assert len(boxes[0].events) == len(boxes[1].events) == 31
    assert profile.counted().total() <= MOST_CALLS


def test_a_long_prompt_goes_in_pieces_and_stops_nobody(two: Engine) -> None:
    """A prompt longer than the batch takes several steps, in each of which another sequence gets a
    token."""
    _, short = two.submit(DEMO_CHATML.format("Count to 12."), 30)
    two.scheduler.step()
    sampled = len(short.events)
    _, long = two.submit("word " * 300, 1)
    while not long.finished:
        two.scheduler.step()
        if not short.finished:
            assert len(short.events) == sampled + 1
            sampled += 1
    assert sampled > 3


@pytest.fixture
def apart() -> Iterator[Engine]:
    """An engine with two sequences, whose generated tokens are evaluated apart from prompts."""
    made = Engine(2, 1024, apart=1)
    yield made
    made.close()


def test_generated_tokens_and_a_prompt_take_turns(apart: Engine) -> None:
    """A prompt begins at once, and another sequence gets a token after each of its batches, or in
    the last one, which is too small for a tile."""
    _, short = apart.submit(DEMO_CHATML.format("Count to 12."), 30)
    apart.scheduler.step()
    _, long = apart.submit("word " * 240, 1)
    grown = []
    while not long.finished:
        before = len(short.events)
        apart.scheduler.step()
        grown.append(len(short.events) - before)
    assert grown == [0, 1] * (len(grown) // 2)
    assert len(grown) > 4


@pytest.mark.parametrize(
    ("streams", "cells", "batch", "is_apart"),
    [(1, 1, 64, True), (1, 200, 64, False), (1, 1, 60, False), (70, 1, 128, True)],
    ids=["apart", "few cells", "small batch", "streams that fill a tile"],
)  # fmt: skip
def test_batches_are_apart_only_with_tiles(
    streams: int, cells: int, batch: int, is_apart: bool
) -> None:
    """Generated tokens that see few cells share a batch with a prompt, and so do all in batches
    that are too small for tiles."""
    engine = Engine(streams + 1, 4096, apart=cells, batch=batch)
    boxes = [engine.submit("1", 30, sampling=ENDLESS)[1] for _ in range(streams)]
    for _ in range(5):
        engine.scheduler.step()
    assert all(box.events for box in boxes)
    # A round of batches with a part of the streams each ends first.
    while len({len(box.events) for box in boxes}) > 1:
        engine.scheduler.step()
    engine.submit("word " * 240, 1)
    before = len(boxes[0].events)
    engine.scheduler.step()
    assert len(boxes[0].events) == before + (not is_apart)
    engine.close()


def many(streams: int, cells: int = 1) -> tuple[Engine, list[Box]]:
    """Return an engine, and sequences of it that have begun."""
    engine = Engine(streams + 1, 4096, apart=cells, batch=256)
    boxes = [engine.submit("1", 30, sampling=ENDLESS)[1] for _ in range(streams)]
    while not all(box.events for box in boxes):
        engine.scheduler.step()
    return engine, boxes


def grown(engine: Engine, boxes: Sequence[Box]) -> list[int]:
    """Return how many tokens each sequence gets in a step."""
    before = [len(box.events) for box in boxes]
    engine.scheduler.step()
    return [len(box.events) - count for box, count in zip(boxes, before, strict=True)]


@pytest.mark.parametrize(
    ("streams", "parts"),
    [(63, [63]), (64, [32, 32]), (125, [42, 42, 41])],
    ids=["below a tile", "a tile", "two tiles"],
)
def test_streams_that_fill_a_tile_have_several_batches(streams: int, parts: list[int]) -> None:
    """Every stream has one token a round, in batches below 64 tokens that are about as large."""
    engine, boxes = many(streams)
    while len({len(box.events) for box in boxes}) > 1:
        engine.scheduler.step()
    for _ in range(3):
        steps = [grown(engine, boxes) for _ in parts]
        assert [sum(step) for step in steps] == parts
        assert [sum(counts) for counts in zip(*steps, strict=True)] == [1] * streams
    engine.close()


def test_streams_that_see_few_cells_share_a_batch() -> None:
    """Seventy streams with less than 4,000 cells get a token in each step."""
    engine, boxes = many(70, 4000)
    assert grown(engine, boxes) == [1] * 70
    engine.close()


def test_a_prompt_waits_for_a_round_of_streams() -> None:
    """After each batch of a prompt, every one of 70 streams gets one token."""
    engine, boxes = many(70)
    while len({len(box.events) for box in boxes}) > 1:
        engine.scheduler.step()
    _, long = engine.submit("word " * 1200, 1)
    steps = []
    while not long.finished:
        steps.append(sum(grown(engine, boxes)))
    assert steps[:6] == [0, 35, 35, 0, 35, 35]
    engine.close()


@pytest.mark.parametrize("max_tokens", [2, 3, 8])
def test_streams_go_on_while_short_ones_come_and_go(max_tokens: int) -> None:
    """Each of 70 streams has a token in every fourth step at least, which are a prompt and a round,
    although a new prompt is there at all times."""
    engine = Engine(90, 4096, apart=1, batch=256)
    boxes = [engine.submit("1", 200, sampling=ENDLESS)[1] for _ in range(70)]
    while not all(box.events for box in boxes):
        engine.scheduler.step()
    short: list[Box] = []
    last, longest = [0] * 70, 0
    for step in range(1, 41):
        short = [box for box in short if not box.finished]
        while len(short) < 20:
            short.append(engine.submit(f"word {step} " * 4, max_tokens, sampling=ENDLESS)[1])
        for index, count in enumerate(grown(engine, boxes)):
            if count:
                longest = max(longest, step - last[index])
                last[index] = step
    assert max(longest, 40 - min(last)) <= 4
    engine.close()


def test_a_prompt_is_evaluated_after_streams_have_ended() -> None:
    """If most streams end within a round, a prompt does not wait until the others have ended."""
    engine = Engine(71, 4096, apart=1, batch=256)
    jobs = [engine.submit("1", 200, sampling=ENDLESS) for _ in range(70)]
    while not all(box.events for _, box in jobs):
        engine.scheduler.step()
    _, long = engine.submit("word " * 1200, 1)
    while sum(grown(engine, [box for _, box in jobs])) != 35:
        pass
    for task, _ in jobs[5:]:
        task.cancelled = True
    finish(engine, long, steps=30)
    engine.close()


def test_no_draft_is_made_for_a_batch_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is made when its sequence has a turn, and not for the batch of a prompt before."""
    made: list[int] = []

    def propose(_lookup: Lookup, tokens: Sequence[int], *_: object) -> list[int]:
        made.append(len(tokens))
        return []

    monkeypatch.setattr(Lookup, "propose", propose)
    engine = Engine(2, 1024, apart=1, drafts=True)
    engine.submit(DEMO_CHATML.format("Count to 12."), 30)
    engine.scheduler.step()
    _, long = engine.submit("word " * 240, 1)
    counts = []
    while not long.finished:
        before = len(made)
        engine.scheduler.step()
        counts.append(len(made) - before)
    assert counts == [0, 1] * (len(counts) // 2)
    engine.close()


def test_answers_of_batches_apart_are_the_recorded_ones(apart: Engine) -> None:
    """Eight jobs between long prompts each give the recorded greedy completion."""
    known = prompts()[:8]
    boxes = []
    for prompt in known:
        boxes += [apart.submit(prompt["prompt"], 64)[1], apart.submit("word " * 240, 1)[1]]
    finish(apart, *boxes, steps=2000)
    assert [box.text.decode() for box in boxes[::2]] == [prompt["greedy"] for prompt in known]


def test_a_cancelled_job_is_gone_within_a_step(engine: Engine) -> None:
    """A cancelled job gets no more tokens, and its sequence is free for the next."""
    task, box = engine.submit(DEMO_CHATML.format("Count to 12."), 40)
    engine.scheduler.step()
    sampled = len(box.events)
    task.cancelled = True
    engine.scheduler.step()
    engine.scheduler.step()
    assert len(box.events) == sampled
    _, after = engine.submit(DEMO_CHATML.format("Count to 7."), 40)
    finish(engine, after)
    assert after.text == b"1, 2, 3, 4, 5, 6, 7."


def test_a_preempted_choice_that_is_cut_makes_way() -> None:
    """When the reader cuts a preempted choice that does not fit, the one behind it starts."""
    engine = Engine(3, 160)
    _, long = engine.submit("one two three four", 140, sampling=ENDLESS)
    cuts = Stops(by_reader=True)
    _, other = engine.submit("five six seven eight", 140, sampling=ENDLESS, stops=cuts)
    while not engine.scheduler._waiting.preempted:
        engine.scheduler.step()
    # The preempted one waits for its cells.
    engine.scheduler.step()
    _, small = engine.submit("x", 2)
    cuts.ends[0] = 5
    finish(engine, small, steps=6)
    assert other.finished
    assert not long.finished
    engine.scheduler.abandon(EngineError("the test is over"))
    engine.close()


def test_a_failed_decode_fails_its_own_jobs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed decode ends the jobs of its batch with the reason, and later jobs run."""
    _, box = engine.submit(DEMO_CHATML.format("Count to 12."), 40)
    engine.scheduler.step()

    def fail() -> None:
        engine.context.clear()
        raise DecodeFailed(-3)

    with monkeypatch.context() as patch:
        patch.setattr(engine.context, "decode", fail)
        engine.scheduler.step()
    assert isinstance(box.error, EngineError)
    assert "llama_decode returned -3" in box.error.message
    _, after = engine.submit(DEMO_CHATML.format("Count to 7."), 40)
    finish(engine, after)
    assert after.text == b"1, 2, 3, 4, 5, 6, 7."


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(1.0), Sampling(1.0, extras={"min_p": 0.1})]
)
def test_a_model_without_finite_logits_is_at_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, value: float
) -> None:
    """Logits that are no numbers are an error of the engine, and not of a field of the request."""
    logits = engine.context.logits

    def spoilt(start: int, count: int) -> Any:
        found = logits(start, count)
        found[:] = value
        return found

    monkeypatch.setattr(engine.context, "logits", spoilt)
    _, box = engine.submit("one two", 4, sampling=sampling)
    finish(engine, box)
    assert isinstance(box.error, EngineError)
    assert "not finite" in box.error.message


def test_stopping_ends_what_runs_with_an_error() -> None:
    """Shutting down the engine ends running and waiting jobs with an error."""
    engine = Engine(1)
    _, running = engine.submit(DEMO_CHATML.format("Count to 12."), 40)
    _, waiting = engine.submit(DEMO_CHATML.format("Count to 12."), 40)
    engine.scheduler.step()
    engine.loop.stop()
    engine.loop.run()
    assert "shut down" in str(running.error)
    assert "shut down" in str(waiting.error)
    engine.close()


def test_an_error_in_a_step_ends_what_runs_and_no_more(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a step ends the current jobs, and the engine keeps running."""
    boxes = [two.submit(DEMO_CHATML.format("Count to 12."), 40)[1] for _ in range(3)]
    step = two.scheduler.step
    after: list[Box] = []

    def once() -> None:
        step()
        if not after:
            after.append(two.submit(DEMO_CHATML.format("Count to 7."), 40, later=True)[1])
            raise RuntimeError("broken")
        if after[0].finished:
            two.loop.stop()

    monkeypatch.setattr(two.scheduler, "step", once)
    two.loop.run()
    assert all("broken" in str(box.error) for box in boxes)
    assert after[0].text == b"1, 2, 3, 4, 5, 6, 7."
    assert two.cache.make_room(two.cells)


def test_an_end_before_an_error_in_the_same_step_arrives(
    two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice that has ended in a step gets its end, also if the step fails after it."""
    _, ended = two.submit("one two", 1)
    broken, lost = two.submit("one two", 1)
    sample = two.scheduler._sample

    def fail(run: Run, row: int) -> bool:
        if run.choice.task is broken:
            two.loop.stop()
            raise RuntimeError("broken")
        return sample(run, row)

    monkeypatch.setattr(two.scheduler, "_sample", fail)
    two.loop.run()
    assert ended.finished
    assert "broken" in str(lost.error)


def test_a_choice_that_cannot_start_ends_with_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice whose sampler cannot be made gets an error, and leaves its sequence to others."""

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_sampler", fail)
        for _ in range(5):
            _, box = engine.submit("one two", 4)
            with pytest.raises(RuntimeError):
                engine.scheduler.step()
            engine.scheduler.abandon(EngineError("broken"))
            assert "broken" in str(box.error)
    _, after = engine.submit("one two", 4)
    finish(engine, after)


def test_a_batch_is_never_overfilled(engine: Engine) -> None:
    """A batch rejects too many or no tokens, which would abort the process in llama.cpp."""
    with pytest.raises(ValueError, match="do not fit"):
        engine.context.add(0, 0, [1] * 65, True)
    with pytest.raises(ValueError, match="do not fit"):
        engine.context.add(0, 0, [], True)


def test_one_wake_up_a_step(two: Engine) -> None:
    """Each step delivers all of its events in one call."""
    for _ in range(2):
        two.submit(DEMO_CHATML.format("Count to 12."), 40)
    for steps in range(1, 8):
        two.scheduler.step()
        assert len(two.posts) == steps


def test_a_prompt_goes_on_from_what_it_has_in_common(two: Engine) -> None:
    """A prompt reuses its common beginning with an earlier one, reports it, and gives the same
    text."""
    long = "word " * 200
    _, first = two.submit(f"{long}one", 4)
    finish(two, first)
    _, second = two.submit(f"{long}two", 4)
    finish(two, second)
    _, again = two.submit(f"{long}one", 4)
    finish(two, again)
    counts = [box.finishes[0].cached_tokens for box in (first, second, again)]
    tokens = again.finishes[0].prompt_tokens
    assert counts[0] == 0
    # The last token is always evaluated again.
    assert tokens > counts[2] >= counts[1] > tokens - 5
    assert again.text == first.text


@pytest.mark.parametrize("path", [DEMO_MODEL, RECURRENT], ids=["attention", "recurrent"])
def test_what_finishes_beside_others_comes_back(path: Path) -> None:
    """A conversation's next turn reuses a state from host memory, and gives the same text as from
    the KV cache."""
    turn, longer = "word " * 40, "word " * 40 + "and another thing"
    texts, cached = [], []
    for beside in (False, True):
        engine = Engine(2, 512, path)
        endless = Sampling(0.0, extras={"ignore_eos": True})
        others = [engine.submit("one two", 200, sampling=endless)[1]] if beside else []
        for prompt in (turn, longer):
            _, box = engine.submit(prompt, 6)
            finish(engine, box)
            texts.append(box.text)
            cached.append(box.finishes[0].cached_tokens)
            assert len(engine.cache._resting) == (0 if beside else 1)
        assert not any(box.finished for box in others)
        assert engine.states.used or not beside
        engine.close()
    assert texts[:2] == texts[2:]
    assert cached[:2] == cached[2:]
    if path == DEMO_MODEL:
        assert cached[1] >= BLOCK


def test_prompts_that_come_together_are_evaluated_once() -> None:
    """Concurrent prompts with a common beginning evaluate it once for each owner."""
    engine = Engine(8, 2048)
    prompts = ["word " * 150 + f"number {number}" for number in range(8)]
    boxes = [engine.submit(prompt, 4)[1] for prompt in prompts]
    _, other = engine.submit("word " * 150, 4, owner="other")
    finish(engine, *boxes, other)
    counts = [box.finishes[0].cached_tokens for box in boxes]
    tokens = boxes[0].finishes[0].prompt_tokens
    assert counts[0] == other.finishes[0].cached_tokens == 0
    assert all(0 < tokens - count < BLOCK + 8 for count in counts[1:])
    alone = Engine(1, 2048)
    for prompt, box in zip(prompts, boxes, strict=True):
        _, single = alone.submit(prompt, 4)
        finish(alone, single)
        assert single.text == box.text
    engine.close()
    alone.close()


def test_owners_share_nothing(two: Engine) -> None:
    """A prompt of one owner never reuses another owner's cells."""
    _, first = two.submit("word " * 100, 4, owner="one")
    finish(two, first)
    _, second = two.submit("word " * 100, 4, owner="other")
    finish(two, second)
    assert second.finishes[0].cached_tokens == 0


def test_choices_evaluate_their_prompt_once(two: Engine) -> None:
    """Eight choices share their prompt's cells, and greedy choices are equal."""
    prompt = "word " * 60 + DEMO_CHATML.format("Count to 7.")
    _, box = two.submit(prompt, 40, seeds=(1, 2, 3, 4, 5, 6, 7, 8))
    finish(two, box)
    _, alone = two.submit(prompt, 40)
    finish(two, alone)
    assert {box.choice(index) for index in range(8)} == {alone.text}
    used = two.cells - two.cache.free
    assert used < alone.finishes[0].prompt_tokens + 9 * 40 + BLOCK
    assert alone.finishes[0].cached_tokens >= BLOCK


@pytest.mark.parametrize("cells", [64, 96, 160])
def test_what_does_not_fit_waits_and_loses_nothing(cells: int) -> None:
    """Jobs that do not fit into the KV cache wait, and all give their recorded completions."""
    engine = Engine(8, cells)
    known = [prompt for prompt in prompts() if len(prompt["greedy"]) > 20][:16]
    boxes = [engine.submit(prompt["prompt"], 40)[1] for prompt in known]
    finish(engine, *boxes, steps=5000)
    assert [box.text.decode() for box in boxes] == [prompt["greedy"] for prompt in known]
    assert engine.cache.make_room(cells)
    engine.close()


def test_a_recurrent_model_goes_on_from_whole_sequences_only() -> None:
    """A recurrent model gives the same completions as an engine without a prompt cache."""
    engine = Engine(2, 512, RECURRENT)
    assert not engine.model.rolls_back
    texts = ["one two three four", "one two three four", "one two", "one two three five"]
    boxes = []
    for text in texts:
        boxes.append(engine.submit(text, 6)[1])
        finish(engine, boxes[-1])
    fresh = []
    for text in texts:
        alone = Engine(1, 512, RECURRENT)
        fresh.append(alone.submit(text, 6)[1])
        finish(alone, fresh[-1])
        alone.close()
    assert [box.text for box in boxes] == [box.text for box in fresh]
    _, grown = engine.submit(texts[0], 6, seeds=(1, 2, 3))
    finish(engine, grown)
    assert {grown.choice(index) for index in range(3)} == {boxes[0].text}
    engine.close()


def test_a_small_request_comes_between_the_choices_of_a_large_one(two: Engine) -> None:
    """Two small requests finish before most of a large request's 20 choices."""
    _, large = two.submit("One day,", 4, seeds=(None,) * 20)
    for _ in range(3):
        two.scheduler.step()
    small = [two.submit(f"Number {number}", 4)[1] for number in range(2)]
    while not all(box.finished for box in small):
        two.scheduler.step()
    assert len(large.finishes) <= 8
    while not large.finished:
        two.scheduler.step()
    assert len(large.finishes) == 20


def test_choices_that_the_reader_has_cut_end() -> None:
    """A step ends the choices that the reader has cut, also one that was preempted, and the others
    continue."""
    engine = Engine(limit=3, cells=96)
    stops = [Stops(("x",), by_reader=True) for _ in range(3)]
    boxes = [engine.submit("One day", 60, stops=each, sampling=ENDLESS)[1] for each in stops]
    while not any(choice.preempted for choice in engine.scheduler._waiting):
        engine.scheduler.step()
    preempted = next(c for c in engine.scheduler._waiting if c.preempted is not None).task
    running = engine.scheduler._running[0].choice.task
    for task in (preempted, running):
        task.job.stops.ends[0] = 3
    engine.scheduler.step()
    for task in (preempted, running):
        (finish,) = task.mailbox.finishes  # type: ignore[attr-defined]
        assert (finish.reason, finish.stop) == ("stop", None)
    while engine.scheduler.is_busy:
        engine.scheduler.step()
    assert sorted(box.finishes[0].reason for box in boxes) == ["length", "stop", "stop"]
    engine.close()
