"""What llama-server's events must hold before they are used."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..errors import LARGEST, EngineError

ENGINE = "llama-server"


def is_last(event: Any) -> bool:
    """Whether an event is the last one of an answer, as far as it is read here."""
    try:
        return (
            event["stop"] is True
            and type(event["stop_type"]) is str
            and (event["stop_type"] != "word" or type(event["stopping_word"]) is str)
            and type(event["tokens_predicted"]) is int
            and type(event["tokens_evaluated"]) is int
            and 0 <= event["tokens_predicted"] <= LARGEST
            and 0 <= event["tokens_evaluated"] <= LARGEST
            and type(event.get("timings", {}).get("cache_n", 0)) is int
        )
    except (KeyError, TypeError, AttributeError):
        return False


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
