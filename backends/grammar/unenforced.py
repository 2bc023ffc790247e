"""What a grammar cannot make sure of."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import shortened, summed_up


class Unenforced(Exception):
    """A keyword, or a part of a regular expression, that no grammar is made for.

    Args:
        path: where in the schema, keys and indices; empty for a regular expression.
        reason: what it is and what to do instead.
    """

    def __init__(self, reason: str, path: Sequence[str | int] = ()) -> None:
        self.reason = summed_up(reason)
        super().__init__(self.reason)
        self.path = tuple(path)

    @property
    def where(self) -> str:
        """The path in the words of OpenAI's errors: `.properties.age.minimum`, `.anyOf[0]`."""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return shortened("".join(steps))

    @property
    def context(self) -> str:
        """The path in the words of OpenAI's messages: `('properties', 'age')`."""
        return shortened(str(self.path))
