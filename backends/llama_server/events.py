"""Validation of llama-server's events before they are used."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..errors import LARGEST, EngineError

ENGINE = "llama-server"


def last_of(event: Any) -> tuple[str, str | None, int, int, int]:
    """Read the last event of an answer.

    Returns:
        The `stop_type`, the stop sequence or None, and the numbers of generated tokens, of prompt
        tokens, and of prompt tokens from the cache.

    Raises:
        EngineError: the event is malformed.
    """
    try:
        kind, predicted, read = (
            event["stop_type"],
            event["tokens_predicted"],
            event["tokens_evaluated"],
        )
        word = event["stopping_word"] if kind == "word" else None
        cached = event["timings"]["cache_n"] if "timings" in event else 0
        is_last = (
            event["stop"] is True
            and type(kind) is str
            and (kind != "word" or type(word) is str)
            and type(predicted) is type(read) is type(cached) is int
            and 0 <= predicted <= LARGEST
            and 0 <= read <= LARGEST
        )
    except (KeyError, TypeError):
        is_last = False
    if not is_last:
        raise none_of(event)
    return kind, word, predicted, read, cached


def none_of(event: Any) -> EngineError:
    """Return the error for a malformed event."""
    return EngineError(f"{ENGINE} sent an invalid event: {str(event)[:200]}")


def more_than_last() -> EngineError:
    """Return the error for an event after the last one."""
    return EngineError(f"{ENGINE} sent data after its last event.")


class OtherModel(Exception):
    """A response from another model, called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def check_model(reply: Mapping[str, Any], names: Container[str]) -> None:
    """Raise `OtherModel` if a response names a model that is not in `names`."""
    name = reply.get("model")
    if name is not None and name not in names:
        raise OtherModel(str(name)[:200])
