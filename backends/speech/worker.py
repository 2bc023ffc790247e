"""The process in which a library transcribes (`process`), started as a script.

Libraries hold the interpreter for long, cannot be interrupted, and can crash. The process loads its
model once. Standard input has jobs: a line of JSON, then samples. Standard output has a line of
JSON for each segment, and one with `end` or `error` after the last.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import IO, Any, Protocol

from .base import Recording, Segment


class Library(Protocol):
    """A library with its model, which transcribes one recording at a time."""

    def transcribe(self, recording: Recording) -> Iterator[Segment]:
        """Yield the segments as they are known."""
        ...


# The module and the name of each library's class, which gets the model.
CLASSES: Mapping[str, tuple[str, str]] = {
    "faster-whisper": ("whisper", "Whisper"),
    "pocketsphinx": ("sphinx", "Sphinx"),
}


def main() -> None:
    """Load a library and its model, the arguments, and transcribe until standard input ends."""
    name, model = sys.argv[1:]
    # What a library prints must not be taken for a reply.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    module, title = CLASSES[name]
    try:
        make: Callable[[str], Library] = getattr(import_module(f".{module}", __package__), title)
        library = make(model)
    except Exception as error:
        _write(out, {"error": _in_words(error)})
        return
    _write(out, {"end": True})
    source = sys.stdin.buffer
    while line := source.readline():
        job = json.loads(line)
        samples = source.read(job.pop("size"))
        try:
            for segment in library.transcribe(Recording(samples, **job)):
                _write(out, {"segment": asdict(segment)})
        except Exception as error:
            # Libraries do not document what they raise.
            _write(out, {"error": _in_words(error)})
        else:
            _write(out, {"end": True})


def _write(out: IO[bytes], message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message).encode() + b"\n")


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
