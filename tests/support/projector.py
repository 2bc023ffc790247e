"""Projector files for the small models: image and audio encoders with random weights."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

SIZE, PATCH = 28, 14
# The number of tokens of an image.
TOKENS = (SIZE // PATCH) ** 2


INNER, LAYERS, HEADS, MELS = 32, 2, 2, 80
# The number of positions of half a minute of audio.
POSITIONS = 1500


# The matrices of attention, and the factor of their width.
SEPARATE = {"attn_q": 1, "attn_k": 1, "attn_v": 1, "attn_out": 1}
FUSED = {"attn_qkv": 3, "attn_out": 1}


class Writer:
    """A writer of a projector's tensors, with random numbers from one seed."""

    def __init__(
        self, path: Path, kind: str, width: int, scale: float, facts: Mapping[str, int]
    ) -> None:
        self._scale = scale
        self._rng = np.random.default_rng(5)
        self.gguf = gguf.GGUFWriter(path, "clip")
        self.gguf.add_name(path.stem)
        common = {
            "embedding_length": INNER,
            "feed_forward_length": INNER * 2,
            "block_count": LAYERS,
            "attention.head_count": HEADS,
            "projection_dim": width,
        }
        for key, value in {**common, **facts}.items():
            self.gguf.add_uint32(f"clip.{kind}.{key}", value)
        self.gguf.add_float32(f"clip.{kind}.attention.layer_norm_epsilon", 1e-5)

    def random(self, name: str, *shape: int) -> None:
        values = self._rng.standard_normal(shape, np.float32) * self._scale / np.sqrt(shape[-1])
        self.gguf.add_tensor(name, values.astype(np.float32))

    def linear(self, name: str, *shape: int) -> None:
        self.random(f"{name}.weight", *shape)
        self.random(f"{name}.bias", shape[0])

    def norm(self, name: str, width: int = INNER) -> None:
        self.gguf.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        self.gguf.add_tensor(f"{name}.bias", np.zeros(width, np.float32))

    def blocks(
        self, prefix: str, biases: Sequence[str] = (), attention: Mapping[str, int] = SEPARATE
    ) -> None:
        """Write the layers.

        Args:
            biases: the matrices of attention that have a bias.
            attention: the matrices of attention, and the factor of their width.
        """
        for layer in range(LAYERS):
            block = f"{prefix}.blk.{layer}."
            self.norm(block + "ln1")
            self.norm(block + "ln2")
            for name, factor in attention.items():
                self.random(f"{block}{name}.weight", factor * INNER, INNER)
                if name in biases:
                    self.random(f"{block}{name}.bias", factor * INNER)
            self.random(block + "ffn_up.weight", INNER * 2, INNER)
            self.random(block + "ffn_down.weight", INNER, INNER * 2)

    def write(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def projector(path: Path, width: int) -> Path:
    """Write a LLaVA projector for images, with a model's embedding length as its output width."""
    writer = Writer(path, "vision", width, 4.0, {"image_size": SIZE, "patch_size": PATCH})
    writer.gguf.add_bool("clip.has_vision_encoder", True)
    writer.gguf.add_string("clip.projector_type", "mlp")
    writer.gguf.add_bool("clip.use_gelu", True)
    writer.gguf.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.gguf.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    writer.random("v.patch_embd.weight", INNER, 3, PATCH, PATCH)
    writer.random("v.class_embd", INNER)
    writer.random("v.position_embd.weight", TOKENS + 1, INNER)
    writer.norm("v.pre_ln")
    writer.blocks("v")
    writer.random("mm.0.weight", width, INNER)
    writer.random("mm.0.bias", width)
    writer.random("mm.2.weight", width, width)
    writer.random("mm.2.bias", width)
    writer.write()
    return path


def listener(path: Path, width: int) -> Path:
    """Write a Qwen2-Audio projector."""
    writer = Writer(path, "audio", width, 1.0, {"num_mel_bins": MELS})
    writer.gguf.add_bool("clip.has_audio_encoder", True)
    writer.gguf.add_string("clip.projector_type", "qwen2a")
    writer.gguf.add_bool("clip.use_gelu", True)
    writer.random("a.conv1d.1.weight", INNER, MELS, 3)
    writer.random("a.conv1d.1.bias", INNER, 1)
    writer.random("a.conv1d.2.weight", INNER, INNER, 3)
    writer.random("a.conv1d.2.bias", INNER, 1)
    writer.random("a.position_embd.weight", POSITIONS, INNER)
    writer.blocks("a", biases=("attn_q", "attn_v", "attn_out"))
    writer.norm("a.post_ln")
    writer.random("mm.a.fc.weight", width, INNER)
    writer.random("mm.a.fc.bias", width)
    writer.write()
    return path


def wav(hertz: int, seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """Return a WAV file of a tone."""
    times = np.arange(int(seconds * rate)) / rate
    samples = (np.sin(2 * np.pi * hertz * times) * 20_000).astype("<i2").tobytes()
    form = struct.pack("<IHHIIHH", 16, 1, 1, rate, rate * 2, 2, 16)
    body = b"WAVEfmt " + form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def png(red: int, green: int, blue: int, size: int = SIZE) -> bytes:
    """Return a PNG file of one colour."""
    return png_of(np.full((size, size, 3), (red, green, blue), np.uint8))


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG file of pixels, shape (height, width, 3)."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
