"""The sizes of random samples: small ones for each run of the tests, large ones for releases."""

from __future__ import annotations

import os

# Set by `make test-full`.
FULL = os.environ.get("LATIMER_FULL") == "1"


def sample(usual: int, full: int) -> int:
    """Return the size of a sample in this run.

    Args:
        usual: the size in `make test`.
        full: the size in `make test-full`.
    """
    return full if FULL else usual
