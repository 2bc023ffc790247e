"""Tests of the sampler for OpenAI's parameters, against float64 and llama.cpp's samplers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latimer.backends.base import Sampling
from latimer.backends.llama_cpp.chain import ChainSampler
from latimer.backends.llama_cpp.grammars import Candidates, Constraint
from latimer.backends.llama_cpp.sampling import DeadEnd, RowSampler, uniform
from latimer.backends.llama_cpp.sampling import _sorted as sort
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from numpy.typing import NDArray

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.8},
    {"extras": {"top_k": 7}},
    {"extras": {"min_p": 0.1}},
    {"temperature": 1.4, "top_p": 0.9, "extras": {"top_k": 30, "min_p": 0.02}},
    {"logit_bias": ((3, 5.0), (4, -100.0))},
    {"extras": {"ignore_eos": True}},
]
# A size that is drawn from at once, and one that is drawn from in strides of which the last is
# short. What changes single logits, or all of them alike, is the same code for both.
CASES = [
    *((parameters, 50) for parameters in PARAMETERS),
    *((parameters, 3_000) for parameters in (PARAMETERS[0], *PARAMETERS[2:6])),
]


class Numbers(Vocabulary):
    """A vocabulary without a model, whose last token is its end token."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ends = frozenset({size - 1})


def logits_of(size: int, seed: int = 0) -> NDArray[np.float32]:
    """Return logits of which a few dominate, as those of a model do."""
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def sampler_of(size: int, seed: int | None = 1, *rest: Any, **sampling: Any) -> RowSampler:
    """Return a sampler."""
    scratch = np.empty(size, np.float32)
    return RowSampler(Sampling(**sampling), seed, Numbers(size), scratch, *rest)


def probabilities(
    logits: NDArray[np.float32], sampling: Sampling, ends: Sequence[int]
) -> NDArray[np.float64]:
    """Return the distribution after all parameters, in double precision."""
    values = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        values[token] += bias if bias > -100 else -math.inf
    if sampling.extras.get("ignore_eos"):
        values[[*ends]] = -math.inf
    order = np.argsort(-values, kind="stable")
    kept = order[: sampling.extras.get("top_k") or len(order)]
    weights = np.exp(values[kept] - values[kept[0]])
    count = int((weights.cumsum() / weights.sum() < sampling.top_p).sum()) + 1
    kept = kept[:count]
    kept = kept[np.exp(values[kept] - values[kept[0]]) >= sampling.extras.get("min_p", 0.0)]
    found: NDArray[np.float64] = np.zeros(len(values))
    found[kept] = np.exp((values[kept] - values[kept[0]]) / sampling.temperature)
    found /= found.sum()
    return found


@pytest.mark.parametrize(("parameters", "size"), CASES, ids=str)
def test_draws_have_the_distribution(size: int, parameters: dict[str, Any]) -> None:
    """The frequencies of 20,000 draws fit the distribution in double precision (chi-square)."""
    logits, count = logits_of(size), 20_000
    sampler = sampler_of(size, 5, **parameters)
    expected = probabilities(logits, Sampling(**parameters), [size - 1])
    found = Counter(sampler.sample(logits) for _ in range(count))
    assert all(expected[token] for token in found), "a token that the parameters exclude"
    often: list[int] = np.flatnonzero(expected * count >= 10).tolist()
    rest = count - sum(found[token] for token in often)
    wanted = {token: float(expected[token]) * count for token in often}
    statistic = sum((found[token] - one) ** 2 / one for token, one in wanted.items())
    others = count - sum(wanted.values())
    statistic += (rest - others) ** 2 / others if others >= 10 else 0.0
    # Five standard deviations above the mean of the chi-square distribution.
    assert statistic < len(often) + 5 * math.sqrt(2 * len(often)) + 5


@pytest.mark.parametrize(("parameters", "size"), CASES, ids=str)
def test_a_seed_gives_llama_cpps_tokens(size: int, parameters: dict[str, Any]) -> None:
    """With the same seed, llama.cpp's own samplers select the same tokens."""
    vocabulary, sampling = Numbers(size), Sampling(**parameters)
    rows = [logits_of(size, number) for number in range(100)]
    for seed in (0, 1, 2**32 - 2, 2**40 + 7):
        ours = sampler_of(size, seed, **parameters)
        theirs = ChainSampler(sampling, seed, vocabulary, Candidates(size), (), 100, 8192)
        pairs = [(ours.sample(row), theirs.sample(row)) for row in rows]
        theirs.close()
        # llama.cpp adds up in single precision, so a draw at an edge may differ.
        assert sum(one != other for one, other in pairs) <= (3 if sampling.top_p < 1 else 0)


