"""The token counts of a response."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from ...backends.base import Finish
from ...schemas.openai.common import CompletionTokensDetails, Usage

_PROMPT, _COMPLETION = attrgetter("prompt_tokens"), attrgetter("completion_tokens")
_CACHED = attrgetter("cached_tokens")

_NO_DETAILS: CompletionTokensDetails = {
    "reasoning_tokens": 0,
    "audio_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}


def usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Return the token counts of all choices; each prompt counts once (contract 2.2)."""
    prompt = sum(map(_PROMPT, finishes[::choices_per_prompt]))
    completion = sum(map(_COMPLETION, finishes))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def detailed_usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Return the token counts with the details of chat responses (contract 3.3)."""
    cached = sum(map(_CACHED, finishes[::choices_per_prompt]))
    return {
        **usage_of(finishes, choices_per_prompt),
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": 0,
            "audio_tokens": 0,
        },
        "completion_tokens_details": _NO_DETAILS,
    }
