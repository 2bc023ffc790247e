"""How a model wants a gap's prefix and suffix marked, read off what `/infill` makes (sans-I/O).

`/infill` itself cuts both to a share of the batch without a word (`format_prompt_infill` in
server-common.cpp), so it is only asked how it would begin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import TokenIds
from ..errors import Unsupported
from .events import ENGINE

TEXTS = ("7", "3")
PROBE: dict[str, Any] = {
    "input_prefix": TEXTS[0],
    "input_suffix": TEXTS[1],
    "n_predict": 1,
    "stream": False,
}


class InfillTokens(NamedTuple):
    """The tokens in front of the prefix, of the suffix, and of what fills the gap."""

    prefix: int
    suffix: int
    middle: int
    suffix_first: bool

    def around(self, prefix: TokenIds, suffix: TokenIds) -> TokenIds:
        """The prompt whose completion fills the gap."""
        before, after = (self.prefix, *prefix), (self.suffix, *suffix)
        both = (*after, *before) if self.suffix_first else (*before, *after)
        return (*both, self.middle)


def markers(ids: TokenIds, prefix: TokenIds, suffix: TokenIds) -> InfillTokens:
    """Read the markers off a prompt that `/infill` made of a known prefix and suffix.

    Raises:
        Unsupported: they are not where they should be.
    """
    before, after = _last(ids, prefix), _last(ids, suffix)
    if before < 1 or after < 1:
        raise Unsupported("suffix", ENGINE, "It does not show how it marks the gap.")
    return InfillTokens(ids[before - 1], ids[after - 1], ids[-1], after < before)


def _last(ids: TokenIds, part: TokenIds) -> int:
    """Where a part stands last; -1 where it does not."""
    size = len(part)
    return next((i for i in range(len(ids) - size, -1, -1) if ids[i : i + size] == part), -1)
