"""The ctypes edge: loading, decoding, memory. Everything that would abort the process is checked.

A failed GGML_ASSERT ends the process, so ids, positions, and batch sizes are validated before
llama.cpp sees them (`llama_batch_allocr::init` in src/llama-batch.cpp lists what it refuses).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError

_START = threading.Lock()
_messages: list[str] = []
_started = False


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _data: object) -> None:
    # GGML_LOG_LEVEL_ERROR is 4; the rest would fill the user's terminal.
    if level == 4:
        _messages.append(text.decode(errors="replace").strip())
        del _messages[:-20]


@dataclass(frozen=True, slots=True)
class Settings:
    """How large a context is, and how it computes.

    Args:
        context: cells of memory: tokens of all sequences together.
        sequences: how many are remembered side by side.
        batch: the most tokens that one decode takes.
        threads: CPU threads.
        exact: compute so that results hardly depend on what is evaluated together: no flash
            attention, 32-bit memory.
    """

    context: int
    sequences: int
    batch: int
    threads: int
    exact: bool = False


# Logits of a whole batch would take gigabytes with a large vocabulary.
MAX_LOGITS = 64 * 1024 * 1024


def start() -> None:
    """Initialise llama.cpp once for the process, and keep it from writing to the terminal."""
    global _started
    with _START:
        if not _started:
            llama_cpp.llama_log_set(_keep_errors, None)
            llama_cpp.llama_backend_init()
            _started = True


class LoadedModel:
    """A model's weights and vocabulary, as llama.cpp's pointers.

    Raises:
        EngineError: the file is missing, is no GGUF, or is of a kind that does not generate text.
    """

    def __init__(
        self, path: Path, gpu_layers: int, progress: Callable[[float], None] | None = None
    ) -> None:
        if not path.is_file():
            raise EngineError(f"There is no model at {path}.")
        start()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers

        @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
        def report(fraction: float, _data: object) -> bool:
            if progress is not None:
                progress(fraction)
            return True

        params.progress_callback = report
        _messages.clear()
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise EngineError(f"llama.cpp cannot load {path}: {_last_error()}")
        if llama_cpp.llama_model_has_encoder(self.pointer):
            self.close()
            raise EngineError(f"{path} is an encoder model; only decoders generate text here.")
        self.vocab = llama_cpp.llama_model_get_vocab(self.pointer)
        self.trained_context: int = llama_cpp.llama_model_n_ctx_train(self.pointer)
        recurrent = llama_cpp.llama_model_is_recurrent(self.pointer)
        # A state that was moved on cannot be moved back.
        self.rolls_back: bool = not (recurrent or llama_cpp.llama_model_is_hybrid(self.pointer))

    def template(self) -> str | None:
        """The chat template, None where the file has none."""
        template = llama_cpp.llama_model_chat_template(self.pointer, None)
        return template.decode(errors="replace") if template else None

    def describe(self) -> str:
        """Architecture, size and quantisation, in one line."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def close(self) -> None:
        """Free the weights; contexts must be closed before."""
        if self.pointer:
            llama_cpp.llama_model_free(self.pointer)
            self.pointer = None


class Rows(NamedTuple):
    """Where tokens stand in a batch.

    Args:
        last: the row of the last one, for `Sampler.sample`.
        output: the first that has logits, counted among all that have, for `Context.logits`.
    """

    last: int
    output: int


class DecodeFailed(Exception):
    """`llama_decode` returned something else than zero."""

    def __init__(self, status: int) -> None:
        super().__init__(f"llama_decode returned {status}: {_last_error()}")


