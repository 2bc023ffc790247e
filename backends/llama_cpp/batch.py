"""A batch of tokens for `llama_decode`, in arrays that are refilled for each decode."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray


class Batch:
    """A batch of at most `size` tokens; `native` is llama.cpp's view of its arrays."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._token = np.zeros(size, np.int32)
        self._position = np.zeros(size, np.int32)
        self._sequence = np.zeros(size, np.int32)
        self._output = np.zeros(size, np.int8)
        ones = np.ones(size, np.int32)
        # Each token's list of sequences has one entry: a pointer to its own element.
        pointers = (self._sequence.ctypes.data + np.arange(size, dtype=np.uint64) * 4).astype(
            np.uint64
        )
        self._keep: list[NDArray[np.generic]] = [ones, pointers]
        self._native = llama_cpp.llama_batch(
            0,
            as_pointer(self._token, ctypes.c_int32),
            None,
            as_pointer(self._position, ctypes.c_int32),
            as_pointer(ones, ctypes.c_int32),
            ctypes.cast(pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            as_pointer(self._output, ctypes.c_int8),
        )
        self.used = 0

    @property
    def native(self) -> Any:
        """The `llama_batch` with the tokens that have been added."""
        self._native.n_tokens = self.used
        return self._native

    @property
    def room(self) -> int:
        """The number of tokens that still fit."""
        return self._size - self.used

    def add(self, sequence: int, position: int, tokens: Sequence[int], outputs: int) -> None:
        """Add consecutive tokens of a sequence; the last `outputs` are outputs."""
        start, end = self.used, self.used + len(tokens)
        if not start < end <= self._size:
            raise ValueError(f"{len(tokens)} tokens do not fit into a batch with {self.room} left")
        self._token[start:end] = tokens
        self._position[start:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self._sequence[start:end] = sequence
        self._output[start:end] = 0
        self._output[end - outputs : end] = 1
        self.used = end

    def clear(self) -> None:
        """Remove all tokens."""
        self.used = 0


def as_pointer(array: NDArray[np.generic], kind: type) -> object:
    """Return an array's data as a pointer to elements of a C type."""
    return array.ctypes.data_as(ctypes.POINTER(kind))
