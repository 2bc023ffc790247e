"""A model's reference log-probabilities: one plain `llama_decode`, and float64 arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
from latimer.backends.llama_cpp.library import start
from latimer.backends.llama_cpp.options import default_threads
from numpy.typing import NDArray


class Reference:
    """A model that evaluates a text in one batch, with no flash attention and an F32 KV cache."""

    def __init__(self, path: Path, context: int) -> None:
        start()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, path
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        settings.n_threads = settings.n_threads_batch = default_threads()
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        assert self._context, path

    def distributions(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Return log-probabilities of shape (tokens, vocabulary): row i predicts token i + 1."""
        count = len(ids)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        try:
            for at, token in enumerate(ids):
                batch.token[at] = token
                batch.pos[at] = at
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = 0
                batch.logits[at] = 1
            batch.n_tokens = count
            assert llama_cpp.llama_decode(self._context, batch) == 0
            pointer = ctypes.cast(
                llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float)
            )
            logits = np.ctypeslib.as_array(pointer, shape=(count, self._vocabulary))
            wide = logits.astype(np.float64)
        finally:
            llama_cpp.llama_batch_free(batch)
        wide -= wide.max(axis=1, keepdims=True)
        result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        return result

    def scores(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, given those before it."""
        rows = self.distributions(ids)[:-1]
        return [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]

    def close(self) -> None:
        """Free the model and the context."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


@contextmanager
def reference(path: Path, context: int = 512) -> Iterator[Reference]:
    """Return a model's reference, which is freed at the end."""
    made = Reference(path, context)
    try:
        yield made
    finally:
        made.close()
