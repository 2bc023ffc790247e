"""Tests of sampling in process, with OpenAI's parameters and llama.cpp's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.base import (
    Finish,
    Generation,
    Prompt,
    PromptTokens,
    Sampling,
    Text,
    Token,
)
from latimer.backends.llama_cpp import LlamaCpp, library
from latimer.backends.llama_cpp.sampling import score
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from latimer.backends.llama_server import LlamaServer
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
    return score(logits, tokens, top, LETTERS, np.empty(logits.shape[1], np.float32))


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(0, 40))
def test_numbers_are_a_double_log_softmax(seed: int, rows: int, top: int) -> None:
    """Log-probabilities and alternatives are those of a log-softmax in double precision."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, 40)) * 20).astype(np.float32)
    logits[:, 7] = logits[:, 3]
    ids = rng.integers(0, 40, rows).tolist()
    tokens = scored(logits, ids, top)
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


STORY = Text("One day,")
FRANCE = Text(DEMO_CHATML.format("What is the capital of France?"))


@pytest.fixture(scope="module")
async def backend(demo_f32: Path) -> AsyncIterator[LlamaCpp]:
    """A backend with the demo model."""
    made = LlamaCpp(demo_f32, context=512, exact=True)
    yield made
    await made.aclose()


async def sample(
    backend: LlamaCpp, prompt: Text, tokens: int, seed: int | None = 1, **sampling: Any
) -> str:
    """Return the text of one choice."""
    job = Generation(Prompt(prompt), tokens, (seed,), sampling=Sampling(**sampling))
    return (await run(backend, job))[0][0].decode()


async def test_temperature_zero_is_greedy(backend: LlamaCpp) -> None:
    """Temperature 0 gives the most likely completion with any seed."""
    answers = {await sample(backend, FRANCE, 20, seed, temperature=0.0) for seed in (1, 2, None)}
    assert answers == {"The capital of France is Paris."}


async def test_a_seed_repeats_and_another_differs(backend: LlamaCpp) -> None:
    """A seed always gives the same text, and texts of other seeds or without a seed differ."""
    first = await sample(backend, STORY, 30, 5)
    assert await sample(backend, STORY, 30, 5) == first
    assert len({await sample(backend, STORY, 30, seed) for seed in range(8)}) > 3
    assert len({await sample(backend, STORY, 30, None) for _ in range(8)}) > 3


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, 2**63 - 1, -(2**63)])
async def test_every_int64_is_a_seed(backend: LlamaCpp, seed: int) -> None:
    """Seeds beyond 32 bits repeat their text too."""
    assert await sample(backend, STORY, 10, seed) == await sample(backend, STORY, 10, seed)


@pytest.mark.parametrize(
    "narrow",
    [
        {"top_p": 0.0001},
        {"extras": {"top_k": 1}},
        {"extras": {"min_p": 0.999}},
        {"temperature": 0.0001},
        {"extras": {"top_n_sigma": 0.0001}},
    ],
    ids=lambda narrow: str(narrow),
)
async def test_narrow_sampling_is_greedy(backend: LlamaCpp, narrow: dict[str, Any]) -> None:
    """Each sampler gives the greedy text when it leaves only the best token."""
    greedy = await sample(backend, STORY, 20, temperature=0.0)
    assert await sample(backend, STORY, 20, **narrow) == greedy


async def test_a_bias_bans_and_forces(backend: LlamaCpp) -> None:
    """A bias of -100 bans a token, and a bias of 100 forces one."""
    token = (await backend.tokenize(" Paris", add_special=False, parse_special=False))[0]
    other = (await backend.tokenize(" Lisbon", add_special=False, parse_special=False))[0]
    banned = await sample(backend, FRANCE, 20, temperature=0.0, logit_bias=((token, -100.0),))
    assert "Paris" not in banned
    forced = await sample(backend, FRANCE, 3, temperature=0.0, logit_bias=((other, 100.0),))
    assert forced == " Lisbon" * 3


