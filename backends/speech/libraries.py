"""Speakers and transcribers by the values of `--speech` and `--transcription`.

These are libraries, each with its model, and koboldcpp at a URL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ..koboldcpp.speech import speaker_at
from ..koboldcpp.transcription import transcriber_at
from .base import Speaker, Transcriber
from .process import LibraryTranscriber
from .speaking import LibrarySpeaker


class UnknownLibrary(ValueError):
    """A value that names no library, or one that is not installed; the text says what to do."""


class SpeakerLibrary(NamedTuple):
    """A library that speaks.

    Args:
        module: its module, which must be there.
        extra: the extra of Latimer that installs it.
        model: the word for its model, which the value must have.
    """

    module: str
    extra: str
    model: str


SPEAKERS: Mapping[str, SpeakerLibrary] = {
    "piper": SpeakerLibrary("piper", "piper", "VOICE.onnx"),
    "sherpa-onnx": SpeakerLibrary("sherpa_onnx", "speech", "FOLDER"),
}


def speaker_of(value: str) -> Speaker:
    """Return what a value of `--speech` names: `NAME:MODEL` or a URL.

    Raises:
        UnknownLibrary: no library has the name, it is not installed, or the model is missing.
    """
    if value.startswith(("http://", "https://")):
        return speaker_at(value)
    name, _, model = value.partition(":")
    library = SPEAKERS.get(name)
    if library is None:
        known = ", ".join(f"{one}:{row.model}" for one, row in SPEAKERS.items())
        raise UnknownLibrary(
            f"no library '{name}' speaks. Expected one of {known}, or the URL of a koboldcpp."
        )
    if not model:
        raise UnknownLibrary(f"'{name}' needs a model: {name}:{library.model}.")
    _check_installed(name, library.module, library.extra)
    if not Path(model).expanduser().exists():
        raise UnknownLibrary(f"'{model}' does not exist.")
    return LibrarySpeaker(name, model)


def _check_installed(name: str, module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise UnknownLibrary(
            f"'{name}' requires the extra '{extra}': run pip install '.[{extra}]' in a clone of "
            "Latimer."
        )


class TranscriberLibrary(NamedTuple):
    """A library that transcribes.

    Args:
        module: its module, which must be there.
        extra: the extra of Latimer that installs it.
        model: the model without one in the value.
    """

    module: str
    extra: str
    model: str


TRANSCRIBERS: Mapping[str, TranscriberLibrary] = {
    "faster-whisper": TranscriberLibrary("faster_whisper", "transcription", "base"),
    "pocketsphinx": TranscriberLibrary("pocketsphinx", "pocketsphinx", ""),
}


def transcriber_of(value: str, *, offline: bool = False) -> Transcriber:
    """Return what a value of `--transcription` names: `NAME`, `NAME:MODEL` or a URL.

    Args:
        offline: True if a model on a hub must be in its cache.

    Raises:
        UnknownLibrary: no library has the name, or it is not installed.
    """
    if value.startswith(("http://", "https://")):
        return transcriber_at(value)
    name, _, model = value.partition(":")
    library = TRANSCRIBERS.get(name)
    if library is None:
        raise UnknownLibrary(
            f"no library '{name}' transcribes. Expected one of {', '.join(TRANSCRIBERS)}, or the "
            "URL of a koboldcpp."
        )
    _check_installed(name, library.module, library.extra)
    # A shell expands `~` at the beginning of a word only.
    # The library takes names on the hub without the prefix that other options need.
    path = os.path.expanduser(model.removeprefix("hf:") or library.model)
    return LibraryTranscriber(name, path, offline=offline)
