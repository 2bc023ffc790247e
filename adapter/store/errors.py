"""The errors of a store."""

from __future__ import annotations

from ..errors import StoreUnavailable

# The reason for clients when there is no answer within seconds.
LATE = "the database does not answer in time"


class StoreError(Exception):
    """A store that cannot be opened as it is set; the message is one line without secrets."""


class DuplicateItem(Exception):
    """An item whose id is already that of another item of the conversation."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(id)
        self.id = id


class ConversationTooLarge(Exception):
    """A conversation that would be larger than the whole store may be."""


def in_words(error: StoreError | StoreUnavailable) -> str:
    """Return why a store cannot be used, with the message of its database, for its operator."""
    if isinstance(error, StoreError):
        return str(error)
    if error.detail == error.reason:
        return f"{error.reason}."
    return f"{error.reason} ({error.detail})."


__all__ = [
    "LATE",
    "ConversationTooLarge",
    "DuplicateItem",
    "StoreError",
    "StoreUnavailable",
    "in_words",
]
