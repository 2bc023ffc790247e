"""Images and audio in process, with llama.cpp's mtmd (tools/mtmd/mtmd.h).

mtmd turns a file into text tokens and chunks of embeddings. In a sequence each embedding takes the
place of a token. Its id is negative and is derived from the file's hash, so that a later prompt
with the same file can reuse the sequence.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import mtmd_cpp as mtmd

from ..base import Media, MediaKind
from ..errors import EngineError, UnreadableMedia
from .library import (
    Calls,
    Context,
    DecodeFailed,
    LoadedModel,
    flash_attention,
    keep_errors,
    last_error,
)
from .options import Options

_NAMES: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}


class Chunk:
    """Embeddings that are evaluated together.

    Args:
        ids: the negative ids of the embeddings in a sequence.
        positions: the number of positions that they take in a sequence.
    """

    def __init__(self, pointer: Any, ids: Sequence[int], positions: int, owner: object) -> None:
        self.pointer = pointer
        self.ids = tuple(ids)
        self.positions = positions
        # mtmd's list of chunks, which must live as long as any of its chunks.
        self._owner = owner


class _Chunks:
    """mtmd's list of the chunks of one file."""

    def __init__(self) -> None:
        self.pointer = mtmd.mtmd_input_chunks_init()

    def __del__(self) -> None:
        mtmd.mtmd_input_chunks_free(self.pointer)


class Projector:
    """A multimodal projector, which turns files into embeddings for a model.

    `read` may be called from any thread, `evaluate` only from the context's thread.

    Raises:
        EngineError: the file is not a projector for this model, or the model is a HunyuanVL.
    """

    def __init__(self, path: Path, model: LoadedModel, options: Options) -> None:
        if not path.is_file():
            raise EngineError(f"There is no projector at {path}.")
        self._calls = Calls()
        mtmd.mtmd_log_set(keep_errors, None)
        mtmd.mtmd_helper_log_set(keep_errors, None)
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = options.gpu_layers != 0
        params.n_threads = options.threads
        params.flash_attn_type = flash_attention(options)
        params.print_timings = False
        params.warmup = False
        self._pointer = mtmd.mtmd_init_from_file(str(path).encode(), model.pointer, params)
        if not self._pointer:
            raise EngineError(f"llama.cpp cannot use {path} with this model: {last_error()}")
        self._batch = options.batch
        self._marker = mtmd.mtmd_default_marker()
        if model.architecture == "hunyuan_vl" and mtmd.mtmd_decode_use_mrope(self._pointer):
            self.close()
            raise EngineError(
                "This model's image positions depend on the images before them, which the "
                "in-process engine does not support. Serve it with llama-server and put Latimer "
                "in front."
            )
        supports = {
            "vision": mtmd.mtmd_support_vision(self._pointer),
            "audio": mtmd.mtmd_support_audio(self._pointer),
        }
        self.kinds = frozenset(kind for name, kind in _NAMES.items() if supports[name])

    def read(self, media: Media) -> list[int | Chunk]:
        """Return the tokens and chunks of embeddings that a file adds to a prompt.

        Raises:
            UnreadableMedia: the file cannot be read.
            EngineError: a chunk does not fit into a batch, or the engine was shut down.
        """
        with self._calls.counted():
            return self._read(media)

    def _read(self, media: Media) -> list[int | Chunk]:
        data = media.data
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._pointer, buffer, len(data), False)
        if not bitmap:
            raise UnreadableMedia(media.param)
        chunks = _Chunks()
        try:
            text = mtmd.mtmd_input_text(self._marker, len(self._marker), False, True)
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            status = mtmd.mtmd_tokenize(
                self._pointer, chunks.pointer, ctypes.byref(text), bitmaps, 1
            )
        finally:
            mtmd.mtmd_bitmap_free(bitmap)
        if status:
            raise UnreadableMedia(media.param)
        return self._parts(chunks, int.from_bytes(hashlib.sha256(data).digest()[:5], "big") << 20)

    def evaluate(self, context: Context, chunk: Chunk, sequence: int, position: int) -> None:
        """Encode a chunk and add it to a sequence.

        Raises:
            DecodeFailed: llama.cpp failed.
        """
        after = llama_cpp.llama_pos(0)
        status = mtmd.mtmd_helper_eval_chunk_single(
            self._pointer, context.pointer, chunk.pointer, position, sequence, self._batch, False,
            ctypes.byref(after),
        )  # fmt: skip
        if status:
            raise DecodeFailed(status)

    def close(self) -> None:
        """Free the weights, after the calls of `read`."""
        self._calls.close()
        mtmd.mtmd_free(self._pointer)

    def _parts(self, chunks: _Chunks, number: int) -> list[int | Chunk]:
        parts: list[int | Chunk] = []
        for index in range(mtmd.mtmd_input_chunks_size(chunks.pointer)):
            pointer = mtmd.mtmd_input_chunks_get(chunks.pointer, index)
            count = mtmd.mtmd_input_chunk_get_n_tokens(pointer)
            if mtmd.mtmd_input_chunk_get_type(pointer) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                size = ctypes.c_size_t(0)
                tokens = mtmd.mtmd_input_chunk_get_tokens_text(pointer, ctypes.byref(size))
                parts += tokens[: size.value]
                continue
            if mtmd.mtmd_decode_use_non_causal(self._pointer, pointer) and count > self._batch:
                raise EngineError(
                    f"An image has {count} tokens, but the batch size is {self._batch}. Set the "
                    f"batch size to at least {count}."
                )
            # Every id is unique, within its chunk and across chunks.
            first = -1 - number
            number += count
            positions = mtmd.mtmd_input_chunk_get_n_pos(pointer)
            parts.append(Chunk(pointer, range(first, first - count, -1), positions, chunks))
        return parts
