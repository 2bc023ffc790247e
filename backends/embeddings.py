"""Vectors of unit length, and names and groups of inputs, shared by the engines."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence

# The deviation from unit length up to which a vector is used unchanged: rounding in 32 bits.
ROUNDING = 1e-6
# Numbers of vectors are larger, except for a few.
TINY = 1e-20


def unit(values: Iterable[float]) -> array[float]:
    """Return a vector of unit length.

    Raises:
        TypeError, ValueError: a value is not a finite number, or all are zero.
    """
    vector = array("f", values)
    length = math.hypot(*vector)
    if not 0 < length < math.inf:
        raise ValueError(f"a vector of length {length}")
    if abs(length - 1) > ROUNDING:
        vector = array("f", [value / length for value in vector])
    return vector


def is_memory(values: Sequence[float | None]) -> bool:
    """Return True for unused memory that an engine sends as a vector: mostly zeros or nulls.

    llama.cpp has one number for a model that ranks. Engines that were not started for that send the
    memory behind it as the rest of a vector.
    """
    return sum(value is None or abs(value) < TINY for value in values) > len(values) / 2


def field_of(index: int, count: int, name: str = "input") -> str:
    """Return the field of one of `count` inputs, for errors; a single input may be a string."""
    return name if count == 1 else f"{name}[{index}]"


def grouped(sizes: Iterable[int], most: int, most_size: int) -> Iterator[range]:
    """Yield the indexes of inputs in consecutive groups.

    Args:
        sizes: the size of each input.
        most: the largest number of inputs in a group.
        most_size: the largest sum of sizes; an input that exceeds it is a group of its own.
    """
    start = end = total = 0
    for size in sizes:
        if end > start and (end - start == most or total + size > most_size):
            yield range(start, end)
            start, total = end, 0
        end, total = end + 1, total + size
    if end > start:
        yield range(start, end)
