"""A projector file for the small models: a vision encoder of random weights."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import gguf
import numpy as np

SIZE, PATCH = 28, 14
# What an image comes to, in tokens.
TOKENS = (SIZE // PATCH) ** 2


def projector(path: Path, width: int, seed: int = 5) -> Path:
    """Write a LLaVA projector whose output has a model's width."""
    inner, layers, heads = 32, 2, 2
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(path.stem)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    for key, value in (
        ("embedding_length", inner),
        ("feed_forward_length", inner * 2),
        ("block_count", layers),
        ("attention.head_count", heads),
        ("projection_dim", width),
        ("image_size", SIZE),
        ("patch_size", PATCH),
    ):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def random(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32) * 4 / np.sqrt(shape[-1])
        writer.add_tensor(name, values.astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(inner, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(inner, np.float32))

    random("v.patch_embd.weight", inner, 3, PATCH, PATCH)
    random("v.class_embd", inner)
    random("v.position_embd.weight", TOKENS + 1, inner)
    norm("v.pre_ln")
    for layer in range(layers):
        block = f"v.blk.{layer}."
        norm(block + "ln1")
        norm(block + "ln2")
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            random(f"{block}{name}.weight", inner, inner)
        random(block + "ffn_up.weight", inner * 2, inner)
        random(block + "ffn_down.weight", inner, inner * 2)
    random("mm.0.weight", width, inner)
    random("mm.0.bias", width)
    random("mm.2.weight", width, width)
    random("mm.2.bias", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def png(red: int, green: int, blue: int, size: int = SIZE) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((red, green, blue)) * size) * size
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
