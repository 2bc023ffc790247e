"""Tests of sampling in process, with OpenAI's parameters and llama.cpp's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.base import Finish, Generation, Piece, Prompt, Sampling, Text
from latimer.backends.llama_cpp import LlamaCpp
from support.recordings import DEMO_CHATML

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
    async with backend.open(job) as batches:
        events = [event async for batch in batches for event in batch]
    return b"".join(event.data for event in events if isinstance(event, Piece)).decode()


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
        async with backend.open(job) as batches:
            events = [event async for batch in batches for event in batch]
        finish = events[-1]
        assert isinstance(finish, Finish)
        assert least <= finish.completion_tokens < 60
        assert finish.reason == "end"


async def test_the_end_can_be_ignored(backend: LlamaCpp) -> None:
    """With `ignore_eos` the completion continues to the limit."""
    text = await sample(backend, FRANCE, 30, temperature=0.0, extras={"ignore_eos": True})
    assert text.startswith("The capital of France is Paris.")
    assert len(text) > len("The capital of France is Paris.")


@pytest.mark.parametrize(
    "extras",
    [
        {"mirostat": 1},
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"dynatemp_range": 0.3, "dynatemp_exponent": 1.2},
        {"typical_p": 0.5},
    ],
    ids=lambda extras: next(iter(extras)),
)
async def test_every_other_sampler_runs(backend: LlamaCpp, extras: dict[str, Any]) -> None:
    """Each other sampler repeats its text with a seed, and differs from plain sampling."""
    texts = [await sample(backend, STORY, 40, seed, extras=extras) for seed in (3, 4, 5)]
    assert texts == [await sample(backend, STORY, 40, seed, extras=extras) for seed in (3, 4, 5)]
    assert texts != [await sample(backend, STORY, 40, seed) for seed in (3, 4, 5)]
