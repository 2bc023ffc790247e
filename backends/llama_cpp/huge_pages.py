"""Weights and saved sequences in huge pages, on Linux.

To decode a token, the processor reads the weights of each layer. If they are in pages of 4 KiB, it
also has to find each of these in the page table (docs/measurements.md#huge-pages). llama.cpp has no
option for larger ones, and Linux has none for a file that is mapped.

numpy asks for huge pages for its own large arrays, which is fast for a sequence that is saved. But
a virtual machine may have given such memory back to its host, who then needs milliseconds for each
page while all sequences wait. Pages of 4 KiB are faster there.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# The advice for `madvise`: to use huge pages at once (Linux 6.1), and to use them soon.
_COLLAPSE, _HUGE_PAGE = 25, 14
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
_MAPS = Path("/proc/self/maps")

# The bytes from which numpy asks for huge pages.
_LARGE = 1 << 22
# The seconds of a byte that are too long: huge pages take 0.1 to 0.2 ms for a MB, or 2 ms if the
# host has to get them, and small ones 0.4 ms.
_SLOW = 1e-9
# The arrays in small pages before huge ones are tried again.
_HOLD = 64

# The first address of a range of memory, and the one after its last.
_Range = tuple[int, int]


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move the memory that is allocated meanwhile to huge pages, as far as the system has them.

    Mapped files stay as they are. So does everything on other systems than Linux, in a container
    that hides the files of Linux, and where the administrator allows no huge pages.
    """
    try:
        size, known = _size(), _allocated()
    except (OSError, ValueError):
        size, known = 0, []
    yield
    if not size:
        return
    for start, end in without(_allocated(), known):
        first, last = -(-start // size) * size, end // size * size
        if first < last and not _advise(first, last, _COLLAPSE):
            _advise(first, last, _HUGE_PAGE)


class StateMemory:
    """Memory for saved sequences, in small pages after one that took long in huge ones."""

    def __init__(self) -> None:
        # The next arrays that are in small pages.
        self._small = 0

    def new(self, size: int) -> NDArray[np.uint8]:
        """Return an array of some bytes that nobody has written."""
        data = np.empty(size, np.uint8)
        if self._small and size >= _LARGE and hasattr(mmap, "MADV_NOHUGEPAGE"):
            start = -(-data.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
            _advise(start, data.ctypes.data + size, mmap.MADV_NOHUGEPAGE)
        return data

    def add(self, size: int, seconds: float) -> None:
        """Count the time in which an array was made and written."""
        if size >= _LARGE:
            is_slow = not self._small and seconds > _SLOW * size
            self._small = _HOLD if is_slow else max(self._small - 1, 0)


def _advise(start: int, end: int, advice: int) -> bool:
    """Give Linux advice on a range of memory; return True on success."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(advise(start, end - start, advice) == 0)


def _size() -> int:
    """Return the bytes of a huge page; 0 if there are to be none."""
    if "[never]" in (_SYSTEM / "enabled").read_text():
        return 0
    return int((_SYSTEM / "hpage_pmd_size").read_text())


def _allocated() -> list[_Range]:
    """Return the ranges of the process's memory that belong to no file."""
    found = []
    # The names of files may be any bytes.
    for line in _MAPS.read_text(errors="replace").splitlines():
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
