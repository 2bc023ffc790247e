"""Tests that questions with four choices get the model's own answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest
from latimer.backends.base import Backend, Text
from latimer.backends.llama_cpp import DEMO_MODEL
from support.reference import Reference, engines, prompt_tokens, reference
from support.samples import sample
from support.texts import Question, chat, questions

pytestmark = pytest.mark.slow

QUESTIONS = questions(sample(80, 200))
# The order of choices closer than this in the reference may change with default flags.
MARGIN = 0.1
# All questions within the margin.
UNDECIDED = {"What is the opposite of wet?"}


@pytest.fixture(scope="module")
def truth() -> Iterator[Reference]:
    """Return the reference of the demo model as shipped."""
    with reference(DEMO_MODEL) as made:
        yield made


def context_of(question: Question) -> Text:
    """Return the prompt before a choice."""
    return Text(chat(question.text))


async def answer(backend: Backend, question: Question) -> int:
    """Return the index of the choice with the highest log-likelihood."""
    context = await prompt_tokens(backend, context_of(question))
    scores = []
    for choice in question.choices:
        tokens = await prompt_tokens(backend, Text(chat(question.text, choice)))
        scores.append(math.fsum(token.logprob or 0.0 for token in tokens[len(context) :]))
    return scores.index(max(scores))


async def test_the_models_answers_are_its_own(truth: Reference) -> None:
    """Of all questions only those whose two best choices are within the margin may differ."""
    async with engines(DEMO_MODEL, exact=False) as backends:
        for engine, backend in backends.items():
            turns = asyncio.Semaphore(8)

            async def ask(
                question: Question, backend: Backend = backend, turns: asyncio.Semaphore = turns
            ) -> int:
                async with turns:
                    return await answer(backend, question)

            answers = await asyncio.gather(*(ask(question) for question in QUESTIONS))
            wrong, near = [], []
            for question, given in zip(QUESTIONS, answers, strict=True):
                scores = await expected(backend, truth, question)
                second, first = sorted(scores)[-2:]
                if first - second < MARGIN:
                    near.append(question.text)
                elif given != scores.index(first):
                    wrong.append((question.text, scores, given))
            assert not wrong, (engine, wrong)
            assert set(near) <= UNDECIDED, (engine, near)


async def expected(backend: Backend, truth: Reference, question: Question) -> list[float]:
    """Return the reference's log-likelihood of each choice."""

    async def ids(text: str) -> tuple[int, ...]:
        return await backend.tokenize(text, add_special=True, parse_special=True)

    size = len(await ids(chat(question.text)))
    scores = []
    for choice in question.choices:
        values = truth.scores(await ids(chat(question.text, choice)))
        scores.append(math.fsum(values[size - 1 :]))
    return scores