class Context:
    """A model's working memory, and one batch that is filled anew for each decode.

    Belongs to one thread.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.context
        params.n_batch = settings.batch
        params.n_ubatch = settings.batch
        params.n_seq_max = settings.sequences
        params.n_threads = settings.threads
        params.n_threads_batch = settings.threads
        params.kv_unified = True
        params.no_perf = True
        if settings.exact:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(model.vocab)
        most = max(MAX_LOGITS // (4 * self._vocabulary), settings.sequences)
        self._max_outputs = params.n_outputs_max = min(most, settings.batch)
        _messages.clear()
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise EngineError(f"llama.cpp cannot make a context: {_last_error()}")
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._size = settings.batch
        self._token = np.zeros(settings.batch, np.int32)
        self._position = np.zeros(settings.batch, np.int32)
        self._sequence = np.zeros(settings.batch, np.int32)
        self._logits = np.zeros(settings.batch, np.int8)
        ones = np.ones(settings.batch, np.int32)
        # Each token's list of sequences has one entry: a pointer to its own element.
        pointers = (
            self._sequence.ctypes.data + np.arange(settings.batch, dtype=np.uint64) * 4
        ).astype(np.uint64)
        self._keep: list[NDArray[np.generic]] = [ones, pointers]
        self._batch = llama_cpp.llama_batch(
            0,
            _pointer(self._token, ctypes.c_int32),
            None,
            _pointer(self._position, ctypes.c_int32),
            _pointer(ones, ctypes.c_int32),
            ctypes.cast(pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            _pointer(self._logits, ctypes.c_int8),
        )
        self.used = 0
        self.outputs = self._decoded = 0

    @property
    def room(self) -> int:
        """How many tokens the batch still takes."""
        return self._size - self.used

    @property
    def output_room(self) -> int:
        """How many tokens of the batch may still have logits."""
        room: int = self._max_outputs - self.outputs
        return room

    def add(self, sequence: int, position: int, tokens: Sequence[int], outputs: int) -> Rows:
        """Put consecutive tokens of a sequence into the batch; the last `outputs` have logits."""
        start, end = self.used, self.used + len(tokens)
        if not start < end <= self._size:
            raise ValueError(f"{len(tokens)} tokens do not fit into a batch with {self.room} left")
        self._token[start:end] = tokens
        self._position[start:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self._sequence[start:end] = sequence
        self._logits[start:end] = 0
        self._logits[end - outputs : end] = 1
        rows = Rows(end - 1, self.outputs)
        self.used = end
        self.outputs += outputs
        return rows

    def decode(self) -> None:
        """Evaluate the batch and empty it.

        Raises:
            DecodeFailed: llama.cpp could not; sequences of the batch must be removed.
        """
        self._batch.n_tokens = self.used
        self._decoded = self.outputs
        self.clear()
        status = llama_cpp.llama_decode(self.pointer, self._batch)
        if status:
            raise DecodeFailed(status)

    def clear(self) -> None:
        """Empty the batch."""
        self.used = self.outputs = 0

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """Logits of the last decode, shape (count, vocabulary); valid until the next one."""
        if not 0 <= start < start + count <= self._decoded:
            raise ValueError(f"rows {start} to {start + count} of {self._decoded} with logits")
        pointer = llama_cpp.llama_get_logits(self.pointer)
        rows = np.ctypeslib.as_array(pointer, shape=(self._decoded, self._vocabulary))
        return rows[start : start + count]

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits after one row of the last decode, shape (vocabulary,); it must have some."""
        pointer = llama_cpp.llama_get_logits_ith(self.pointer, index)
        return np.ctypeslib.as_array(pointer, shape=(self._vocabulary,))

    def remove(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence from a position on.

        A whole one can be removed from every kind of memory, a part only where the model rolls
        back (`LoadedModel.rolls_back`).
        """
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, start or -1, -1):
            raise ValueError(f"sequence {sequence} cannot be cut at {start}")

    def copy(self, source: int, target: int, end: int) -> None:
        """Let a sequence that is empty begin as another does, up to a position."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, end)

    def close(self) -> None:
        """Free the memory."""
        if self.pointer:
            llama_cpp.llama_free(self.pointer)
            self.pointer = None


def _pointer(array: NDArray[np.generic], kind: type) -> object:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def _last_error() -> str:
    return _messages[-1] if _messages else "no reason given"
