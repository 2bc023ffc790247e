"""A small DeepSeek V4, whose layers attend to compressed tokens, with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from support.gguf_files import copy_vocabulary

BPE = Path(__file__).parents[1] / "models" / "bpe.gguf"
# Tokens that a layer compresses to one; 0 for a layer with a window alone.
RATIOS = (0, 4, 128)
WIDTH, HEADS, HEAD, RANK, GROUPS, STREAMS, EXPERTS, INNER, INDEXER = 64, 2, 64, 32, 2, 4, 4, 32, 64
MIXES = (2 + STREAMS) * STREAMS
COUNTS = {
    "context_length": 4096,
    "embedding_length": WIDTH,
    "block_count": len(RATIOS),
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": 32,
    "attention.sliding_window": 32,
    "attention.q_lora_rank": RANK,
    "attention.indexer.head_count": HEADS,
    "attention.indexer.key_length": INDEXER,
    "attention.indexer.top_k": 64,
    "attention.output_group_count": GROUPS,
    "attention.output_lora_rank": RANK // 2,
    "hyper_connection.count": STREAMS,
    "hyper_connection.sinkhorn_iterations": 4,
    "hash_layer_count": 0,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": INNER,
    "expert_shared_count": 1,
    "expert_gating_func": 4,
}
NUMBERS = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.compress_rope_freq_base": 10_000.0,
    "rope.freq_base": 10_000.0,
    "hyper_connection.epsilon": 1e-6,
    "expert_weights_scale": 1.0,
}
LAYER = {
    "attn_norm.weight": (WIDTH,),
    "attn_sinks.weight": (HEADS,),
    "attn_q_a.weight": (RANK, WIDTH),
    "attn_q_a_norm.weight": (RANK,),
    "attn_q_b.weight": (HEADS * HEAD, RANK),
    "attn_kv.weight": (HEAD, WIDTH),
    "attn_kv_a_norm.weight": (HEAD,),
    "attn_output_a.weight": (GROUPS, RANK // 2, HEADS * HEAD // GROUPS),
    "attn_output_b.weight": (WIDTH, GROUPS * RANK // 2),
    "hc_attn_fn.weight": (MIXES, STREAMS * WIDTH),
    "hc_attn_base.weight": (MIXES,),
    "hc_attn_scale.weight": (3,),
    "hc_ffn_fn.weight": (MIXES, STREAMS * WIDTH),
    "hc_ffn_base.weight": (MIXES,),
    "hc_ffn_scale.weight": (3,),
    "ffn_gate_inp.weight": (EXPERTS, WIDTH),
    "exp_probs_b.bias": (EXPERTS,),
    "ffn_norm.weight": (WIDTH,),
    "ffn_gate_exps.weight": (EXPERTS, INNER, WIDTH),
    "ffn_down_exps.weight": (EXPERTS, WIDTH, INNER),
    "ffn_up_exps.weight": (EXPERTS, INNER, WIDTH),
    "ffn_gate_shexp.weight": (INNER, WIDTH),
    "ffn_down_shexp.weight": (WIDTH, INNER),
    "ffn_up_shexp.weight": (INNER, WIDTH),
}


def _compressor(name: str, width: int, ratio: int) -> dict[str, tuple[int, ...]]:
    # Four tokens are compressed together with the four before them.
    wide = 2 * width if ratio == 4 else width
    return {
        f"{name}_compressor_kv.weight": (wide, WIDTH),
        f"{name}_compressor_gate.weight": (wide, WIDTH),
        f"{name}_compressor_ape.weight": (ratio, wide),
        f"{name}_compressor_norm.weight": (width,),
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "output_norm.weight": (WIDTH,),
        "output_hc_fn.weight": (STREAMS, STREAMS * WIDTH),
        "output_hc_base.weight": (STREAMS,),
        "output_hc_scale.weight": (1,),
    }
    for layer, ratio in enumerate(RATIOS):
        found = dict(LAYER)
        if ratio:
            found |= _compressor("attn", HEAD, ratio)
        if ratio == 4:
            found |= _compressor("indexer", INDEXER, ratio)
            found["indexer.proj.weight"] = HEADS, WIDTH
            found["indexer.attn_q_b.weight"] = HEADS * INDEXER, RANK
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in found.items()}
    return shapes


def compressed(path: Path) -> Path:
    """Write a model with the vocabulary of `bpe.gguf`."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    rng = np.random.default_rng(17)
    copy_vocabulary(gguf.GGUFReader(BPE), writer)
    for key, count in COUNTS.items():
        writer.add_uint32(f"deepseek4.{key}", count)
    for key, number in NUMBERS.items():
        writer.add_float32(f"deepseek4.{key}", number)
    writer.add_bool("deepseek4.expert_weights_norm", True)
    writer.add_array("deepseek4.attention.compress_ratios", [*RATIOS])
    writer.add_array("deepseek4.swiglu_clamp_exp", [10.0] * len(RATIOS))
    words = len(writer.kv_data[0]["tokenizer.ggml.tokens"].value)
    ends = {"token_embd.weight": (words, WIDTH), "output.weight": (words, WIDTH)}
    for name, shape in (ends | _shapes()).items():
        values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        if name in ends:
            values *= 6
        elif "norm" in name or "scale" in name:
            values = np.ones(shape, np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
