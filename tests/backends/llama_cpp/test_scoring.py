"""Tests of prompts that are scored from their own logits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.base import Finish, Generation, Prompt, PromptTokens, Sampling, Text, Token
from latimer.backends.llama_cpp import LlamaCpp, library, scoring
from latimer.backends.llama_cpp.scoring import score
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from numpy.typing import NDArray
from support.jobs import run
from support.recordings import DEMO_CHATML
from support.reference import reference
from support.texts import demo_texts

COUNT = Text(DEMO_CHATML.format("Count to 7."))
GREEDY = Sampling(temperature=0.0)


class Letters(Vocabulary):
    """A vocabulary of letters, without a model."""

    def __init__(self) -> None:
        self.pieces = [bytes([97 + token % 26]) for token in range(40)]

    def token(self, token: int) -> tuple[bytes, bool]:
        return self.pieces[token], False


LETTERS = Letters()


def scored(logits: NDArray[np.float32], ids: list[int], top: int) -> list[Token]:
    """Return the tokens after rows of logits."""
    tokens = [(i, LETTERS.pieces[i], LETTERS.pieces[i], False) for i in ids]
    return score(logits, tokens, top, LETTERS)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(0, 40), st.integers(1, 300))
def test_numbers_are_a_double_log_softmax(seed: int, rows: int, top: int, block: int) -> None:
    """Log-probabilities and alternatives are those of a log-softmax in double precision, for any
    block size."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, 40)) * 20).astype(np.float32)
    logits[:, 7] = logits[:, 3]
    ids = rng.integers(0, 40, rows).tolist()
    before, scoring.BLOCK = scoring.BLOCK, block
    try:
        tokens = scored(logits, ids, top)
    finally:
        scoring.BLOCK = before
    wide = logits.astype(np.float64)
    norms = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True))
    expected = wide - wide.max(1, keepdims=True) - norms
    for row, token in enumerate(tokens):
        assert token.logprob == pytest.approx(expected[row, token.id], abs=1e-5)
        order = sorted(range(40), key=lambda i, row=row: (-logits[row, i], i))  # type: ignore[misc]
        assert [other.id for other in token.top] == order[:top]
        for other in token.top:
            if other.id == token.id:
                assert other.logprob == token.logprob


def test_what_is_impossible_is_minus_infinity() -> None:
    """A logit of minus infinity gives a log-probability of minus infinity."""
    logits = np.zeros((1, 40), np.float32)
    logits[0, 5] = -np.inf
    assert scored(logits, [5], 0)[0].logprob == -np.inf


@pytest.fixture
async def small_steps(demo_f32: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LlamaCpp]:
    """An engine whose buffer of logits is full after ten rows."""
    monkeypatch.setattr(library, "MAX_LOGITS", 10 * 1024 * 4)
    engine = LlamaCpp(demo_f32, exact=True)
    yield engine
    await engine.aclose()


async def prompt_tokens(engine: LlamaCpp, job: Generation) -> tuple[list[Token], list[str]]:
    """Return the prompt's tokens, and the type names of all events in their order."""
    tokens: list[Token] = []
    kinds: list[str] = []
    async with engine.open(job) as batches:
        async for batch in batches:
            for event in batch:
                kinds.append(type(event).__name__)
                if isinstance(event, PromptTokens):
                    tokens += event.tokens
    return tokens, kinds


async def test_a_long_prompt_is_scored_in_bounded_memory(
    small_steps: LlamaCpp, demo_f32: Path
) -> None:
    """Scoring in steps of ten rows gives the numbers of a single decode."""
    text = " ".join(demo_texts(8))
    tokens, _ = await prompt_tokens(small_steps, Generation(Prompt(Text(text), logprobs=3), 0))
    ids = [token.id for token in tokens]
    assert len(ids) > 200
    with reference(demo_f32, 1024) as truth:
        expected = truth.scores(ids)
    got = [token.logprob or 0.0 for token in tokens[1:]]
    assert np.abs(np.array(got) - np.array(expected)).max() < 2e-5


async def test_the_prompt_comes_before_all_choices(small_steps: LlamaCpp) -> None:
    """Each job scores its prompt once, before its choices, while other jobs run."""
    job = Generation(Prompt(COUNT, logprobs=0), 3, (1, 2, 3), sampling=GREEDY, logprobs=0)
    plain = asyncio.create_task(run(small_steps, Generation(Prompt(COUNT), 3, sampling=GREEDY)))
    results = await asyncio.gather(*(prompt_tokens(small_steps, job) for _ in range(4)))
    texts, finishes = await plain
    assert (len(texts[0]) > 0, finishes[0].completion_tokens) == (True, 3)
    for tokens, kinds in results:
        assert kinds[0] == "PromptTokens"
        assert kinds.count("PromptTokens") == 1
        assert kinds.count("Finish") == 3
        assert [token.logprob is None for token in tokens] == [
            index == 0 for index in range(len(tokens))
        ]


async def test_without_tokens_to_generate_every_choice_ends(small_steps: LlamaCpp) -> None:
    """`max_tokens: 0` scores the prompt and finishes each choice with `length`."""
    job = Generation(Prompt(Text("a"), logprobs=1), 0, (None, None))
    async with small_steps.open(job) as batches:
        events = [event async for batch in batches for event in batch]
    assert isinstance(events[0], PromptTokens)
    finishes = [event for event in events if isinstance(event, Finish)]
    assert [(finish.choice, finish.reason) for finish in finishes] == [(1, "length"), (0, "length")]


async def test_leaving_ends_the_scoring(small_steps: LlamaCpp) -> None:
    """A job that is left during scoring frees the engine for the next one."""
    long = Generation(Prompt(Text(" ".join(demo_texts(30))), logprobs=5), 0)
    async with small_steps.open(long):
        await asyncio.sleep(0.01)
    tokens, _ = await prompt_tokens(small_steps, Generation(Prompt(Text("after"), logprobs=0), 0))
    assert tokens
