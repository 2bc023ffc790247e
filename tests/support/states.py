"""Saved sequences and their files, for tests and for the processes that tests start.

    python -m support.states FOLDER TURNS

The last command writes states and reads them back.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from latimer.backends.llama_cpp.cache import Cache
from latimer.backends.llama_cpp.state_files import StateFiles
from latimer.backends.llama_cpp.states import Checkpoint, State, States

BLOCK = 4
TOKENS = list(range(-3, 20))
# Larger than every file of `state`.
LARGE = 1 << 20
# The bound of a folder that processes share, in bytes, and the number of different states.
SHARED, COUNT = 400_000, 8


def state(owner: str = "", tokens: list[int] = TOKENS, size: int = 100, **more: Any) -> State:
    """Return a state whose bytes differ from those of other tokens."""
    data = np.random.default_rng(abs(sum(tokens))).integers(0, 256, size, np.uint8)
    return State(owner, tokens, data, **more)


def checkpoints(*lengths: int) -> tuple[Checkpoint, ...]:
    """Return checkpoints whose sizes and bytes differ."""
    return tuple(Checkpoint(one, np.full(10 + one, one, np.uint8)) for one in lengths)


def distinct(number: int) -> list[int]:
    """Return tokens that have nothing in common with those of other numbers."""
    return list(range(100 * number, 100 * number + 20))


def cache_of(memory: int = LARGE, cuts: bool = True) -> Cache:
    """Return an empty cache."""
    return Cache(None, 1000, 4, cuts, States(memory, cuts, BLOCK))  # type: ignore[arg-type]


def opened(
    folder: Path, size: int = LARGE, waiting: int = LARGE, model: str = "model", cuts: bool = True
) -> StateFiles:
    """Return the files of a model in a folder."""
    return StateFiles(folder, size, waiting, model, cuts, BLOCK)


def put(files: StateFiles, *states: State) -> None:
    """Write states, one after the other."""
    for one in states:
        files.put(one)
        while files._waiting:
            time.sleep(0.001)


def recalled(files: StateFiles, owner: str = "", tokens: list[int] = TOKENS) -> State | None:
    """Return the state that a prompt gets from disk."""
    cache = cache_of()
    files.recall(cache, owner, [*tokens, 0])
    return cache.states.longest(owner, [*tokens, 0])[0]


def work(folder: Path, turns: int) -> None:
    """Write random states and read them back."""
    files = opened(folder, SHARED)
    print("ready", flush=True)
    for _ in range(turns):
        number = random.randrange(COUNT)
        given = state(tokens=distinct(number), size=50_000 + 10_000 * number)
        put(files, given)
        found = recalled(files, tokens=given.tokens)
        assert found is None or found.data.tobytes() == given.data.tobytes()
    assert not files._has_failed


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
