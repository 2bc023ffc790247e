"""A llama.cpp context for embeddings, in addition to the one that generates."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ..base import Pooling
from ..errors import EngineError
from .batch import Batch
from .library import DecodeFailed, LoadedModel, context_params, new_context
from .options import DEFAULT_CONTEXT, Options

# The tokens in a batch of several inputs of a narrow model.
USUAL = 192
# The inputs in one batch. More gain nothing, and pooling takes memory for each.
SEQUENCES = 128
# The same for a model whose state is not a KV cache, but has a fixed size for each input.
RECURRENT = 8
# Bytes of logits in one batch: llama.cpp computes those of all tokens, although nothing needs them.
MAX_LOGITS = 256 * 1024 * 1024
_TYPES: dict[Pooling, int] = {
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
    "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK,
}


def pooling_of(model: LoadedModel, options: Options) -> Pooling:
    """Return the pooling of a model: the option, that of the file, or a default.

    The default of a causal model is `last`, since only its last token has seen all others.

    Raises:
        EngineError: the option needs a reranker, and the model is another one.
    """
    if options.pooling == "rank" and model.pooling != "rank" and not model.has_classifier:
        raise EngineError("The model is not a reranker, so it does not support pooling 'rank'.")
    return options.pooling or model.pooling or ("last" if model.is_causal else "mean")


def _batch_size(model: LoadedModel, options: Options, length: int, most: int) -> int:
    """Return the number of tokens in a batch, which covers the longest input unless it is split.

    Args:
        most: the largest number if inputs may be split; otherwise 0.
    """
    if not most:
        return length if model.is_causal else max(length, options.batch)
    logits = 4 * llama_cpp.llama_vocab_n_tokens(model.vocab)
    size: int = MAX_LOGITS // logits
    return max(min(length, most, size), 1)


class EmbeddingContext:
    """A llama.cpp context that pools the tokens of each input, and its batch.

    Only one thread may use it.

    Attributes:
        length: the largest number of tokens in an input.
        dimensions: the length of a vector; for pooling `rank`, the number of scores.
        splits: True if an input may be split across batches.
        size: the largest number of tokens in a batch.
        usual: the largest number of tokens in a batch of several inputs.
    """

    def __init__(self, model: LoadedModel, options: Options) -> None:
        self.pooling = pooling_of(model, options)
        self.length = min(options.context or DEFAULT_CONTEXT, model.trained_context)
        # Mean and CLS need all tokens of an input at once, as attention in both directions does.
        self.splits = model.is_causal and self.pooling in ("last", "rank")
        # Attention covers all inputs of a batch, so a large batch of a narrow model costs more.
        width: int = llama_cpp.llama_model_n_embd(model.pointer)
        usual = min(max(USUAL, width // 2), options.batch)
        self.size = _batch_size(model, options, self.length, usual if self.splits else 0)
        self.usual = min(usual, self.size)
        # llama.cpp aborts if a batch holds fewer tokens than there are sequences.
        most = SEQUENCES if model.rolls_back else RECURRENT
        self.sequences = 1 if options.exact else min(most, self.size)
        # One input may be evaluated in part, while others have whole batches.
        params = context_params(options, self.length + self.size if self.splits else self.length)
        params.embeddings = True
        if self.splits and options.flash_attention is None and not options.has_quantized_cache:
            # ggml's flash attention on CPUs is less exact for fewer than 64 tokens, so that vectors
            # would depend on the batches of an input.
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.pooling_type = _TYPES[self.pooling]
        params.n_batch = params.n_ubatch = self.size
        params.n_seq_max = self.sequences
        self.pointer = new_context(model, params)
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._run = llama_cpp.llama_decode if model.has_decoder else llama_cpp.llama_encode
        ranks = self.pooling == "rank"
        count = llama_cpp.llama_model_n_cls_out if ranks else llama_cpp.llama_model_n_embd_out
        self.dimensions: int = count(model.pointer)
        self._batch = Batch(self.size)

    @property
    def used(self) -> int:
        """The number of tokens in the batch."""
        return self._batch.used

    def add(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        """Add consecutive tokens of an input to the batch."""
        self._batch.add(sequence, position, tokens, len(tokens))

    def decode(self) -> None:
        """Evaluate the batch and empty it.

        Raises:
            DecodeFailed: llama.cpp failed; the sequences of the batch must be removed.
        """
        batch = self._batch.native
        self._batch.clear()
        status = self._run(self.pointer, batch)
        if status:
            raise DecodeFailed(status)

    def vector(self, sequence: int) -> NDArray[np.float32]:
        """Return a copy of the pooled vector of an input whose last token was just evaluated."""
        pointer = llama_cpp.llama_get_embeddings_seq(self.pointer, sequence)
        return np.ctypeslib.as_array(pointer, shape=(self.dimensions,)).copy()

    def remove(self, sequence: int) -> None:
        """Remove an input; a model without a KV cache keeps none."""
        if self._memory:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        """Remove all inputs, and empty the batch."""
        self._batch.clear()
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Free the context."""
        if self.pointer:
            llama_cpp.llama_free(self.pointer)
            self.pointer = None