@given(st.integers(0, 2**32), st.floats(0.1, 100.0))
@settings(max_examples=50)
def test_likely_tokens_come_first(seed: int, spread: float) -> None:
    """A large vocabulary is sorted by logits of any sign; equal ones by their ids."""
    chance = np.random.default_rng(seed)
    logits = (chance.standard_normal(3_000) * spread).astype(np.float32).round(1)
    logits[chance.random(3_000) < 0.1] = -0.0
    ids = np.flatnonzero(chance.random(3_000) < 0.9)
    expected = sorted(ids.tolist(), key=lambda token: (-float(logits[token]), token))
    assert sort(ids, logits).tolist() == expected


def test_penalties_are_llama_cpps() -> None:
    """Presence and frequency penalties change logits as llama.cpp's sampler does."""
    penalties: Any = {"temperature": 0.0, "presence_penalty": 0.9, "frequency_penalty": 0.7}
    ours = sampler_of(50, **penalties)
    theirs = ChainSampler(Sampling(**penalties), 1, Numbers(50), Candidates(50), (), 400, 8192)
    logits = logits_of(50)
    assert [ours.sample(logits) for _ in range(300)] == [theirs.sample(logits) for _ in range(300)]
    theirs.close()


@given(
    st.integers(1, 2_000),
    st.integers(0, 2**32),
    st.floats(1e-45, 2.0),
    st.floats(0.0, 1.0),
    st.integers(-1, 3_000),
    st.floats(0.0, 1.0),
)
@settings(max_examples=300)
def test_any_parameters_give_a_likely_token(
    size: int, seed: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """Any legal parameters select a token, and never one that is banned."""
    logits = logits_of(size, seed)
    logits[np.random.default_rng(seed).random(size) < 0.5] = -np.inf
    logits[seed % size] = 4.0
    extras = {"top_k": top_k, "min_p": min_p}
    sampler = sampler_of(size, seed, temperature=temperature, top_p=top_p, extras=extras)
    assert logits[sampler.sample(logits)] > -np.inf


class Multiples(Constraint):
    """A grammar that allows the multiples of a number."""

    def __init__(self, number: int, size: int) -> None:
        self._mask: NDArray[np.bool_] = np.arange(size) % number == 0
        self.accepted: list[int] = []

    def allows(self, token: int) -> bool:
        return bool(self._mask[token])

    def allowed(self) -> NDArray[np.bool_]:
        return self._mask

    def accept(self, token: int) -> None:
        assert self._mask[token]
        self.accepted.append(token)

    def copy(self) -> Multiples:
        raise NotImplementedError


def test_without_a_seed_nobody_can_compute_the_tokens() -> None:
    """Requests without a seed share no random numbers, which the tokens of one would show."""
    random.seed(0)
    first, second = uniform(None), uniform(None)
    random.seed(0)
    assert len({first(), second(), uniform(None)(), random.random()}) == 4


@pytest.mark.parametrize("parameters", PARAMETERS[:6], ids=str)
def test_a_grammar_keeps_the_ratios(parameters: dict[str, Any]) -> None:
    """With a grammar, only its tokens are drawn, and the grammar gets each of them."""
    grammar = Multiples(9, 50)
    sampler = sampler_of(50, 3, grammar, **parameters)
    tokens = [sampler.sample(logits_of(50, number)) for number in range(200)]
    assert tokens == grammar.accepted
    assert len(set(tokens)) > 3


@pytest.mark.parametrize(
    ("temperature", "value"),
    [(0.0, -np.inf), (0.0, np.nan), (1.0, -np.inf), (1.0, np.nan), (1.0, np.inf)],
)
def test_logits_without_a_number_end_the_choice(temperature: float, value: float) -> None:
    """If no logit is finite there is no token, rather than an arbitrary one."""
    sampler = sampler_of(50, temperature=temperature)
    with pytest.raises(DeadEnd):
        sampler.sample(np.full(50, value, np.float32))


def test_the_models_logits_do_not_change() -> None:
    """Biases and penalties apply to a copy, because log-probabilities are the model's own."""
    logits = logits_of(50)
    before = logits.copy()
    sampler = sampler_of(50, presence_penalty=1.0, logit_bias=((1, 3.0),), temperature=0.5)
    for _ in range(20):
        sampler.sample(logits)
    assert (logits == before).all()
