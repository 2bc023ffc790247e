"""What speaks and transcribes by the values of `--speech` and `--transcription`.

These are libraries, each with its model, and koboldcpp at a URL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

from ..koboldcpp.transcription import transcriber_at
from .base import Transcriber, TranscriberFacts
from .process import LibraryTranscriber


class UnknownLibrary(ValueError):
    """A value that names no library, or one that is not installed; the text says what to do."""


class TranscriberLibrary(NamedTuple):
    """A library that transcribes.

    Args:
        module: its module, which must be there.
        extra: the extra of Latimer that installs it.
        model: the model without one in the value.
        facts: returns what it can do with a model.
    """

    module: str
    extra: str
    model: str
    facts: Callable[[str], TranscriberFacts]


def _whisper(model: str) -> TranscriberFacts:
    """Return the facts of a Whisper model; those whose names end with `.en` know English only."""
    is_english = model.rstrip("/").endswith(".en")
    return TranscriberFacts(
        f"faster-whisper:{model.rstrip('/').rpartition('/')[2]}",
        has_segments=True,
        has_words=True,
        translates=not is_english,
        takes_language=True,
        takes_prompt=True,
        takes_temperature=True,
        language="en" if is_english else "",
    )


def _sphinx(_model: str) -> TranscriberFacts:
    return TranscriberFacts("pocketsphinx", has_segments=True, has_words=True, language="en")


TRANSCRIBERS: Mapping[str, TranscriberLibrary] = {
    "faster-whisper": TranscriberLibrary("faster_whisper", "transcription", "base", _whisper),
    "pocketsphinx": TranscriberLibrary("pocketsphinx", "pocketsphinx", "", _sphinx),
}


def transcriber_of(value: str) -> Transcriber:
    """Return what a value of `--transcription` names: `NAME`, `NAME:MODEL` or a URL.

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
    if find_spec(library.module) is None:
        raise UnknownLibrary(
            f"'{name}' is not installed. Install it with: pip install 'latimer[{library.extra}]'."
        )
    model = model or library.model
    return LibraryTranscriber(name, model, library.facts(model))
