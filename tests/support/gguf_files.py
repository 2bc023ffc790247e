"""Copies of GGUF files with other weights or metadata."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

OWN_FIELDS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")


def copy(
    source: Path,
    target: Path,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    changes: Mapping[str, Any] | None = None,
    deltas: Mapping[str, np.ndarray[Any, Any]] | None = None,
    tensors_a_part: int = 0,
    architecture: str | None = None,
) -> Path:
    """Copy a model.

    Args:
        kind: the type of the matrices in the copy; by default that of the source.
        changes: the values of fields that differ from the source, by key.
        deltas: the values added to matrices, by name.
        tensors_a_part: the maximum number of tensors per file, to split the copy.
        architecture: that of the copy, with tensors of the same names; by default the source's.
    """
    reader = gguf.GGUFReader(source)
    architecture = architecture or reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=tensors_a_part)
    _copy_fields(reader, writer, changes or {})
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if kind is not None and stored != gguf.GGMLQuantizationType.F32:
            plain = gguf.quants.dequantize(data, stored) + (deltas or {}).get(tensor.name, 0)
            data, stored = gguf.quants.quantize(plain, kind), kind
        raw = stored not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(
            tensor.name, np.ascontiguousarray(data), raw_dtype=stored if raw else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def noisy(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Copy a model with noise in its weights, so that it often predicts the same tokens."""
    chance = np.random.default_rng(4)
    deltas = {
        tensor.name: chance.normal(0, 0.02, [int(size) for size in tensor.shape[::-1]])
        for tensor in gguf.GGUFReader(source).tensors
        if len(tensor.shape) > 1
    }
    return copy(source, target, kind=kind, deltas=deltas)


def lora(source: Path, target: Path, rank: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    """Write a LoRA adapter of small random numbers for a model's query and value matrices.

    Returns:
        The values that it adds to each matrix at a scale of 1, by the matrix's name.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * rank)
    rng = np.random.default_rng(3)
    deltas = {}
    for tensor in reader.tensors:
        if not tensor.name.endswith(("attn_q.weight", "attn_v.weight")):
            continue
        columns, rows = (int(size) for size in tensor.shape)
        a = rng.standard_normal((rank, columns), np.float32) / 10
        b = rng.standard_normal((rows, rank), np.float32) / 10
        writer.add_tensor(f"{tensor.name}.lora_a", a)
        writer.add_tensor(f"{tensor.name}.lora_b", b)
        deltas[tensor.name] = 2.0 * b @ a
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return deltas


def _copy_fields(
    reader: gguf.GGUFReader,
    writer: gguf.GGUFWriter,
    changes: Mapping[str, Any],
    omitted: Container[str] = (),
) -> None:
    own = reader.fields["general.architecture"].contents()
    for name, field in reader.fields.items():
        if name in OWN_FIELDS or name in changes or name in omitted:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        key = re.sub(rf"^{own}\.", f"{writer.arch}.", name)
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for name, value in changes.items():
        known = reader.fields.get(name)
        kind = known.types[0] if known is not None else gguf.GGUFValueType.get_type(value)
        inner = known.types[-1] if kind == gguf.GGUFValueType.ARRAY and known is not None else None
        writer.add_key_value(name, value, kind, sub_type=inner)


def copy_vocabulary(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Copy a model's vocabulary and its chat template into a file of another architecture."""
    others = [name for name in reader.fields if not name.startswith("tokenizer.")]
    _copy_fields(reader, writer, {}, others)


def _more_tokens(reader: gguf.GGUFReader, size: int) -> dict[str, Any]:
    """Return the fields of a vocabulary with more tokens, which no text becomes."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    more = [f"w{number}" for number in range(len(tokens), size)]
    found = {"llama.vocab_size": size, "tokenizer.ggml.tokens": [*tokens, *more]}
    for name, value in (("token_type", gguf.TokenType.NORMAL), ("scores", 0.0)):
        field = reader.fields.get(f"tokenizer.ggml.{name}")
        if field is not None:
            found[field.name] = [*field.contents(), *([value] * len(more))]
    return found


def larger(
    source: Path, target: Path, *, width: int, layers: int, inner: int, vocabulary: int = 0
) -> Path:
    """Write a Llama of random weights in Q8_0, with another model's vocabulary.

    Args:
        width: the embedding length; heads have a width of 64.
        inner: the length of the feed-forward layer.
        vocabulary: the number of tokens, if it is to be larger than the other model's.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    changes = {
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": width // 64,
        "llama.attention.head_count_kv": width // 64,
        "llama.rope.dimension_count": 64,
    }
    size = max(reader.fields["llama.vocab_size"].contents(), vocabulary)
    changes |= _more_tokens(reader, size)
    _copy_fields(reader, writer, changes)
    rng = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType.Q8_0

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), np.float32) / np.sqrt(columns)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    matrix("token_embd.weight", size, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        block = f"blk.{layer}."
        writer.add_tensor(block + "attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(block + "ffn_norm.weight", np.ones(width, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{block}{name}.weight", width, width)
        matrix(block + "ffn_gate.weight", inner, width)
        matrix(block + "ffn_up.weight", inner, width)
        matrix(block + "ffn_down.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def widened(source: Path, target: Path, inner: int) -> Path:
    """Write a Llama that computes what another one does, with more work.

    Args:
        inner: the length of its feed-forward layer, whose additional values have no effect.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    _copy_fields(reader, writer, {"llama.feed_forward_length": inner})
    rng = np.random.default_rng(2)
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if ".ffn_" in tensor.name and "norm" not in tensor.name:
            plain = gguf.quants.dequantize(data, stored)
            rows, columns = plain.shape
            if "ffn_down" in tensor.name:
                more = np.zeros((rows, inner - columns), np.float32)
                plain = np.concatenate([plain, more], axis=1)
            else:
                more = rng.standard_normal((inner - rows, columns), np.float32) / 10
                plain = np.concatenate([plain, more])
            data, stored = gguf.quants.quantize(plain, kind), kind
        raw = stored not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(
            tensor.name, np.ascontiguousarray(data), raw_dtype=stored if raw else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
