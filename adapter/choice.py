"""One choice's events to its text and its finish reason (sans-I/O)."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.base import Finish
from ..backends.errors import EngineError
from ..schemas.openai.common import CompletionTokensDetails, FinishReason, Usage
from .text import TextAssembler


class Choice:
    """Folds a choice's events; streamed replies send each result, plain ones join them."""

    __slots__ = ("_assembler", "_stops", "finish")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._assembler = TextAssembler(stops)
        self.finish: Finish | None = None

    def feed(self, data: bytes) -> str:
        """Text that the client may see now; empty while all of it is held back."""
        return self._assembler.feed(data)

    def end(self, event: Finish) -> tuple[str, FinishReason]:
        """The rest of the text, and why it ended; a stop string wins over a limit.

        Raises:
            EngineError: the engine stopped at a string that nobody asked for.
        """
        self.finish = event
        if self._assembler.stop is not None:
            return "", "stop"
        if event.reason == "stop" and event.stop not in self._stops:
            raise EngineError(
                f"The engine stopped at {event.stop!r}, which the request does not name: is a "
                "reverse prompt set on the server?"
            )
        rest = self._assembler.flush()
        return rest, "length" if event.reason == "length" else "stop"


def usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Token counts over all choices; each prompt counts once (contract 2.2)."""
    firsts = finishes[::choices_per_prompt]
    prompt = sum(finish.prompt_tokens for finish in firsts)
    completion = sum(finish.completion_tokens for finish in finishes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def detailed_usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """The same with the details that chat replies carry (contract 3.3)."""
    cached = sum(finish.cached_tokens for finish in finishes[::choices_per_prompt])
    return {
        **usage_of(finishes, choices_per_prompt),
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": _NO_DETAILS,
    }


_NO_DETAILS: CompletionTokensDetails = {
    "reasoning_tokens": 0,
    "audio_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}
