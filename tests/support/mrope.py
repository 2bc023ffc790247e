"""Small models with M-RoPE in the form of Qwen's vision models, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from support.gguf_files import copy_vocabulary
from support.projector import FUSED, INNER, LAYERS, PATCH, SEPARATE, Writer, png_of

BPE = Path(__file__).parents[1] / "models" / "bpe.gguf"
# The embeddings for the inner layers (Qwen3-VL) end before the last layer.
WIDTH, KERNEL = 64, 4
# Pixels of one embedding: two by two patches become one.
CELL = 2 * PATCH


class Size(NamedTuple):
    """The size of a language model.

    Args:
        sections: the dimensions of a head that turn by time, height and width.
    """

    width: int = WIDTH
    heads: int = 4
    depth: int = LAYERS + 1
    context: int = 4096
    sections: tuple[int, ...] = (2, 3, 3, 0)

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.width // self.heads


SMALL = Size()


class Family(NamedTuple):
    """A family of vision models.

    Args:
        architecture: the name of its language model.
        projector: the name of its projector.
        normed: True if queries and keys are normalized.
        deep: True if the projector has embeddings for the inner layers, too.
        recurrent: True if all layers but the last have a recurrent state instead of attention.
    """

    architecture: str
    projector: str
    normed: bool = True
    deep: bool = False
    recurrent: bool = False


QWEN2 = Family("qwen2vl", "qwen2vl_merger", normed=False)
QWEN25 = Family("qwen2vl", "qwen2.5vl_merger", normed=False)
QWEN3 = Family("qwen3vl", "qwen3vl_merger", deep=True)
QWEN35 = Family("qwen35", "qwen3vl_merger", recurrent=True)
# The language model of HunyuanVL, with a projector that fits it.
HUNYUAN = Family("hunyuan_vl", "qwen2vl_merger")


class _Model:
    """A writer of a language model, with random numbers from one seed."""

    def __init__(self, path: Path, family: Family, size: Size) -> None:
        self.size = size
        self.gguf = gguf.GGUFWriter(path, family.architecture)
        self._rng = np.random.default_rng(17)

    def matrix(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        values = self._rng.standard_normal((rows, columns), np.float32) * scale / np.sqrt(columns)
        self.gguf.add_tensor(name, values.astype(np.float32))

    def fill(self, name: str, width: int | None = None, value: float = 1.0) -> None:
        width = self.size.width if width is None else width
        self.gguf.add_tensor(name, np.full(width, value, np.float32))

    def facts(self, family: Family) -> int:
        """Write the fields, and return the size of the vocabulary."""
        writer = self.gguf
        copy_vocabulary(gguf.GGUFReader(BPE), writer)
        writer.add_context_length(self.size.context)
        writer.add_embedding_length(self.size.width)
        writer.add_block_count(self.size.depth)
        writer.add_feed_forward_length(2 * self.size.width)
        writer.add_head_count(self.size.heads)
        writer.add_head_count_kv(self.size.heads)
        writer.add_key_length(self.size.head)
        writer.add_value_length(self.size.head)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_rope_dimension_count(self.size.head)
        writer.add_rope_dimension_sections([*self.size.sections])
        if family.deep:
            writer.add_num_deepstack_layers(LAYERS)
        if family.recurrent:
            writer.add_full_attention_interval(self.size.depth)
            writer.add_ssm_conv_kernel(KERNEL)
            writer.add_ssm_inner_size(self.size.width)
            writer.add_ssm_state_size(self.size.head)
            writer.add_ssm_time_step_rank(self.size.heads)
            writer.add_ssm_group_count(self.size.heads)
        return len(writer.kv_data[0]["tokenizer.ggml.tokens"].value)

    def attention(self, block: str, family: Family) -> None:
        # A recurrent model's queries come with a gate.
        self.matrix(
            block + "attn_q.weight", self.size.width * (1 + family.recurrent), self.size.width
        )
        for name in ("attn_k", "attn_v", "attn_output"):
            self.matrix(f"{block}{name}.weight", self.size.width, self.size.width)
        if family.normed:
            self.fill(block + "attn_q_norm.weight", self.size.head)
            self.fill(block + "attn_k_norm.weight", self.size.head)

    def recurrence(self, block: str) -> None:
        self.matrix(block + "attn_qkv.weight", 3 * self.size.width, self.size.width)
        self.matrix(block + "attn_gate.weight", self.size.width, self.size.width)
        self.matrix(block + "ssm_conv1d.weight", 3 * self.size.width, KERNEL)
        self.matrix(block + "ssm_alpha.weight", self.size.heads, self.size.width)
        self.matrix(block + "ssm_beta.weight", self.size.heads, self.size.width)
        self.matrix(block + "ssm_out.weight", self.size.width, self.size.width)
        self.fill(block + "ssm_norm.weight", self.size.head)
        self.fill(block + "ssm_dt.bias", self.size.heads, 0.0)
        self.fill(block + "ssm_a", self.size.heads, -1.0)


def language_model(path: Path, family: Family, size: Size = SMALL) -> Path:
    """Write a model with the vocabulary of `bpe.gguf`."""
    model = _Model(path, family, size)
    tokens = model.facts(family)
    # Large scales keep the two best tokens apart, so greedy answers are the same on every engine.
    model.matrix("token_embd.weight", tokens, size.width, 8.0)
    model.matrix("output.weight", tokens, size.width, 6.0)
    model.fill("output_norm.weight")
    for layer in range(size.depth):
        block = f"blk.{layer}."
        model.fill(block + "attn_norm.weight")
        model.fill(block + ("post_attention_norm" if family.recurrent else "ffn_norm") + ".weight")
        if family.recurrent and layer < size.depth - 1:
            model.recurrence(block)
        else:
            model.attention(block, family)
        model.matrix(block + "ffn_gate.weight", 2 * size.width, size.width)
        model.matrix(block + "ffn_up.weight", 2 * size.width, size.width)
        model.matrix(block + "ffn_down.weight", size.width, 2 * size.width)
    model.gguf.write_header_to_file()
    model.gguf.write_kv_data_to_file()
    model.gguf.write_tensors_to_file()
    model.gguf.close()
    return path


def projector(path: Path, family: Family) -> Path:
    """Write a projector of the family."""
    writer = Writer(path, "vision", WIDTH, 4.0, {"image_size": 2 * CELL, "patch_size": PATCH})
    writer.gguf.add_bool("clip.has_vision_encoder", True)
    writer.gguf.add_string("clip.projector_type", family.projector)
    writer.gguf.add_bool("clip.use_gelu", True)
    writer.gguf.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.gguf.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    if family is QWEN25:
        writer.gguf.add_uint32("clip.vision.n_wa_pattern", LAYERS)
    writer.random("v.patch_embd.weight", INNER, 3, PATCH, PATCH)
    writer.random("v.patch_embd.weight.1", INNER, 3, PATCH, PATCH)
    writer.norm("v.post_ln")
    merged = 4 * INNER
    newer = family.projector == QWEN3.projector
    if newer:
        writer.random("v.patch_embd.bias", INNER)
        writer.random("v.position_embd.weight", 16, INNER)
    if family.deep:
        for layer in range(LAYERS):
            stack = f"v.deepstack.{layer}."
            writer.norm(stack + "norm", merged)
            writer.linear(stack + "fc1", merged, merged)
            writer.linear(stack + "fc2", WIDTH, merged)
    attention = FUSED if newer else SEPARATE
    writer.blocks("v", biases=tuple(attention), attention=attention)
    writer.linear("mm.0", merged, merged)
    writer.linear("mm.2", WIDTH, merged)
    writer.write()
    return path


def picture(columns: int, rows: int, seed: int) -> bytes:
    """Return a PNG file with random pixels that becomes `columns` times `rows` embeddings."""
    # Whole cells are not resized.
    return noise(columns * CELL, rows * CELL, seed)


def noise(width: int, height: int, seed: int) -> bytes:
    """Return a PNG file with random pixels."""
    return png_of(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
