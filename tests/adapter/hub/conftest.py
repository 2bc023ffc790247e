"""A hub for the tests of models by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub import Repos, TestHub, hub, repositories


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Repos:
    """Return the files of five repositories."""
    return repositories(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="session")
def served_hub(files: Repos) -> Iterator[tuple[TestHub, str]]:
    """Serve the five repositories."""
    with hub(files) as served:
        yield served


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty cache, which all clients of a hub use."""
    for name in ("LLAMA_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
                 "MODEL_ENDPOINT", "HF_TOKEN_PATH", "HUGGINGFACE_HUB_CACHE"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def test_hub(
    served_hub: tuple[TestHub, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestHub]:
    """Return the hub, which `HF_ENDPOINT` names, with an empty cache."""
    made, address = served_hub
    monkeypatch.setenv("HF_ENDPOINT", address)
    made.asked.clear()
    made.ranges.clear()
    yield made
    made.cut, made.stalls, made.range_ignored, made.cuts_heads = None, False, False, False
    made.wrong.clear()
