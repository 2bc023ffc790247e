"""Tests that a sampling parameter is in every table that needs it, and has an effect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from chaos.bodies import SAMPLING
from latimer.backends.base import LLAMA_CPP_EXTRAS, Backend, Generation, Prompt, Sampling, Text
from latimer.backends.koboldcpp import translate as koboldcpp
from latimer.backends.llama_cpp.backend import CAPABILITIES
from latimer.backends.llama_server import translate as llama_server
from latimer.schemas.native.koboldcpp import GeneratePayload
from latimer.schemas.native.llama_server import CompletionPayload
from latimer.schemas.openai.common import SAMPLING_EXTRAS
from support.jobs import run

# They have no effect without another one, which is neutral.
DEPENDENT = {
    "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "smoothing_curve",
}  # fmt: skip

# Values of each extra with an effect, and the extras that it depends on.
ADAPTIVE = {"adaptive_target": 0.2}
DRY = {"dry_multiplier": 5.0}
SPREAD = {"dynatemp_range": 0.9}
MIROSTAT = {"mirostat": 2}
XTC = {"xtc_probability": 1.0}
EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adaptive_decay": (0.1, ADAPTIVE),
    "adaptive_target": (0.2, {}),
    "dry_allowed_length": (0, DRY),
    "dry_base": (1000.0, {"dry_multiplier": 0.01, "dry_allowed_length": 1}),
    "dry_multiplier": (20.0, {}),
    "dry_penalty_last_n": (2, DRY),
    "dry_sequence_breakers": ([" Lisbon"], DRY),
    "dynatemp_exponent": (9.0, SPREAD),
    "dynatemp_range": (0.9, {}),
    "ignore_eos": (True, {}),
    "min_p": (0.5, {}),
    "min_tokens": (60, {}),
    "mirostat": (1, {}),
    "mirostat_eta": (0.9, MIROSTAT),
    "mirostat_tau": (1.0, MIROSTAT),
    "repeat_last_n": (2, {"repeat_penalty": 5.0}),
    "repeat_penalty": (5.0, {}),
    "top_k": (2, {}),
    "top_n_sigma": (0.1, {}),
    "typical_p": (0.5, {}),
    "xtc_probability": (1.0, {}),
    "xtc_threshold": (0.3, XTC),
}


@pytest.fixture(scope="module", params=["llama_cpp", "llama_server"])
async def backend(
    request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]
) -> AsyncIterator[Backend]:
    """A backend of each engine with llama.cpp's samplers."""
    made = make_backend(request.param)
    yield made
    await made.aclose()


def test_requests_have_the_extras_of_each_engine() -> None:
    """Each extra is a field of requests that an engine supports, and each engine's is a field."""
    assert CAPABILITIES.extras | koboldcpp.EXTRAS.keys() | LLAMA_CPP_EXTRAS == SAMPLING_EXTRAS


def test_native_payloads_have_the_extras() -> None:
    """The types of native requests have each extra by the engine's own name."""
    assert CompletionPayload.__annotations__.keys() >= LLAMA_CPP_EXTRAS
    assert GeneratePayload.__annotations__.keys() >= {*koboldcpp.EXTRAS.values()}


def test_koboldcpp_gets_neutral_values() -> None:
    """A koboldcpp's own default of an extra never applies, unless the extra depends on another."""
    own = {native for name, native in koboldcpp.EXTRAS.items() if name not in DEPENDENT}
    assert own - koboldcpp.NEUTRAL.keys() == set(), "in NEUTRAL, or in DEPENDENT of this file"


def test_llama_server_gets_neutral_values() -> None:
    """A llama-server's own default of an extra never applies, unless the extra depends on
    another."""
    missing = LLAMA_CPP_EXTRAS - DEPENDENT - llama_server.NEUTRAL.keys()
    assert missing == set(), "in NEUTRAL, or in DEPENDENT of this file"


def test_random_requests_have_the_extras() -> None:
    """`make fuzz` sends each extra."""
    assert SAMPLING.keys() >= SAMPLING_EXTRAS


@pytest.mark.parametrize("name", sorted(CAPABILITIES.extras))
async def test_every_extra_has_an_effect(backend: Backend, name: str) -> None:
    """Each extra that an engine lists changes what it samples, and repeats its text with a seed."""
    if name not in backend.capabilities.extras:
        assert name in backend.capabilities.refused
        return
    value, others = EFFECTS[name]
    word = await backend.tokenize(" Lisbon", add_special=False, parse_special=False)
    # DRY needs repetitions.
    repeats = name.startswith("dry_")
    sampling = Sampling(logit_bias=((word[0], 12.0),) if repeats else (), extras=others)
    prompt = Prompt(Text(" Lisbon" * 9 if repeats else "One day,"))
    job = Generation(prompt, 40, (3, 4), sampling=sampling)
    plain, _ = await run(backend, job)
    job.sampling = replace(sampling, extras={**others, name: value})
    texts, _ = await run(backend, job)
    assert texts != plain
    assert (await run(backend, job))[0] == texts
