"""Tests of the measured memory that lasts from one run to the next."""

from __future__ import annotations

from pathlib import Path

from latimer.backends.fleet.sizes import Sizes, key_of


def test_sizes_last(tmp_path: Path) -> None:
    """A measured size is known in the next run, for the same command only."""
    key = key_of("a", ("llama-server", "-m", "a.gguf"))
    Sizes(tmp_path / "new").put(key, {"gpu": 5})
    assert Sizes(tmp_path / "new").get(key) == {"gpu": 5}
    assert Sizes(tmp_path / "new").get(key_of("a", ("llama-server", "-m", "b.gguf"))) == {}


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    """A file that is damaged, or that cannot be written, holds nobody."""
    file = tmp_path / "memory.json"
    for data in (b"", b"[]", b'{"k": 5}', b'{"k": {"gpu": -1, "ram": "x"}}'):
        file.write_bytes(data)
        assert Sizes(tmp_path).get("k") == {}
    Sizes(file / "folder").put("k", {"gpu": 1})
    assert Sizes(file / "folder").get("k") == {}
