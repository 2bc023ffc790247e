"""The memory that a model needs, from the beginning of its GGUF file, before it is downloaded."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAGIC = b"GGUF"
# Bytes of one element of the KV cache.
_ELEMENT: Final = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
# Scalar types of GGUF values, by number: struct's format.
_SCALARS: Final = {
    0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Quantizations by the number in `general.file_type`, as llama.cpp names them (`llama_ftype`).
_FILE_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip
_VOCABULARY = "tokenizer.ggml.tokens"
# The context length if none is set, unless the model was trained for less.
_CONTEXT = 8192
# The cells of the KV cache are a multiple of this.
_CELLS = 256
# The tokens of a step of the graph, in llama.cpp's defaults.
_UBATCH = 512
_GPUS = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")


class _Short(Exception):
    """The bytes end within the metadata."""


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def scalar(self, form: str) -> Any:
        size = struct.calcsize(form)
        if self.at + size > len(self.data):
            raise _Short
        (found,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return found

    def text(self) -> str:
        size = self.scalar("<Q")
        if self.at + size > len(self.data):
            raise _Short
        self.at += size
        return self.data[self.at - size : self.at].decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("<I"), self.scalar("<Q")
        return [self.value(inner) for _ in range(count)]


def metadata_of(data: bytes) -> dict[str, Any] | None:
    """Return the metadata at the beginning of a GGUF file, up to its vocabulary.

    The number of tokens is the value of `tokenizer.ggml.tokens`.

    Returns:
        None if the bytes end before that, or are not a GGUF file of version 2 or 3.
    """
    cursor, found = _Cursor(data), {}
    try:
        if data[:4] != MAGIC:
            return None
        cursor.at = 4
        version, _, count = (cursor.scalar(form) for form in ("<I", "<Q", "<Q"))
        if version not in (2, 3):
            return None
        for _ in range(count):
            key, kind = cursor.text(), cursor.scalar("<I")
            if key == _VOCABULARY:
                cursor.scalar("<I")
                found[key] = cursor.scalar("<Q")
                break
            found[key] = cursor.value(kind)
    except (_Short, KeyError):
        return None
    return found


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Return the metadata of a file, as `metadata_of`; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return metadata_of(file.read(1 << 20))
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The bytes that a model needs: an upper limit for models with sliding windows."""

    weights: int
    kv: int
    compute: int
    context: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.kv + self.compute


def trained_context(metadata: Mapping[str, Any]) -> int | None:
    """Return the context length that a model was trained for."""
    found = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return found if isinstance(found, int) else None


def quantization(metadata: Mapping[str, Any]) -> str:
    """Return the quantization of a model, such as Q4_K_M; empty if it is unknown."""
    # 1024 marks a type that was guessed from the tensors.
    kind = metadata.get("general.file_type")
    return _FILE_TYPES.get(kind % 1024, "") if isinstance(kind, int) else ""


def estimate(
    metadata: Mapping[str, Any] | None, weights: int, context: int | None, cache_type: str | None
) -> Estimate:
    """Return the memory of a model.

    Args:
        metadata: of the file; without it only the weights are counted.
        weights: the bytes of all its files.
        context: the tokens of the KV cache; None for the default.
        cache_type: the type of its elements; None for f16.
    """
    if context is None:
        context = min(trained_context(metadata or {}) or _CONTEXT, _CONTEXT)
    if metadata is None:
        return Estimate(weights, 0, 0, context)
    prefix = metadata.get("general.architecture")

    def get(key: str, default: Any = 0) -> Any:
        return metadata.get(f"{prefix}.{key}", default)

    heads = _per_layer(get("attention.head_count"), get("block_count"))
    kv_heads = _per_layer(get("attention.head_count_kv", heads), get("block_count"))
    width = get("embedding_length") // max(heads[0], 1) if heads else 0
    key, value = get("attention.key_length", width), get("attention.value_length", width)
    if get("attention.kv_lora_rank"):
        # Multi-head latent attention has no values of their own.
        value = 0
    cells = -(-context // _CELLS) * _CELLS
    element = _ELEMENT[cache_type or "f16"]
    kv = int(sum(cells * count * (key + value) * element for count in kv_heads))
    feed = max(_per_layer(get("feed_forward_length"), 1), default=0)
    wide = max(metadata.get(_VOCABULARY, 0), feed)
    return Estimate(weights, kv, _UBATCH * wide * 4, context)


def _per_layer(value: Any, layers: int) -> list[int]:
    return list(value) if isinstance(value, list) else [int(value)] * int(layers)


def free_memory() -> int | None:
    """Return the bytes that a model can use; None where the system does not say it.

    A GPU has memory of its own, which only the engine knows.
    """
    if sys.platform != "linux" or any(map(os.path.exists, _GPUS)):
        return None
    try:
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    group = left_of_group(Path("/sys/fs/cgroup"))
    return free if group is None else min(free, group)


def left_of_group(folder: Path) -> int | None:
    """Return the bytes that a control group (version 2) may still use; None without a limit."""
    try:
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
        # Files that were read, such as the model itself, count as used, but make room.
        files = int(rows["active_file"]) + int(rows["inactive_file"])
    except (OSError, ValueError, KeyError):
        # `max` is the word for no limit.
        return None
    return max(most - used + files, 0)
