"""A small model of which every other layer has a sliding window, with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from support.gguf_files import copy_vocabulary
from support.mrope import Size

BPE = Path(__file__).parents[1] / "models" / "bpe.gguf"
SMALL = Size(depth=2, context=1024)


def windowed(path: Path, window: int, size: Size = SMALL, uses_it: bool = True) -> Path:
    """Write a Gemma 2 with the vocabulary of `bpe.gguf`.

    Args:
        window: the number of tokens that a layer with a window sees.
        uses_it: False for an EXAONE 4, of which llama.cpp ignores the window of few layers.
    """
    writer = gguf.GGUFWriter(path, "gemma2" if uses_it else "exaone4")
    rng = np.random.default_rng(17)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), np.float32) / np.sqrt(columns)
        writer.add_tensor(name, values.astype(np.float32))

    copy_vocabulary(gguf.GGUFReader(BPE), writer)
    writer.add_context_length(size.context)
    writer.add_embedding_length(size.width)
    writer.add_block_count(size.depth)
    writer.add_feed_forward_length(2 * size.width)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.heads)
    writer.add_key_length(size.head)
    writer.add_value_length(size.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(window)
    matrix("token_embd.weight", len(writer.kv_data[0]["tokenizer.ggml.tokens"].value), size.width)
    writer.add_tensor("output_norm.weight", np.ones(size.width, np.float32))
    for layer in range(size.depth):
        block = f"blk.{layer}."
        norms = ("attn_norm", "ffn_norm") if uses_it else ()
        for name in (*norms, "post_attention_norm", "post_ffw_norm"):
            writer.add_tensor(f"{block}{name}.weight", np.ones(size.width, np.float32))
        for name in () if uses_it else ("attn_q_norm", "attn_k_norm"):
            writer.add_tensor(f"{block}{name}.weight", np.ones(size.head, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{block}{name}.weight", size.width, size.width)
        matrix(block + "ffn_gate.weight", 2 * size.width, size.width)
        matrix(block + "ffn_up.weight", 2 * size.width, size.width)
        matrix(block + "ffn_down.weight", size.width, 2 * size.width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
