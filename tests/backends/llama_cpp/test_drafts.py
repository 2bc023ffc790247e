"""Tests of drafts by prompt lookup: what is drafted, and that answers stay what they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.base import (
    Batch,
    Finish,
    Generation,
    Grammar,
    Piece,
    Prompt,
    Sampling,
    Stops,
    Text,
)
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.drafts import MOST, STEP, DecodeCost, Lookup
from latimer.backends.llama_cpp.scheduler import Scheduler
from support.recordings import DEMO_CHATML

CHEAP = 0.01


def test_a_draft_is_what_followed_before() -> None:
    """The tokens after the last occurrence of the last three are the draft."""
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 4, 5, 6], CHEAP, 16) == []
    assert lookup.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], CHEAP, 4) == [4, 5, 6, 1]
    assert lookup.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 1, 2, 3], CHEAP, 3) == [9, 1, 2]


def test_a_repetition_continues_beyond_the_end() -> None:
    """A draft of a repeated run repeats it as often as there is room."""
    assert Lookup().propose([7, 8] * 4, CHEAP, 5) == [7, 8, 7, 8, 7]
    assert len(Lookup().propose([7] * 9, CHEAP, 100)) <= MOST


def test_a_prediction_comes_first() -> None:
    """The beginning of a prediction is the first draft; later ones follow runs in it."""
    lookup = Lookup([10, 11, 12, 13, 14, 15])
    assert lookup.propose([1, 2, 3], CHEAP, 3) == [10, 11, 12]
    assert lookup.propose([1, 2, 3, 11, 12, 13], CHEAP, 9)[:2] == [14, 15]


def test_drafts_that_fail_become_shorter() -> None:
    """A sequence whose drafts are rejected drafts less, and later tries again."""
    lookup = Lookup()
    history = [1, 2, 3] * 5
    lengths = []
    for _ in range(200):
        draft = lookup.propose(history, 0.2, 16)
        lengths.append(len(draft))
        if draft:
            lookup.acceptance.learn(len(draft), 0)
    assert lengths[0] > 2
    assert 0 in lengths
    assert any(lengths[lengths.index(0) :])
    assert sum(map(bool, lengths)) < 60


def test_a_token_that_costs_as_much_is_not_drafted() -> None:
    """Nothing is drafted where a token in a batch costs as much as a step."""
    assert Lookup().propose([1, 2, 3] * 5, 1.0, 16) == []


def test_a_long_prompt_is_indexed_in_steps() -> None:
    """One call indexes a bounded number of tokens, and drafts begin when all are."""
    lookup, history = Lookup(), [*range(3 * STEP), 5, 6, 7]
    found = [lookup.propose(history, CHEAP, 2) for _ in range(4)]
    assert found == [[], [], [8, 9], [8, 9]]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20))
def test_drafts_are_bounded(history: list[int], most: int) -> None:
    """No draft is longer than asked for, at every length of a sequence."""
    lookup = Lookup()
    for end in range(len(history) + 1):
        draft = lookup.propose(history[:end], CHEAP, most)
        assert len(draft) <= most
        assert set(draft) <= set(history)
        if draft:
            lookup.acceptance.learn(len(draft), len(draft) // 2)


@given(st.floats(1e-5, 1.0), st.floats(1e-6, 1.0), st.integers(1, 32))
def test_the_cost_is_a_line(first: float, each: float, running: int) -> None:
    """The share of a token is that of a line through the durations of decodes."""
    cost = DecodeCost()
    assert 0 < cost.share(running) <= 1
    for tokens in (1, 5, 9, 17) * 20:
        cost.add(tokens, first + each * tokens)
    expected = each * running / (first + each * running)
    assert cost.share(running) == pytest.approx(min(max(expected, 0.01), 1.0), rel=1e-3)


def test_durations_of_one_size_tell_nothing() -> None:
    """While all batches have one size, the share is an assumption that permits drafts."""
    cost = DecodeCost()
    for _ in range(50):
        cost.add(3, 0.5)
    assert 0 < cost.share(3) < 0.5


# Texts that the model continues by repeating them, and texts that it does not.
PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4,",
    "the cat and the dog and " * 6,
    DEMO_CHATML.format("Count to 12.") + "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12. 1, 2, 3,",
    DEMO_CHATML.format("Tell me a story."),
)
ENDS = ((0, -100.0), (2, -100.0))


def job_of(prompt: str, seed: int | None = None, **changes: Any) -> Generation:
    """Return a job of 60 tokens without an end."""
    sampling = changes.pop("sampling", Sampling(0.0 if seed is None else 0.7, logit_bias=ENDS))
    return Generation(Prompt(Text(prompt)), 60, (seed,), sampling=sampling, **changes)


async def events_of(backend: LlamaCpp, job: Generation) -> list[Any]:
    """Return the events of a job, without the counts of drafts and the sizes of batches."""
    events: list[Any] = []
    async with backend.open(job) as batches:
        async for batch in batches:
            events += batch
    events.sort(key=lambda event: event.choice)
    return events


def without_counts(events: Batch) -> list[Any]:
    """Return events as they are without drafts."""
    return [
        event._replace(accepted_tokens=0, rejected_tokens=0) if isinstance(event, Finish) else event
        for event in events
    ]


def accepted(events: Batch) -> int:
    """Return the number of drafted tokens that were accepted."""
    return sum(event.accepted_tokens for event in events if isinstance(event, Finish))


@pytest.fixture(scope="module")
async def pair(demo_f32: Path) -> AsyncIterator[tuple[LlamaCpp, LlamaCpp]]:
    """Engines with and without drafts, and without a prompt cache that differs.

    They draft whether or not it pays, because measured times depend on the machine's load.
    """
    shared: dict[str, Any] = {"context": 1024, "cache_memory": 0, "cache_type": "f32"}
    shared["flash_attention"] = False
    made = LlamaCpp(demo_f32, **shared), LlamaCpp(demo_f32, prompt_lookup=False, **shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_share", lambda *_: 0.2)
        yield made
    for one in made:
        await one.aclose()


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop": {"stops": Stops((" 9", "dog"))},
    "several": {"seeds": (1, 2, 3)},
    "grammar": {"grammar": Grammar("regex", "(( [0-9]+,)|[a-z ]){1,200}", "regex")},
}


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
async def test_answers_are_the_same(
    pair: tuple[LlamaCpp, LlamaCpp], prompt: str, kind: str, seed: int | None
) -> None:
    """With drafts the text, the counts and the reason are those without, greedy and sampled."""
    job = replace(job_of(prompt, seed), **KINDS[kind])
    job.stops = replace(job.stops, ends={})
    found = [without_counts(await events_of(backend, job)) for backend in pair]
    assert found[0] == found[1]


async def test_log_probabilities_are_the_same(pair: tuple[LlamaCpp, LlamaCpp]) -> None:
    """Tokens and alternatives of drafted positions have the probabilities of single decodes."""
    job = job_of(PROMPTS[0], logprobs=4)
    with_drafts, without = [await events_of(backend, job) for backend in pair]
    assert accepted(with_drafts) > 0
    pairs = zip(with_drafts[:-1], without[:-1], strict=True)
    for one, other in ((a.tokens[0], b.tokens[0]) for a, b in pairs):
        assert (one.id, one.data) == (other.id, other.data)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [a.logprob for a in one.top] == pytest.approx([a.logprob for a in other.top], 1e-4)


async def test_repetitions_are_drafted_and_counted(pair: tuple[LlamaCpp, LlamaCpp]) -> None:
    """A text that repeats its prompt has tokens from drafts, unless drafts are off."""
    for prompt in PROMPTS[:2]:
        (finish,) = [e for e in await events_of(pair[0], job_of(prompt)) if isinstance(e, Finish)]
        assert finish.accepted_tokens > 0
        assert finish.accepted_tokens < finish.completion_tokens == 60
    assert accepted(await events_of(pair[1], job_of(PROMPTS[0]))) == 0


async def test_a_prediction_is_drafted(pair: tuple[LlamaCpp, LlamaCpp]) -> None:
    """An answer that repeats its prediction comes from drafts; a wrong one changes nothing."""
    plain = [await events_of(pair[1], job_of(PROMPTS[3]))]
    text = b"".join(event.data for event in plain[0] if isinstance(event, Piece)).decode()
    for prediction in (text, text[:60] + " something else " + text[60:], "nothing of this"):
        events = await events_of(pair[0], job_of(PROMPTS[3], prediction=prediction))
        assert without_counts(events) == without_counts(plain[0])
        assert accepted(events) > 0 or prediction == "nothing of this"


async def test_many_at_once_are_the_same(pair: tuple[LlamaCpp, LlamaCpp]) -> None:
    """Sequences of one batch do not disturb each other's drafts."""
    jobs = [job_of(prompt + " " * number) for prompt in PROMPTS for number in range(3)]
    found = [await asyncio.gather(*(events_of(one, job) for job in jobs)) for one in pair]
    texts = [
        [b"".join(e.data for e in events if isinstance(e, Piece)) for events in each]
        for each in found
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("limit", range(8, 20))
async def test_the_cache_has_no_rejected_tokens(demo_f32: Path, limit: int) -> None:
    """A prompt that continues an answer with drafts is evaluated as without them."""
    found = []
    for lookup in (True, False):
        backend = LlamaCpp(demo_f32, context=1024, prompt_lookup=lookup, flash_attention=False)
        job = replace(job_of(PROMPTS[1] * 2), max_tokens=limit)
        events = await events_of(backend, job)
        text = b"".join(event.data for event in events if isinstance(event, Piece)).decode()
        later = replace(job_of(PROMPTS[1] * 2 + text + " and"), max_tokens=5, logprobs=0)
        continued = await events_of(backend, later)
        assert continued[-1].cached_tokens > 60
        found.append([event.tokens[0] for event in continued[:-1]])
        await backend.aclose()
    assert [token.id for token in found[0]] == [token.id for token in found[1]]
    logprobs = [[token.logprob for token in tokens] for tokens in found]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
