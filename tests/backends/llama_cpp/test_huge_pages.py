"""Tests of weights in huge pages."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import llama_cpp
import pytest
from latimer.backends.llama_cpp import DEMO_MODEL, huge_pages
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from support.gguf_files import larger

MIB = 2**20


def in_huge_pages() -> int:
    """Return the bytes of this process that are in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHuge"))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a Linux that has huge pages and 16 GiB of memory."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {2**24} kB\n")
    (tmp_path / "cgroup").write_text("1:cpu:/a\n0::/\n")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(huge_pages, "_SUPPORT", tmp_path)
    monkeypatch.setattr(huge_pages, "_PROCESS", tmp_path)
    monkeypatch.setattr(huge_pages, "_MEMORY", tmp_path / "meminfo")
    limits = {"": (tmp_path / "v2", "memory.max"), "memory": (tmp_path / "v1", "limit")}
    monkeypatch.setattr(huge_pages, "_LIMITS", limits)
    return tmp_path


def test_weights_may_take_a_quarter_of_the_available_memory(system: Path) -> None:
    """Larger weights stay mapped, so that Linux can drop them from memory."""
    assert huge_pages.are_for(4 * 2**30)
    assert not huge_pages.are_for(4 * 2**30 + 1)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/pods/one", "v2/pods/one/memory.max"),
        ("0::/pods/one", "v2/pods/memory.max"),
        ("4:memory:/pods/one", "v1/pods/one/limit"),
        ("4:memory:/not/mounted", "v1/limit"),
    ],
)
def test_a_control_group_limits_the_memory(system: Path, line: str, file: str) -> None:
    """Weights take at most a quarter of what a container may have, or a group around it."""
    limit = system / file
    limit.parent.mkdir(parents=True)
    limit.write_text(f"{400 * MIB}\n")
    (system / "cgroup").write_text(f"{line}\n")
    assert huge_pages.are_for(100 * MIB)
    assert not huge_pages.are_for(100 * MIB + 1)


def test_a_group_without_a_limit_sets_none(system: Path) -> None:
    """The word `max` is no limit."""
    (system / "v2").mkdir()
    (system / "v2/memory.max").write_text("max\n")
    assert huge_pages.are_for(4 * 2**30)


@pytest.mark.parametrize("missing", ["meminfo", "cgroup"])
def test_weights_stay_mapped_where_the_memory_is_unknown(system: Path, missing: str) -> None:
    """A container that hides its limits gets the default of llama.cpp."""
    (system / missing).unlink()
    assert not huge_pages.are_for(1)


@pytest.mark.parametrize(
    ("ranges", "known", "found"),
    [
        ([(0, 9)], [], [(0, 9)]),
        ([(0, 9)], [(0, 9)], []),
        ([(0, 9)], [(0, 3)], [(3, 9)]),
        ([(0, 9)], [(6, 9)], [(0, 6)]),
        ([(0, 9)], [(2, 4), (6, 7)], [(0, 2), (4, 6), (7, 9)]),
        ([(0, 4), (8, 9)], [(2, 8)], [(0, 2), (8, 9)]),
        ([(5, 9)], [(0, 5), (9, 12)], [(5, 9)]),
    ],
)
def test_known_memory_is_left_out(
    ranges: list[tuple[int, int]], known: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    """Linux joins neighbours, and memory that was there before stays as it is."""
    assert list(huge_pages.without(ranges, known)) == found


def test_a_model_is_loaded_where_the_memory_is_hidden(system: Path) -> None:
    """A container without the files of Linux loads a model as before."""
    with closing(LoadedModel(DEMO_MODEL, Options())) as model:
        assert model.can_generate


@pytest.mark.skipif(not huge_pages.are_for(64 * MIB), reason="needs huge pages")
@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="needs weights in memory")
def test_weights_are_in_huge_pages(tmp_path: Path) -> None:
    """By default, most of a model that fits easily is in huge pages; a mapped one is not."""
    # The C library can take smaller ones from memory that it has already.
    path = larger(DEMO_MODEL, tmp_path / "larger.gguf", width=768, layers=6, inner=2048)
    found = []
    for options in (Options(mmap=True), Options()):
        before = in_huge_pages()
        with closing(LoadedModel(path, options)):
            found.append((in_huge_pages() - before) / path.stat().st_size)
    mapped, loaded = found
    assert mapped < 0.5 < loaded
