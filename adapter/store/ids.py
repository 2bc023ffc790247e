"""Ids that contain the time of their creation.

An id therefore has its place in a list, even after its object was deleted. A client that deletes
objects while it lists them continues at the right place.
"""

from __future__ import annotations

import random
import re
import time

# Hexadecimal digits of the time in microseconds, and of the random number after it at least.
_TIME, _RANDOM = 14, 10
_ID = re.compile(rf"[a-z]+[-_]([0-9a-f]{{{_TIME}}})[0-9a-f]{{{_RANDOM},}}")


def new_id(prefix: str, digits: int = _RANDOM) -> tuple[str, int]:
    """Return a new id, and the time that it contains, in microseconds since 1970.

    Args:
        digits: the number of random hexadecimal digits.
    """
    now = time.time_ns() // 1_000
    return f"{prefix}{now:0{_TIME}x}{random.getrandbits(4 * digits):0{digits}x}", now


def time_of(id: str) -> int | None:  # noqa: A002
    """Return the time that an id contains, in microseconds since 1970; None if it has none."""
    match = _ID.fullmatch(id)
    return None if match is None else int(match[1], 16)
