"""A stand-in for piper-tts, for tests of the process that it runs in.

Each word is a sentence, whose letters are its phonemes; a run of phonemes is a tenth of a second of
its speaker's number. A run of one letter more than once is a tenth for each. `crash` ends the
process, `fail` raises, `slow` takes half a second, and `mute` has no sound.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

RATE = 22_050


@dataclass
class SynthesisConfig:
    """The settings of a synthesis."""

    speaker_id: int | None = None


class PiperConfig:
    """The settings of a voice."""

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings."""
        return config


class PiperVoice:
    """A voice."""

    def __init__(self, session: object, config: object) -> None:
        self.session, self.config = session, config

    def phonemize(self, text: str) -> list[list[str]]:
        """Return the letters of each word."""
        return [list(word) for word in text.split()]

    def synthesize(self, text: str, config: SynthesisConfig) -> Iterator[Any]:
        """Yield the audio of each run of phonemes."""
        for run in self.phonemize(text):
            word = "".join(run)
            if word == "crash":
                os._exit(3)
            if word == "fail":
                raise RuntimeError("cannot say fail")
            if word == "slow":
                time.sleep(0.5)
            if word == "mute":
                yield SimpleNamespace(audio_int16_bytes=b"", sample_rate=0)
                continue
            count = RATE // 10 * (len(run) if len(set(run)) == 1 else 1)
            sample = bytes((config.speaker_id or 0, 1))
            yield SimpleNamespace(audio_int16_bytes=sample * count, sample_rate=RATE)
