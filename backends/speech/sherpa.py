"""Voices of several kinds by sherpa-onnx (Apache-2.0), in the process of `worker`.

A model is a folder as sherpa-onnx publishes it. Since its version 2, sherpa-onnx has no espeak-ng
(GPL-3.0), so a model needs a lexicon. For voices of Piper without one, Piper's own library computes
the phonemes, if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .base import Pcm, SpeakerFacts, Utterance, Voice, name_of, thread_count
from .phonemes import runs_of
from .piper import phonemizer

# The lexicons that exclude each other: the first is used.
_ENGLISH = ("lexicon-us-en.txt", "lexicon-gb-en.txt")


class Sherpa:
    """A model.

    Args:
        model: its folder.

    Raises:
        ValueError: the folder is not a model, or it needs phonemes that nothing computes.
    """

    def __init__(self, model: str) -> None:
        import sherpa_onnx as library

        folder = Path(model).expanduser()
        kind = _kind_of(folder)
        lexicons = _lexicons(folder)
        config = library.OfflineTtsConfig(
            model=library.OfflineTtsModelConfig(
                **{kind: _CONFIGS[kind](library, folder, ",".join(lexicons))},
                num_threads=thread_count(),
            ),
            rule_fsts=",".join(map(str, sorted(folder.glob("*.fst")))),
        )
        if not config.validate():
            raise ValueError(f"'{folder}' is not a valid model of sherpa-onnx.")
        self._tts = library.OfflineTts(config)
        self._library = library
        self._phonemizer = None if lexicons or kind == "matcha" else _phonemizer(folder)
        count = max(self._tts.num_speakers, 1)
        names = [str(index) for index in range(count)] if count > 1 else [folder.name]
        self._indexes = {name: index for index, name in enumerate(names)}
        language = str(self._tts.lang or "").partition("-")[0].lower()
        language = language if len(language) == 2 else ""
        voices = [Voice(name, language) for name in names]
        self.facts = SpeakerFacts(name_of("sherpa-onnx", model), voices)

    def speak(self, utterance: Utterance) -> Iterator[Pcm]:
        """Yield the audio in one piece, or that of each run of phonemes."""
        config = self._library.GenerationConfig()
        config.sid = self._indexes[utterance.voice]
        if self._phonemizer is None:
            yield self._generated(utterance.text, config)
            return
        for run in runs_of(self._phonemizer(str(self._tts.lang), utterance.text)):
            config.phoneme_codepoints = [[ord(one) for phoneme in run for one in phoneme]]
            yield self._generated(utterance.text, config)

    def _generated(self, text: str, config: Any) -> Pcm:
        import numpy as np

        audio = self._tts.generate(text, config)
        scaled = np.clip(np.asarray(audio.samples, np.float32) * 32_767, -32_768, 32_767)
        return Pcm(scaled.astype("<i2").tobytes(), audio.sample_rate)


def _kind_of(folder: Path) -> str:
    """Return the kind of a model, by its files.

    Raises:
        ValueError: the folder is not a model.
    """
    if not (folder / "tokens.txt").is_file() or not any(folder.glob("*.onnx")):
        raise ValueError(f"'{folder}' is not a model: it has no tokens.txt, or no file *.onnx.")
    if (folder / "voices.bin").is_file():
        return "kitten" if "kitten" in folder.name.lower() else "kokoro"
    return "matcha" if _vocoder(folder) is not None else "vits"


def _lexicons(folder: Path) -> list[str]:
    """Return the lexicons of a model, at most one of them English."""
    found = sorted(folder.glob("lexicon*.txt"))
    english = [one for one in found if one.name in _ENGLISH]
    best = max(english, key=lambda one: one.name == _ENGLISH[0], default=None)
    return [str(one) for one in found if one.name not in _ENGLISH or one == best]


def _vocoder(folder: Path) -> Path | None:
    return next((one for one in folder.glob("*.onnx") if _is_vocoder(one)), None)


def _is_vocoder(path: Path) -> bool:
    return any(word in path.name for word in ("vocos", "hifigan"))


def _model(folder: Path) -> str:
    """Return the model's file; of several, the smaller one."""
    files = [one for one in folder.glob("*.onnx") if not _is_vocoder(one)]
    return str(min(files, key=lambda one: one.stat().st_size))


def _vits(library: Any, folder: Path, lexicon: str) -> Any:
    return library.OfflineTtsVitsModelConfig(
        model=_model(folder), lexicon=lexicon, tokens=str(folder / "tokens.txt")
    )


def _matcha(library: Any, folder: Path, lexicon: str) -> Any:
    return library.OfflineTtsMatchaModelConfig(
        acoustic_model=_model(folder),
        vocoder=str(_vocoder(folder)),
        lexicon=lexicon,
        tokens=str(folder / "tokens.txt"),
    )


def _kokoro(library: Any, folder: Path, lexicon: str) -> Any:
    return library.OfflineTtsKokoroModelConfig(
        model=_model(folder),
        voices=str(folder / "voices.bin"),
        tokens=str(folder / "tokens.txt"),
        lexicon=lexicon,
    )


def _kitten(library: Any, folder: Path, lexicon: str) -> Any:
    return library.OfflineTtsKittenModelConfig(
        model=_model(folder),
        voices=str(folder / "voices.bin"),
        tokens=str(folder / "tokens.txt"),
        lexicon=lexicon,
    )


_CONFIGS: Mapping[str, Callable[[Any, Path, str], Any]] = {
    "vits": _vits, "matcha": _matcha, "kokoro": _kokoro, "kitten": _kitten,
}  # fmt: skip


def _phonemizer(folder: Path) -> Callable[[str, str], list[list[str]]]:
    """Return a function from a language and a text to the phonemes of its sentences.

    Raises:
        ValueError: Piper's library is not installed.
    """
    if find_spec("piper") is None:
        raise ValueError(
            f"'{folder}' has no lexicon.txt. Use a model with a lexicon, or install piper-tts "
            "(GPL-3.0), which computes phonemes."
        )
    return phonemizer()
