"""A small model of which every other layer has a sliding window, with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from support.gguf_files import copy_vocabulary

BPE = Path(__file__).parents[1] / "models" / "bpe.gguf"
WIDTH, HEADS, DEPTH, INNER, CONTEXT = 64, 4, 2, 128, 1024
HEAD = WIDTH // HEADS


def windowed(path: Path, window: int) -> Path:
    """Write a Gemma 2 with the vocabulary of `bpe.gguf`.

    Args:
        window: the number of tokens that a layer with a window sees.
    """
    writer = gguf.GGUFWriter(path, "gemma2")
    rng = np.random.default_rng(17)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), np.float32) / np.sqrt(columns)
        writer.add_tensor(name, values.astype(np.float32))

    copy_vocabulary(gguf.GGUFReader(BPE), writer)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(DEPTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(window)
    matrix("token_embd.weight", len(writer.kv_data[0]["tokenizer.ggml.tokens"].value), WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(DEPTH):
        block = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            writer.add_tensor(f"{block}{name}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{block}{name}.weight", WIDTH, WIDTH)
        matrix(block + "ffn_gate.weight", INNER, WIDTH)
        matrix(block + "ffn_up.weight", INNER, WIDTH)
        matrix(block + "ffn_down.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
