"""A core for each worker of pytest-xdist, and for the engines that it starts.

The threads of two engines that share cores wait for each other longer than they compute. OpenMP's
library counts the cores when it is loaded: with fewer cores than threads, these do not wait for
each other in a loop. So this module has to be imported before llama.cpp.
"""

from __future__ import annotations

import os


def _pinned() -> int | None:
    """Pin a worker to a core, and return this one; None for any other process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker or not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    core = cores[int(worker.removeprefix("gw")) % len(cores)]
    os.sched_setaffinity(0, {core})
    return core


PINNED = _pinned()
