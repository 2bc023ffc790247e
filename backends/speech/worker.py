"""The process in which a library speaks or transcribes (`child`), started as a script.

Libraries hold the interpreter for long, cannot be interrupted, and can crash. The process loads its
model once. Standard input has jobs: a line of JSON, then the samples of a recording. Standard
output has a line of JSON for each segment, or for each piece of audio and then its samples; and a
line with `end` or `error` after the last. The first line has what the library can do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import IO, Any, Protocol

from .base import Pcm, Recording, Segment, SpeakerFacts, TranscriberFacts, Utterance
from .phonemes import TooLong


class Listener(Protocol):
    """A library with its model, which transcribes one recording at a time.

    Attributes:
        facts: what it can do.
    """

    facts: TranscriberFacts

    def transcribe(self, recording: Recording) -> Iterator[Segment]:
        """Yield the segments as they are known."""
        ...


class Reader(Protocol):
    """A library with its model, which speaks one utterance at a time.

    Attributes:
        facts: what it can do.
    """

    facts: SpeakerFacts

    def speak(self, utterance: Utterance) -> Iterator[Pcm]:
        """Yield the audio in pieces as it is known."""
        ...


# The module and the name of each library's class, which gets the model.
CLASSES: Mapping[str, tuple[str, str]] = {
    "faster-whisper": ("whisper", "Whisper"),
    "piper": ("piper", "Piper"),
    "pocketsphinx": ("sphinx", "Sphinx"),
    "sherpa-onnx": ("sherpa", "Sherpa"),
}


def main() -> None:
    """Load a library and its model, the arguments, and work until standard input ends."""
    name, model = sys.argv[1:]
    # What a library prints must not be taken for a reply.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, title = CLASSES[name]
    try:
        make: Callable[[str], Any] = getattr(import_module(f".{module}", __package__), title)
        library = make(model)
    except Exception as error:
        _write(out, {"error": _in_words(error)})
        return
    facts = {key: value for key, value in asdict(library.facts).items() if key != "inexact"}
    _write(out, {"facts": facts})
    speaks = hasattr(library, "speak")
    source = sys.stdin.buffer
    while line := source.readline():
        try:
            if speaks:
                _speak(library, Utterance(**json.loads(line)), out)
            else:
                _transcribe(library, json.loads(line), source, out)
        except TooLong as error:
            _write(out, {"error": str(error), "is_input": True})
        except Exception as error:
            # Libraries do not document what they raise.
            _write(out, {"error": _in_words(error)})
        else:
            _write(out, {"end": True})


def _transcribe(library: Listener, job: dict[str, Any], source: IO[bytes], out: IO[bytes]) -> None:
    samples = source.read(job.pop("size"))
    for segment in library.transcribe(Recording(samples, **job)):
        _write(out, {"segment": asdict(segment)})


def _speak(library: Reader, utterance: Utterance, out: IO[bytes]) -> None:
    for pcm in library.speak(utterance):
        # For words that it does not know, sherpa-onnx returns no samples, with a rate of 0.
        if pcm.samples:
            _write(out, {"size": len(pcm.samples), "rate": pcm.rate}, pcm.samples)


def _write(out: IO[bytes], message: Mapping[str, Any], samples: bytes = b"") -> None:
    out.write(json.dumps(message).encode() + b"\n" + samples)
    out.flush()


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
