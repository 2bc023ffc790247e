"""A stand-in for faster-whisper, for tests of the process that it runs in.

It hears the words of the prompt; `endless` takes as long as a hostile recording may.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class WhisperModel:
    """A model."""

    def __init__(self, model: str, **_options: Any) -> None:
        print("loaded", model)
        self.model = SimpleNamespace(is_multilingual=True)
        self.supported_languages = ["de", "en"]

    def transcribe(
        self, _audio: Any, initial_prompt: str | None = None, **_options: Any
    ) -> tuple[Iterator[Any], Any]:
        """Return a segment for each word of the prompt, and the language."""
        return self._segments((initial_prompt or "").split()), SimpleNamespace(language="en")

    def _segments(self, words: list[str]) -> Iterator[Any]:
        for at, word in enumerate(words):
            if word == "endless":
                time.sleep(600)
            yield SimpleNamespace(
                text=f" {word}", start=at, end=at + 1, words=None, avg_logprob=-0.1,
                no_speech_prob=0.0, tokens=[at],
            )  # fmt: skip
