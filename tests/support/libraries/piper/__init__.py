"""A stand-in for piper-tts, for tests of the process that it runs in.

A tone for each word; `crash` ends the process, `fail` raises, `slow` takes a second.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RATE = 22_050


@dataclass
class SynthesisConfig:
    """The settings of a synthesis."""

    speaker_id: int | None = None
    length_scale: float | None = None


class PiperVoice:
    """A voice."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @staticmethod
    def load(path: Path) -> PiperVoice:
        """Load a voice; an empty file is not one."""
        if not path.read_bytes():
            raise ValueError("not a voice")
        print("loaded", path)
        config = json.loads(Path(f"{path}.json").read_text())
        return PiperVoice(SimpleNamespace(length_scale=config["inference"]["length_scale"]))

    def synthesize(self, text: str, config: SynthesisConfig) -> Iterator[Any]:
        """Yield the audio of each word: a tenth of a second of its speaker's number."""
        for word in text.split():
            if word == "crash":
                os._exit(3)
            if word == "fail":
                raise RuntimeError("cannot say fail")
            if word == "slow":
                time.sleep(0.5)
            count = int(RATE / 10 * (config.length_scale or 1))
            sample = bytes((config.speaker_id or 0, 1))
            yield SimpleNamespace(audio_int16_bytes=sample * count, sample_rate=RATE)
