"""Fixtures of the programs of clients, which run in environments without Latimer."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

URLS, STEPS = (
    dict(one.split("=", 1) for one in os.environ[name].split())
    for name in ("LATIMER_URLS", "LATIMER_STEPS")
)
EMBEDDINGS = json.loads(Path(os.environ["LATIMER_EMBEDDINGS"]).read_text())


@pytest.fixture(params=list(URLS), scope="session")
def url(request: pytest.FixtureRequest) -> str:
    """Return the base URL of a Latimer, once for each of its engines."""
    return f"{URLS[request.param]}/v1"


@pytest.fixture(params=list(STEPS), scope="session")
def steps_url(request: pytest.FixtureRequest) -> str:
    """Return the same with a model that thinks, calls a tool for two cities, and answers.

    It takes images, hands a conversation over if it can, and answers that the reasoning was not
    sent back if it was not.
    """
    return f"{STEPS[request.param]}/v1"


class Embedded(NamedTuple):
    """Texts with the ids and vectors that the embedding model gives them."""

    texts: list[str]
    ids: list[list[int]]
    vectors: list[list[float]]

    def check(self, found: Sequence[Sequence[float]]) -> None:
        """Check that vectors are those of all texts, in order."""
        for vector, expected in zip(found, self.vectors, strict=True):
            self.check_one(vector, expected)

    def check_one(self, vector: Sequence[float], expected: Sequence[float]) -> None:
        """Check that a vector has unit length and the direction that is expected."""
        assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-5)
        assert sum(map(operator.mul, vector, expected)) > 0.99999


@pytest.fixture(scope="session")
def embedded() -> Embedded:
    """Return texts, their ids, and their vectors in float64 arithmetic."""
    inputs = EMBEDDINGS["inputs"]
    return Embedded(*([one[key] for one in inputs] for key in ("text", "ids", "vector")))


@pytest.fixture(params=list(URLS), scope="session")
def embedding_url(request: pytest.FixtureRequest) -> str:
    """Return the base URL of a Latimer with an embedding model, for each of its engines."""
    url: str = EMBEDDINGS["urls"]["plain"][request.param]
    return url


@pytest.fixture(params=list(URLS), scope="session")
def cl100k_url(request: pytest.FixtureRequest) -> str:
    """Return the same, started with `--logit-bias-vocabulary cl100k_base`."""
    url: str = EMBEDDINGS["urls"]["cl100k_base"][request.param]
    return url
