"""Weights in huge pages, on Linux.

To decode one token, the processor reads all weights. If they are in pages of 4 KiB, it also has to
find each of these in the page table. In pages of 2 MiB, a model generates 2 to 5 % faster
(docs/performance.md). llama.cpp has no option for them, and Linux has none for a mapped file.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_SIZE = 2 * 1024 * 1024
# The advice for `madvise`: to use huge pages at once (Linux 6.1), and to use them soon.
_COLLAPSE, _HUGE_PAGE = 25, 14
# Weights that are not mapped stay in memory, and no other process shares them. So they may take
# this part of what is available.
_PART = 4

_SUPPORT = Path("/sys/kernel/mm/transparent_hugepage")
_PROCESS = Path("/proc/self")
_MEMORY = Path("/proc/meminfo")
# The limits of control groups, in versions 2 and 1: the controller in `/proc/self/cgroup`, the
# folder of its groups, and the file of a group.
_LIMITS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}

# The first address of a range of memory, and the one after its last.
_Range = tuple[int, int]


def are_for(size: int) -> bool:
    """Return True if weights of so many bytes should be in huge pages.

    The system must have them, and four times the memory: it must be available, and allowed to the
    groups of the process.
    """
    if sys.platform != "linux" or not _SUPPORT.is_dir():
        return False
    try:
        return size * _PART <= min(_available(), *_limits())
    except (OSError, ValueError):
        # A container can hide these files.
        return False


def _available() -> int:
    for line in _MEMORY.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _limits() -> Iterator[float]:
    """Yield the limits of the process's control groups, and of those around them."""
    yield float("inf")
    for line in (_PROCESS / "cgroup").read_text().splitlines():
        _, controller, path = line.split(":", 2)
        if controller not in _LIMITS:
            continue
        root, name = _LIMITS[controller]
        group = root / path.strip("/")
        for place in (group, *group.parents):
            limit = place / name
            if place.is_relative_to(root) and limit.is_file():
                yield float(limit.read_text().replace("max", "inf"))


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move the memory that is allocated meanwhile to huge pages, as far as the system has them.

    Memory of a mapped file stays as it is.
    """
    if not (_PROCESS / "maps").is_file():
        # It is not Linux, or a container hides the file.
        yield
        return
    known = _allocated()
    yield
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start, end in without(_allocated(), known):
        first, last = -(-start // _SIZE) * _SIZE, end // _SIZE * _SIZE
        if first < last and advise(first, last - first, _COLLAPSE):
            advise(first, last - first, _HUGE_PAGE)


def _allocated() -> list[_Range]:
    """Return the ranges of the process's memory that belong to no file."""
    found = []
    for line in (_PROCESS / "maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and not name:
            start, _, end = place.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def without(ranges: Sequence[_Range], known: Sequence[_Range]) -> Iterator[_Range]:
    """Yield what is in the ranges, but not in others; both are in the order of addresses.

    Linux joins neighbours, so a new range can contain known ones.
    """
    for start, end in ranges:
        for first, last in known:
            if first < end and last > start:
                if first > start:
                    yield start, first
                start = last
        if start < end:
            yield start, end
