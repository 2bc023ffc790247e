"""What llama-server's events must hold before they are used."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..errors import LARGEST, EngineError

ENGINE = "llama-server"


def last_of(event: Any) -> tuple[str, str | None, int, int, int]:
    """The last event of an answer, as far as it is read here.

    Returns:
        Its `stop_type` and the stop string, if one ended it; the numbers of tokens that were
        generated, that the prompt has, and that of those came from the cache.

    Raises:
        EngineError: it is not what the server sends.
    """
    try:
        kind, told, read = event["stop_type"], event["tokens_predicted"], event["tokens_evaluated"]
        word = event["stopping_word"] if kind == "word" else None
        cached = event["timings"]["cache_n"] if "timings" in event else 0
        is_last = (
            event["stop"] is True
            and type(kind) is str
            and (kind != "word" or type(word) is str)
            and type(told) is type(read) is type(cached) is int
            and 0 <= told <= LARGEST
            and 0 <= read <= LARGEST
        )
    except (KeyError, TypeError):
        is_last = False
    if not is_last:
        raise none_of(event)
    return kind, word, told, read, cached


def none_of(event: Any) -> EngineError:
    """The error for an event that the server does not send."""
    return EngineError(f"{ENGINE} sent an event that is none: {str(event)[:200]}")


def more_than_last() -> EngineError:
    """The error for what comes behind a last event."""
    return EngineError(f"{ENGINE} sent more after its last event.")


class OtherModel(Exception):
    """An answer says that it is another model's; `name` is what it calls that."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def check_model(reply: Mapping[str, Any], names: Container[str]) -> None:
    """Raise `OtherModel` where an answer names a model that is none of `names`."""
    name = reply.get("model")
    if name is not None and name not in names:
        raise OtherModel(str(name)[:200])
