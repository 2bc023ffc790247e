"""Piper's voices by piper-tts (GPL-3.0), in the process of `worker`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .base import Pcm, SpeakerFacts, Utterance, Voice, name_of, thread_count
from .phonemes import runs_of


class _Speaker(NamedTuple):
    """One of the speakers of a voice file; None if the file has one only."""

    path: Path
    number: int | None


class Piper:
    """Voices in a folder, or in a file.

    Args:
        model: a file `VOICE.onnx` with `VOICE.onnx.json` next to it, or a folder with such files.

    Raises:
        ValueError: there is no voice.
    """

    def __init__(self, model: str) -> None:
        path = Path(model).expanduser()
        files = sorted(path.glob("*.onnx")) if path.is_dir() else [path]
        voices: list[Voice] = []
        self._speakers: dict[str, _Speaker] = {}
        for file in files:
            config = _config_of(file)
            language = str(config.get("language", {}).get("family", ""))
            indexes = config.get("speaker_id_map") or {}
            names = {f"{file.stem}:{name}": index for name, index in indexes.items()}
            for name, index in (names or {file.stem: None}).items():
                voices.append(Voice(name, language))
                self._speakers[name] = _Speaker(file, index)
        if not voices:
            raise ValueError(f"'{path}' has no file VOICE.onnx.")
        self._loaded: dict[Path, Any] = {}
        self._voice(voices[0].name)
        self.facts = SpeakerFacts(name_of("piper", model), voices)

    def _voice(self, name: str) -> Any:
        path = self._speakers[name].path
        if path not in self._loaded:
            # A voice takes a hundred megabytes: only the last is kept.
            self._loaded = {path: _loaded(path)}
        return self._loaded[path]

    def speak(self, utterance: Utterance) -> Iterator[Pcm]:
        """Yield the audio of each run of phonemes."""
        from piper import SynthesisConfig

        voice = self._voice(utterance.voice)
        config = SynthesisConfig(speaker_id=self._speakers[utterance.voice].number)
        for chunk in voice.synthesize(utterance.text, config):
            yield Pcm(chunk.audio_int16_bytes, chunk.sample_rate)


def _loaded(path: Path) -> Any:
    """Return a voice of Piper."""
    from onnxruntime import InferenceSession, SessionOptions
    from piper import PiperConfig, PiperVoice

    options = SessionOptions()
    options.intra_op_num_threads = thread_count()
    # Threads that wait for each other in a loop take processors from the server.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    voice = PiperVoice(session, PiperConfig.from_dict(_config_of(path)))
    phonemize = voice.phonemize
    # What is computed at once is bounded.
    voice.phonemize = lambda text: runs_of(phonemize(text))
    return voice


def _config_of(file: Path) -> dict[str, Any]:
    """Return the configuration of a voice.

    Raises:
        ValueError: it is missing, or not valid.
    """
    path = file.with_name(f"{file.name}.json")
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}.") from None
    return found


def phonemizer() -> Callable[[str, str], list[list[str]]]:
    """Return a function from a language of espeak-ng and a text to the phonemes of sentences."""
    from piper.phonemize_espeak import EspeakPhonemizer

    found: Callable[[str, str], list[list[str]]] = EspeakPhonemizer().phonemize
    return found
