"""Tests that a prompt's log-probabilities are the model's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS
from latimer.backends.base import Backend, Text, TokenIds
from latimer.backends.llama_cpp import DEMO_MODEL
from numpy.typing import NDArray
from support.reference import Reference, engines, prompt_tokens, reference
from support.samples import sample
from support.texts import STRANGE, demo_texts

pytestmark = pytest.mark.slow

OTHER_TEXTS = (
    *STRANGE,
    "Hello the cat",
    "é über 12 345",
    " two  spaces ",
    "the of and to in\nis was",
    "tostra mira qué",
)
TOLERANCE = {"in process": 2e-5, "llama-server": 1e-4}
Case = tuple[TokenIds, NDArray[np.float64]]


@pytest.fixture(scope="module", params=["demo", "spm", "bpe", "recurrent"])
def model(request: pytest.FixtureRequest, demo_f32: Path) -> Path:
    """Return each model in F32."""
    return demo_f32 if request.param == "demo" else MODELS / f"{request.param}.gguf"


@pytest.fixture(scope="module")
def texts(model: Path) -> list[str]:
    """Return the texts to score; the demo model has the most."""
    return demo_texts(sample(80, 200)) if "demo" in model.stem else list(OTHER_TEXTS)


@pytest.fixture(scope="module")
async def backends(model: Path) -> AsyncIterator[dict[str, Backend]]:
    """Return the model in both engines."""
    async with engines(model) as made:
        yield made


@pytest.fixture(scope="module")
def truth(model: Path) -> Iterator[Reference]:
    """Return the model's reference."""
    with reference(model) as made:
        yield made


async def differences(backend: Backend, text: str, truth: Reference) -> list[float]:
    """Return the difference of each token's logprob from the reference."""
    tokens = await prompt_tokens(backend, Text(text))
    data = b"".join(token.data for token in tokens)
    assert data.decode() == text
    assert tokens[0].logprob is None
    ids = await backend.tokenize(text, add_special=True, parse_special=True)
    assert ids[len(ids) - len(tokens) :] == tuple(token.id for token in tokens)
    expected = truth.scores(ids)[len(ids) - len(tokens) :]
    got = [token.logprob for token in tokens[1:]]
    return [abs(a - b) for a, b in zip(got, expected, strict=True) if a is not None]


@pytest.mark.parametrize("engine", TOLERANCE)
@pytest.mark.parametrize("at_once", [1, 8])
async def test_prompts_are_scored_as_the_model_does(
    backends: dict[str, Backend], truth: Reference, texts: list[str], engine: str, at_once: int
) -> None:
    """Every token's logprob is the float64 log-softmax of the logits of one plain decode."""
    backend = backends[engine]
    worst = 0.0
    for start in range(0, len(texts), at_once):
        part = texts[start : start + at_once]
        found = await asyncio.gather(*(differences(backend, text, truth) for text in part))
        worst = max([worst, *(value for values in found for value in values)])
    assert worst < TOLERANCE[engine]


@pytest.mark.parametrize("engine", TOLERANCE)
async def test_alternatives_are_the_most_likely(
    backends: dict[str, Backend], truth: Reference, texts: list[str], engine: str
) -> None:
    """The five alternatives of a token are the reference's five most likely, in order."""
    backend = backends[engine]
    for text in texts[:10]:
        tokens = await prompt_tokens(backend, Text(text), 5)
        ids = await backend.tokenize(text, add_special=True, parse_special=True)
        rows = truth.distributions(ids)[len(ids) - len(tokens) :]
        for token, row in zip(tokens[1:], rows, strict=False):
            values = [row[other.id] for other in token.top]
            assert np.allclose(values, [o.logprob for o in token.top], atol=TOLERANCE[engine])
            assert np.allclose(values, np.sort(row)[::-1][:5], atol=1e-4)


async def test_ids_are_scored_verbatim(backends: dict[str, Backend], truth: Reference) -> None:
    """Ids that no tokenizer gives are scored unchanged, with nothing added before them."""
    for backend in backends.values():
        pieces = await backend.token_bytes()
        assert pieces is not None
        letters = [token for token, piece in enumerate(pieces) if len(piece) == 1]
        ids = tuple(letters[index] for index in (5, 40, 5, 60, 41, 7))
        tokens = await prompt_tokens(backend, ids)
        assert tuple(token.id for token in tokens) == ids
        got = [token.logprob for token in tokens[1:]]
        assert np.allclose(got, truth.scores(ids), atol=1e-4)  # type: ignore[arg-type]


async def test_default_flags_are_noisy_within_bounds(tmp_path: Path) -> None:
    """With default flags, the quantized model's logprobs differ a little, but not its choices."""
    with reference(DEMO_MODEL) as truth:
        async with engines(DEMO_MODEL, exact=False) as backends:
            for backend in backends.values():
                found: list[float] = []
                for text in demo_texts(40):
                    tokens = await prompt_tokens(backend, Text(text))
                    ids = tuple(token.id for token in tokens)
                    rows = truth.distributions(ids)
                    for token, row in zip(tokens[1:], rows, strict=False):
                        assert token.logprob is not None
                        found.append(abs(token.logprob - row[token.id]))
                        second, first = np.sort(row)[-2:]
                        if first - second > 0.5:
                            assert token.top[0].id == row.argmax()
                assert np.mean(found) < 0.06
