"""The sizes of random samples: small ones for each run of the tests, large ones for releases."""

from __future__ import annotations

import os

# Set by `make test-full`.
FULL = os.environ.get("LATIMER_FULL") == "1"
# Published templates with the format of another one; only a full run has them in its slow tests.
ALIKE = frozenset({
    "Kimi-K2-Instruct", "LFM2-8B-A1B", "LFM2.5-Instruct", "google-gemma-4-31B-it-interleaved",
    "ibm-granite-granite-4.0",
})  # fmt: skip


def sample(usual: int, full: int) -> int:
    """Return the size of a sample in this run.

    Args:
        usual: the size in `make test`.
        full: the size in `make test-full`.
    """
    return full if FULL else usual
