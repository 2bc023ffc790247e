"""Tests that a sampling parameter is in every table that needs it."""

from __future__ import annotations

from chaos.bodies import SAMPLING
from latimer.backends.base import LLAMA_CPP_EXTRAS
from latimer.backends.koboldcpp import translate as koboldcpp
from latimer.backends.llama_cpp.backend import CAPABILITIES
from latimer.schemas.native.koboldcpp import GeneratePayload
from latimer.schemas.native.llama_server import CompletionPayload
from latimer.schemas.openai.common import SAMPLING_EXTRAS

# They have no effect without another one, which is neutral.
DEPENDENT = {
    "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "smoothing_curve",
}  # fmt: skip


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
    assert koboldcpp.NEUTRAL.keys() >= own


def test_random_requests_have_the_extras() -> None:
    """`make fuzz` sends each extra."""
    assert SAMPLING.keys() >= SAMPLING_EXTRAS
