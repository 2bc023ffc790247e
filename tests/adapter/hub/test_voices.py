"""Tests of voices by name: what is chosen, downloaded once, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from latimer.adapter.hub.names import HubError
from latimer.adapter.hub.voices import name_of, placed
from support.hub import COMMIT, TestHub


class Lines:
    """A receiver that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def show(self, label: str, done: int, total: int) -> None:
        """Show nothing."""


def path_of(name: str, report: Lines | None = None, *, offline: bool = False) -> Path:
    """Return the path of a voice of Piper."""
    library, _, path = placed(f"piper:{name}", report or Lines(), offline=offline).partition(":")
    assert library == "piper"
    return Path(path)


def names_in(folder: Path) -> list[str]:
    """Return the names of the files of a folder."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.fixture(autouse=True)
def voices(test_hub: TestHub, monkeypatch: pytest.MonkeyPatch) -> TestHub:
    """Add a repository of voices to the hub."""
    files = {
        "README.md": b"# Voices", "en/joe/joe.onnx": b"onnx" * 9, "en/joe/joe.onnx.json": b"{}",
        "en/joe/MODEL_CARD": b"card", "en/joe/samples/a.mp3": b"mp3",
    }  # fmt: skip
    whole = {
        "model.onnx": b"onnx", "tokens.txt": b"a 1", "lexicon.txt": b"a a", "date.fst": b"fst",
        "README.md": b"# VITS", "dict/words.txt": b"a",
    }  # fmt: skip
    repos = {**test_hub.repos, "test/piper": files, "test/vits": whole}
    monkeypatch.setattr(test_hub, "repos", repos)
    return test_hub


def test_a_folder_is_downloaded_once(voices: TestHub) -> None:
    """The files of the voice are in it and no others; then the cache has them, also offline."""
    report = Lines()
    folder = path_of("hf:test/piper/en/joe", report)
    assert names_in(folder) == ["joe.onnx", "joe.onnx.json"]
    assert report.said == ["hf:test/piper/en/joe: 2 files (38 B)."]
    voices.asked.clear()
    assert (
        path_of("hf:test/piper/en/joe/") == path_of("hf:test/piper/en/joe", offline=True) == folder
    )
    assert not voices.asked


def test_a_file_has_its_settings_beside_it() -> None:
    """A file is downloaded with its settings."""
    path = path_of(f"hf:test/piper/en/joe/joe.onnx@{COMMIT}")
    assert path.read_bytes() == b"onnx" * 9
    assert path.with_name("joe.onnx.json").read_bytes() == b"{}"


def test_a_whole_repository() -> None:
    """A name without a path has the files at the top."""
    names = ["date.fst", "lexicon.txt", "model.onnx", "tokens.txt"]
    assert names_in(path_of("hf:test/vits")) == names


def test_a_path_of_this_machine_is_unchanged() -> None:
    """Only names on a hub are replaced."""
    for value in ("piper:voice.onnx", "http://127.0.0.1:5001", "sherpa-onnx"):
        assert placed(value, Lines(), offline=False) == value


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf:test/piper", "has no voice"), ("hf:test/piper/en/ann", "has no voice"),
        ("hf:test/none", "test/none"), ("hf:test/piper/../x", "is not a name"),
        ("hf:test/piper:Q8_0", "is not a name"), ("hf:piper", "is not a name"),
    ],
)  # fmt: skip
def test_names_without_a_voice(name: str, says: str) -> None:
    """The error says what is missing, or how to write a name."""
    with pytest.raises(HubError, match=says):
        path_of(name)


def test_a_voice_that_is_not_in_the_cache_offline() -> None:
    """Offline, the error names the option."""
    with pytest.raises(HubError, match="without --offline"):
        path_of("hf:test/vits", offline=True)


def test_a_name_has_its_parts() -> None:
    """The path is that in the repository."""
    name = name_of("hf:a/b/c/d@v1")
    assert (name.repo, name.path, name.revision) == ("a/b", "c/d", "v1")


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_voice_of_the_cache_without_the_hub(
    cache: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    """The files in the cache are enough, also if a client has kept no list of all files."""
    folder = path_of("hf:test/piper/en/joe")
    (cache / "models--test--piper" / "trees" / f"{COMMIT}.json").unlink()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    report = Lines()
    assert path_of("hf:test/piper/en/joe", report, offline=is_offline) == folder
    assert [line.endswith("Latimer uses the cache.") for line in report.said] == (
        [] if is_offline else [True]
    )


def test_a_part_of_a_voice_is_not_enough() -> None:
    """A voice whose list of files has more than the cache was not downloaded to its end."""
    folder = path_of("hf:test/piper/en/joe")
    next(folder.glob("*.json")).unlink()
    with pytest.raises(HubError, match="without --offline"):
        path_of("hf:test/piper/en/joe", offline=True)