async def test_penalties_count_generated_tokens_only(backend: LlamaCpp) -> None:
    """OpenAI's penalties apply to generated tokens and not to those of the prompt."""
    prompt = Text(DEMO_CHATML.format("Say: apple"))
    penalties: list[dict[str, Any]] = [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
    for penalty in penalties:
        assert await sample(backend, prompt, 5, temperature=0.0, **penalty) == "apple"
    token = (await backend.tokenize(" Lisbon", add_special=False, parse_special=False))[0]
    bias = ((token, 20.0),)
    plain = await sample(backend, FRANCE, 12, temperature=0.0, logit_bias=bias)
    punished = await sample(
        backend, FRANCE, 12, temperature=0.0, logit_bias=bias, frequency_penalty=2.0
    )
    assert plain.count("Lisbon") == 12
    assert punished.count("Lisbon") < 12


async def test_the_repeat_penalty_counts_the_prompt_too(backend: LlamaCpp) -> None:
    """`repeat_penalty` also counts the prompt, as in llama.cpp."""
    prompt = Text(DEMO_CHATML.format("Say: apple"))
    extras = {"repeat_penalty": 10.0}
    assert await sample(backend, prompt, 5, temperature=0.0, extras=extras) != "apple"
    unseen = {"repeat_penalty": 10.0, "repeat_last_n": 0}
    assert await sample(backend, prompt, 5, temperature=0.0, extras=unseen) == "apple"


async def test_dry_ends_repetitions_the_prompts_too(backend: LlamaCpp) -> None:
    """DRY ends a repetition that began in the prompt, unless its parameters exclude it."""
    prompt = Text(" Lisbon" * 30)
    token = (await backend.tokenize(" Lisbon", add_special=False, parse_special=False))[0]
    biased: dict[str, Any] = {"temperature": 0.0, "logit_bias": ((token, 20.0),)}
    assert await sample(backend, prompt, 8, **biased) == " Lisbon" * 8
    extras = {"dry_multiplier": 20.0}
    assert await sample(backend, prompt, 1, **biased, extras=extras) != " Lisbon"
    whole = {**extras, "dry_penalty_last_n": -1}
    assert await sample(backend, prompt, 1, **biased, extras=whole) != " Lisbon"
    for neutral in (
        {"dry_penalty_last_n": 0},
        {"dry_penalty_last_n": 2},
        {"dry_allowed_length": 50},
        {"dry_multiplier": 0.0},
        {"dry_sequence_breakers": [" Lisbon"]},
    ):
        text = await sample(backend, prompt, 8, **biased, extras={**extras, **neutral})
        assert text == " Lisbon" * 8, neutral


async def test_a_least_number_of_tokens(backend: LlamaCpp) -> None:
    """`min_tokens` bans end tokens before that number of tokens, and allows them after it."""
    plain = await sample(backend, FRANCE, 60, temperature=0.0)
    count = len(await backend.tokenize(plain, add_special=False, parse_special=False))
    for least in (1, count):
        extras = {"min_tokens": least}
        assert await sample(backend, FRANCE, 60, temperature=0.0, extras=extras) == plain
    for least in (count + 1, count + 10):
        job = Generation(Prompt(FRANCE), 60, sampling=Sampling(0.0, extras={"min_tokens": least}))
        (finish,) = (await run(backend, job))[1]
        assert least <= finish.completion_tokens < 60
        assert finish.reason == "end"


async def test_the_end_can_be_ignored(backend: LlamaCpp) -> None:
    """With `ignore_eos` the completion continues to the limit."""
    text = await sample(backend, FRANCE, 30, temperature=0.0, extras={"ignore_eos": True})
    assert text.startswith("The capital of France is Paris.")
    assert len(text) > len("The capital of France is Paris.")


@pytest.mark.parametrize("decay", [{}, {"adaptive_decay": 0.5}], ids=["default", "decay"])
async def test_the_adaptive_sampler_is_llama_servers(
    backend: LlamaCpp, llama_server_url: str, decay: dict[str, Any]
) -> None:
    """With `adaptive_target`, a seed gives llama-server's text, which is not the usual one."""
    server = LlamaServer(llama_server_url)
    extras = {"min_p": 0.05, "adaptive_target": 0.2, **decay}
    job = Generation(Prompt(STORY), 30, (3,), sampling=Sampling(extras=extras))
    text = (await run(server, job))[0][0].decode()
    assert await sample(backend, STORY, 30, 3, extras=extras) == text
    assert await sample(backend, STORY, 30, 3, extras={"min_p": 0.05}) != text
    await server.aclose()


@pytest.mark.parametrize(
    "extras",
    [
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"typical_p": 0.2},
        {"dynatemp_range": 0.5},
        {"mirostat": 2},
        {"mirostat": 1, "xtc_probability": 1.0},
        {"top_n_sigma": 1.0},
    ],
    ids=lambda extras: next(iter(extras)),
)
async def test_samplers_at_temperature_zero_are_llama_servers(
    backend: LlamaCpp, llama_server_url: str, extras: dict[str, Any]
) -> None:
    """At temperature 0, a sampler gives llama-server's text, also if it removes the most likely
    token."""
    server = LlamaServer(llama_server_url)
    capital = Text("The capital of")
    job = Generation(Prompt(capital), 8, (3,), sampling=Sampling(temperature=0.0, extras=extras))
    text = (await run(server, job))[0][0].decode()
    assert await sample(backend, capital, 8, 3, temperature=0.0, extras=extras) == text
    await server.aclose()
