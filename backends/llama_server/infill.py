"""The model's infill tokens around prefix and suffix, detected with `/infill` (sans-I/O).

`/infill` silently cuts prefix and suffix to a share of the batch (`format_prompt_infill` in
server-common.cpp). So it is called once with short texts, only to detect the tokens.
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
    """The tokens in front of the prefix, the suffix, and the completion that fills the gap."""

    prefix: int
    suffix: int
    middle: int
    suffix_first: bool

    def around(self, prefix: TokenIds, suffix: TokenIds) -> TokenIds:
        """Return the prompt whose completion fills the gap."""
        before, after = (self.prefix, *prefix), (self.suffix, *suffix)
        both = (*after, *before) if self.suffix_first else (*before, *after)
        return (*both, self.middle)


def markers(ids: TokenIds, prefix: TokenIds, suffix: TokenIds) -> InfillTokens:
    """Detect the infill tokens in a prompt that `/infill` made of a known prefix and suffix.

    Raises:
        Unsupported: the tokens are not in the expected places.
    """
    before, after = _last(ids, prefix), _last(ids, suffix)
    if before < 1 or after < 1:
        raise Unsupported("suffix", ENGINE, "It does not show its fill-in-the-middle tokens.")
    return InfillTokens(ids[before - 1], ids[after - 1], ids[-1], after < before)


def _last(ids: TokenIds, part: TokenIds) -> int:
    """Return the last position of a part; -1 if it is missing."""
    size = len(part)
    return next((i for i in range(len(ids) - size, -1, -1) if ids[i : i + size] == part), -1)
