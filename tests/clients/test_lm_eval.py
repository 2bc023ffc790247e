"""Tests that lm-eval's own client gets the model's reference scores on the example tasks."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from clients.run_lm_eval import ways
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.reference import EXACT, reference
from support.servers import llama_server, serving

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
QUESTIONS = HERE.parent.parent / "examples" / "evaluate" / "questions.jsonl"


class Truth(NamedTuple):
    """The reference results of the tasks."""

    loglikelihoods: list[list[float]]
    accuracy: float
    bits_per_byte: float


@pytest.fixture(scope="module")
async def truth(demo_f32: Path) -> Truth:
    """Return the tasks' results, from one plain decode of each text."""
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    backend = LlamaCpp(demo_f32)

    async def ids(text: str) -> tuple[int, ...]:
        return await backend.tokenize(text, add_special=False, parse_special=True)

    likelihoods, rolling, size, right = [], 0.0, 0, 0
    with reference(demo_f32) as model:
        for row in rows:
            context = await ids(row["prompt"])
            scores = []
            for choice in row["choices"]:
                whole = await ids(row["prompt"] + choice)
                scores.append(math.fsum(model.scores(whole)[len(context) - 1 :]))
            likelihoods.append(scores)
            right += int(np.argmax(scores)) == row["answer"]
            # lm-eval starts a text with the end token if it has no other context.
            rolling += math.fsum(model.scores((2, *await ids(row["line"]))))
            size += len(row["line"].encode())
    await backend.aclose()
    return Truth(likelihoods, right / len(rows), -rolling / size / math.log(2))


@pytest.fixture(scope="module", params=["in process", "llama-server"])
def address(request: pytest.FixtureRequest, demo_f32: Path) -> Iterator[str]:
    """Serve the model with Latimer, with exact arithmetic."""
    if request.param == "in process":

        def make() -> Backend:
            return LlamaCpp(demo_f32, exact=True)

        with serving(lambda: OpenAIAdapter(make(), any_model=True)) as url:
            yield url
        return
    with (
        llama_server(demo_f32, *EXACT) as upstream,
        serving(lambda: OpenAIAdapter(LlamaServer(upstream), any_model=True)) as url,
    ):
        yield url


@pytest.mark.timeout(600)
async def test_lm_eval_gets_the_models_own_numbers(address: str, truth: Truth) -> None:
    """lm-eval gets the reference scores by ids and by text, for each concurrency and batch size."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "run_lm_eval.py"),
        f"{address}/v1/completions",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in out.splitlines() if line[:1] == b"{"
    ]
    assert len(lines) == len(ways())
    for line in lines:
        found = np.array(line["loglikelihoods"])
        assert np.abs(found - np.array(truth.loglikelihoods)).max() < 1e-3, line["way"]
        assert line["acc"] == pytest.approx(truth.accuracy), line["way"]
        assert line["bits_per_byte"] == pytest.approx(truth.bits_per_byte, abs=1e-5), line["way"]
        assert line["exact_match"] == 1.0, line["way"]
