"""Token counts of a reply."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends.base import Finish
from ...schemas.openai.common import CompletionTokensDetails, Usage

_NO_DETAILS: CompletionTokensDetails = {
    "reasoning_tokens": 0,
    "audio_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}


def usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Token counts over all choices; each prompt counts once (contract 2.2)."""
    firsts = finishes[::choices_per_prompt]
    prompt = sum([finish.prompt_tokens for finish in firsts])
    completion = sum([finish.completion_tokens for finish in finishes])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def detailed_usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """The same with the details that chat replies carry (contract 3.3)."""
    cached = sum([finish.cached_tokens for finish in finishes[::choices_per_prompt]])
    return {
        **usage_of(finishes, choices_per_prompt),
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": _NO_DETAILS,
    }
