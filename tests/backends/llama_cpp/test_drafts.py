"""Tests of drafts by prompt lookup: what is drafted, and that answers stay what they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
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
from latimer.backends.llama_cpp.drafts import (
    MOST,
    STEP,
    Acceptance,
    DecodeCost,
    Lookup,
)
from latimer.backends.llama_cpp.scheduler import Scheduler
from support.recordings import DEMO_CHATML


def cost_of(share: float) -> DecodeCost:
    """Return the cost where each token of a batch takes a share of the first one's time."""
    cost = DecodeCost()
    for tokens in (1, *range(2, 18)) * 10:
        cost.add(tokens, 1 + share * (tokens - 1))
    return cost


CHEAP = cost_of(0.01)


def test_a_draft_is_what_followed_before() -> None:
    """The tokens after the last occurrence of the last three are the draft."""
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 4, 5, 6], CHEAP, 1, 16) == []
    assert lookup.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], CHEAP, 1, 4) == [4, 5, 6, 1]
    assert lookup.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 1, 2, 3], CHEAP, 1, 3) == [9, 1, 2]


def test_a_repetition_continues_beyond_the_end() -> None:
    """A draft of a repeated run repeats it as often as there is room."""
    assert Lookup().propose([7, 8] * 4, CHEAP, 1, 5) == [7, 8, 7, 8, 7]
    assert len(Lookup().propose([7] * 9, CHEAP, 1, 100)) <= MOST


def test_a_prediction_comes_first() -> None:
    """An answer that begins with its prediction continues with it; later drafts follow runs."""
    lookup = Lookup([10, 11, 12, 13, 14, 15], 3)
    assert lookup.propose([1, 2, 3, 10], CHEAP, 1, 3) == [11, 12, 13]
    assert lookup.propose([1, 2, 3, 10, 5, 11, 12, 13], CHEAP, 1, 9)[:2] == [14, 15]


def test_a_prediction_of_another_answer_is_not_drafted() -> None:
    """An answer that begins with another token gets no draft from the prediction's beginning."""
    lookup = Lookup([10, 11, 12, 13, 14, 15], 3)
    assert lookup.propose([1, 2, 3, 11], CHEAP, 1, 3) == []
    assert lookup.propose([1, 2, 3, 11, 12, 13], CHEAP, 1, 3)[:2] == [14, 15]


def test_the_longest_equal_text_is_continued() -> None:
    """Of several places with the same three tokens, a draft follows the one that fits best."""
    first, second = [7, 8, 9, 10, 1, 2, 3, 50, 51], [6, 5, 4, 3, 1, 2, 3, 60, 61]
    start = [*first, *second, *first[:7]]
    assert Lookup().propose(start, CHEAP, 1, 2) == [50, 51]
    assert Lookup().propose([*first, *second, *second[:7]], CHEAP, 1, 2) == [60, 61]
    assert Lookup().propose([*first, *second, 0, 1, 2, 3], CHEAP, 1, 2) == [60, 61], "the latest"


def test_a_draft_continues_where_the_last_one_was() -> None:
    """A place is kept although the same tokens occurred often since, also a long time ago."""
    text = [*range(10, 70)]
    history = [*text, *[20, 21, 22, 0] * 50, *text[:6]]
    lookup = Lookup()
    assert lookup.propose(history, CHEAP, 1, 3) == [16, 17, 18]
    history += text[6:13]
    assert lookup.propose(history, CHEAP, 1, 3) == [23, 24, 25]


def test_drafts_that_fail_become_shorter() -> None:
    """A sequence whose drafts are rejected drafts less, and soon nothing."""
    lookup, history, lengths = Lookup(), [1, 2, 3] * 5, []
    for _ in range(30):
        draft = lookup.propose(history, CHEAP, 1, 16)
        lengths.append(len(draft))
        lookup.acceptance.learn(len(draft), 0)
    assert lengths[0] > 8
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] <= 2


def test_what_would_have_been_drafted_counts() -> None:
    """While no draft pays, the tokens that come show if drafts would be right."""
    cost, text = cost_of(0.75), [*range(40)]
    lookup, history = Lookup(), [*text, 99, *text[:4]]
    lengths: list[int] = []
    while not lengths or not lengths[-1]:
        lengths.append(len(lookup.propose(history, cost, 1, 16)))
        history.append(text[len(history) - 41])
    assert 1 < len(lengths) < 8
    lookup.acceptance.learn(1, 1)
    for number in range(100, 110):
        history += [1, 2, 3]
        lengths.append(len(lookup.propose(history, cost, 1, 16)))
        lookup.acceptance.learn(lengths[-1], 0)
        history.append(number)
    assert lengths[-5:] == [0] * 5


def test_a_token_that_costs_as_much_is_not_drafted() -> None:
    """Nothing is drafted where a token in a batch costs as much as a step."""
    assert Lookup([3, 4]).propose([1, 2, 3] * 5, cost_of(1.0), 1, 16) == []


def test_a_draft_is_worth_the_step_to_several_tokens() -> None:
    """If two tokens take three times as long as one, only a long draft that is likely pays."""
    cost = DecodeCost()
    for tokens in range(1, 18):
        cost.add(tokens, 1.0 if tokens == 1 else 2.6 + 0.2 * tokens)
    likely, unlikely = Acceptance(0.95), Acceptance(0.6)
    assert likely.worth(cost, 1) == MOST
    assert unlikely.worth(cost, 1) == 0
    assert 0 < unlikely.worth(cost, 8) < likely.worth(cost, 8), "eight are several tokens anyway"
    assert likely.worth(cost, 1, drafting=0.2) < MOST
    assert likely.worth(cost, 1, drafting=1.0) == 0


