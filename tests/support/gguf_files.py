"""Copies of GGUF files with other weights or other facts, as tests want them."""

from __future__ import annotations

from collections.abc import Mapping
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
) -> Path:
    """Copy a model.

    Args:
        kind: how the matrices are stored in the copy; as in the source by default.
        changes: values of fields, by their keys, that differ from the source's.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    _copy_fields(reader, writer, changes or {})
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if kind is not None and stored != gguf.GGMLQuantizationType.F32:
            plain = gguf.quants.dequantize(data, stored)
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


def _copy_fields(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, changes: Mapping[str, Any]
) -> None:
    for name, field in reader.fields.items():
        if name in OWN_FIELDS or name in changes:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, value in changes.items():
        known = reader.fields.get(name)
        kind = known.types[0] if known is not None else gguf.GGUFValueType.UINT32
        inner = known.types[-1] if kind == gguf.GGUFValueType.ARRAY and known is not None else None
        writer.add_key_value(name, value, kind, sub_type=inner)
