"""The error for constraints that a grammar cannot enforce."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import shortened, summed_up


class Unenforced(Exception):
    """A schema keyword or a part of a regular expression that a grammar cannot enforce.

    Args:
        path: the place in the schema, as keys and indices; empty for a regular expression.
        reason: the constraint, and an alternative.
    """

    def __init__(self, reason: str, path: Sequence[str | int] = ()) -> None:
        self.reason = summed_up(reason)
        super().__init__(self.reason)
        self.path = tuple(path)

    @property
    def where(self) -> str:
        """The path in the form of OpenAI's errors: `.properties.age.minimum`, `.anyOf[0]`."""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return shortened("".join(steps))

    @property
    def context(self) -> str:
        """The path in the form of OpenAI's error messages: `('properties', 'age')`."""
        return shortened(str(self.path))