def test_a_long_prompt_is_indexed_in_steps() -> None:
    """One call indexes a bounded number of tokens, and drafts begin when all are."""
    lookup, history = Lookup(), [*range(3 * STEP), 5, 6, 7]
    found = [lookup.propose(history, CHEAP, 1, 2) for _ in range(4)]
    assert found == [[], [], [8, 9], [8, 9]]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20))
def test_drafts_are_bounded(history: list[int], most: int) -> None:
    """No draft is longer than asked for, at every length of a sequence."""
    lookup = Lookup()
    for end in range(len(history) + 1):
        draft = lookup.propose(history[:end], CHEAP, 1, most)
        assert len(draft) <= most
        assert set(draft) <= set(history)
        if draft:
            lookup.acceptance.learn(len(draft), len(draft) // 2)


@given(st.floats(1e-5, 10.0), st.floats(0.0, 5.0), st.floats(0.02, 2.0))
def test_the_cost_is_a_line(one: float, start: float, slope: float) -> None:
    """The line is that through the durations of several tokens, in those of a single one."""
    cost = DecodeCost()
    for tokens in (1, 2, 5, 9, 17) * 100:
        seconds = 1.0 if tokens == 1 else start + slope * tokens
        cost.add(tokens, one * seconds)
    assert cost.line == pytest.approx((start, slope), rel=0.2, abs=0.2)
    assert cost.share(one / 2) == pytest.approx(0.5)


def test_a_disturbed_decode_is_no_measurement() -> None:
    """One decode that took a hundred times as long changes little."""
    cost = cost_of(0.3)
    before = cost.line
    cost.add(9, 100 * (1 + 0.3 * 8))
    assert cost.line == pytest.approx(before, rel=0.7, abs=0.3)


def test_durations_without_a_single_token() -> None:
    """The assumed line gives the unit of time while several sequences always run."""
    cost = DecodeCost()
    for tokens in [*range(4, 12)] * 3:
        cost.add(tokens, 0.1 + 0.001 * tokens)
    assert Acceptance(0.7).worth(cost, 4) > 4


def test_a_measured_cost_is_doubted() -> None:
    """After some hundred steps without a draft that pays, drafts are tried and measured again."""
    cost, likely = cost_of(1.0), Acceptance(0.95)
    found = [likely.worth(cost, 1) for _ in range(1000)]
    assert found[:50] == [0] * 50
    assert found[-1] > 0


def times(tokens: int) -> float:
    """Return the seconds of a decode; two tokens take twice as long as one."""
    return 0.01 if tokens == 1 else 0.015 + 0.0025 * tokens


def decode(
    cost: DecodeCost, acceptance: Acceptance, steps: int, of: Callable[[int], float] = times
) -> float:
    """Decode some steps of a draft that is always right, and return tokens per second."""
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        count = acceptance.worth(cost, 1)
        cost.add(count + 1, of(count + 1))
        tokens += count + 1
        seconds += of(count + 1)
    return tokens / seconds


@pytest.mark.parametrize("factor", [0.0, 0.01, 100.0])
def test_a_disturbed_token_decides_nothing(factor: float) -> None:
    """After a token of a strange duration, unlikely drafts do not pay, and likely ones do."""
    cost = DecodeCost()
    for tokens in (1, 2, 4, 8, 16) * 20:
        cost.add(tokens, times(tokens))
    cost.add(1, factor * times(1))
    decode(cost, Acceptance(0.95), 20)
    assert Acceptance(0.6).worth(cost, 1) == 0
    assert Acceptance(0.95).worth(cost, 1) > 4


def test_a_single_token_is_measured_again() -> None:
    """One in fifty steps has no draft although it pays, in case a single token is cheap."""
    cost, likely = DecodeCost(), Acceptance(0.98)
    decode(cost, likely, 100)
    found = []
    for _ in range(510):
        found.append(likely.worth(cost, 1))
        cost.add(found[-1] + 1, times(found[-1] + 1))
    assert 9 <= found.count(0) <= 11
    # Now single tokens are so cheap that no draft pays.
    decode(cost, likely, 1000, lambda tokens: 0.0005 if tokens == 1 else times(tokens))
    assert not any(likely.worth(cost, 1) for _ in range(10))


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
        patch.setattr(Scheduler, "_cost_for", lambda *_: cost_of(0.2))
        yield made
    for one in made:
        await one.aclose()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stops": Stops((" 9", "dog"))},
    "several": {"seeds": (1, 2, 3)},
    "grammar": {"grammar": Grammar("regex", "(( [0-9]+,)|[a-z ]){1,200}", "regex")},
}


# Each kind greedy and sampled; further seeds give further texts of one choice.
CASES = [*((kind, seed) for kind in KINDS for seed in (None, 1)), ("plain", 2), ("plain", 3)]
# Three choices take three times as long: for a text that is repeated, and for one that is not.
FEW = {"several": (0, 3)}


@pytest.mark.parametrize(
    ("kind", "seed", "prompt"),
    [(*case, at) for case in CASES for at in FEW.get(case[0], range(len(PROMPTS)))],
)
async def test_answers_are_the_same(
    pair: tuple[LlamaCpp, LlamaCpp], prompt: int, kind: str, seed: int | None
) -> None:
    """With drafts the text, the counts and the reason are those without, greedy and sampled."""
    job = replace(job_of(PROMPTS[prompt], seed), **KINDS[kind])
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


@pytest.mark.slow
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
