"""Tests of weights and saved sequences in huge pages."""

from __future__ import annotations

import mmap
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from platform import release

import llama_cpp
import pytest
from latimer.backends.llama_cpp import DEMO_MODEL, huge_pages
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from support.gguf_files import larger


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


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the settings of huge pages."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "_SYSTEM", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["enabled", "hpage_pmd_size"])
def test_a_model_is_loaded_where_there_are_no_huge_pages(system: Path, name: str) -> None:
    """Another system loads a model as before."""
    (system / name).unlink()
    with closing(LoadedModel(DEMO_MODEL, Options(mmap=False))) as model:
        assert model.purpose.can_generate


def test_a_file_in_memory_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a mapped file may be other bytes than UTF-8."""
    maps = tmp_path / "maps"
    maps.write_bytes(b"10-20 rw-p 0 00:00 0\n30-40 r--p 0 08:01 7 /m\xff.gguf\n")
    monkeypatch.setattr(huge_pages, "_MAPS", maps)
    assert huge_pages._allocated() == [(0x10, 0x20)]


def test_a_model_is_loaded_where_the_memory_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that hides the process's memory loads a model as before."""
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path)
    with closing(LoadedModel(DEMO_MODEL, Options(mmap=False))) as model:
        assert model.purpose.can_generate


# Linux 6.1 moves memory at once.
HAS_COLLAPSE = sys.platform == "linux" and [*map(int, release().split(".")[:2])] >= [6, 1]


# Loads a model in a process of its own, whose C library has no memory to reuse. It prints the bytes
# in huge pages.
SCRIPT = """
import sys
from pathlib import Path
from latimer.backends.llama_cpp import huge_pages
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options

huge_pages._SYSTEM = Path(sys.argv[2])
model = LoadedModel(Path(sys.argv[1]), Options(mmap=False))
lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
print(sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHuge")))
model.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COLLAPSE, reason="needs Linux 6.1")
@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="needs weights in memory")
def test_weights_are_in_huge_pages(tmp_path: Path, system: Path) -> None:
    """Most of a model that is read into memory is in huge pages, unless the system has none."""
    path = larger(DEMO_MODEL, tmp_path / "larger.gguf", width=768, layers=6, inner=2048)
    found = []
    for setting in ("always madvise [never]", "always [madvise] never"):
        (system / "enabled").write_text(setting)
        command = [sys.executable, "-c", SCRIPT, str(path), str(system)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found.append(int(done.stdout) / path.stat().st_size)
    never, allowed = found
    assert never < 0.5 < allowed


# Prints the MB in huge pages of an array of 64 MB, after another one took some seconds.
ARRAY = """
import sys
from pathlib import Path
from latimer.backends.llama_cpp.huge_pages import StateMemory

memory = StateMemory()
memory.add(1 << 26, float(sys.argv[1]))
memory.new(1 << 26)[:] = 1
data = memory.new(1 << 26)
data[:] = 1
lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
print(sum(int(line.split()[1]) // 1024 for line in lines if line.startswith("AnonHuge")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_saved_sequence_is_in_small_pages_where_huge_ones_are_slow() -> None:
    """A state gets no huge pages after one that took long, and otherwise those of numpy."""
    found = []
    for seconds in ("0.001", "1"):
        command = [sys.executable, "-c", ARRAY, seconds]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found.append(int(done.stdout))
    if not found[0]:
        pytest.skip("numpy gets no huge pages here")
    assert found[1] == 0, f"{found} MB"


def test_huge_pages_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 64 states in small pages, one is in huge pages again; small states do not count."""
    advised: list[int] = []

    def advise(start: int, end: int, advice: int) -> bool:
        advised.append(advice)
        return True

    monkeypatch.setattr(huge_pages, "_advise", advise)
    monkeypatch.setattr(mmap, "MADV_NOHUGEPAGE", 15, raising=False)
    memory, large = huge_pages.StateMemory(), 1 << 22
    memory.add(large, 1.0)
    for _ in range(65):
        memory.new(1000)
        memory.add(1000, 1.0)
        memory.new(large)
        memory.add(large, 0.001)
    assert len(advised) == 64


@pytest.mark.parametrize("size", [1, 4096, 1 << 22, (1 << 22) + 1, 1 << 23])
def test_an_array_can_be_written(size: int) -> None:
    """An array has exactly the bytes that were asked for, in pages of either size."""
    memory = huge_pages.StateMemory()
    for seconds in (0.0, 10.0):
        memory.add(1 << 22, seconds)
        data = memory.new(size)
        data[:] = 7
        assert data.nbytes == size
        assert int(data.sum(dtype=int)) == 7 * size
