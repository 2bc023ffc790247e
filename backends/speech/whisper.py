"""Whisper by faster-whisper (MIT), in the process of `worker`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .base import Recording, Segment, Word

# The library's own default; more threads hardly help.
_MOST_THREADS = 4


class Whisper:
    """A Whisper model.

    Args:
        model: a folder, or a name on Hugging Face's hub or of faster-whisper (`base`, `large-v3`),
            which is downloaded on first use.
    """

    def __init__(self, model: str) -> None:
        from faster_whisper import WhisperModel

        # With more threads than cores, they wait for each other longer than they compute.
        threads = min(os.cpu_count() or 1, _MOST_THREADS)
        self._model = WhisperModel(model, device="auto", compute_type="auto", cpu_threads=threads)

    def transcribe(self, recording: Recording) -> Iterator[Segment]:
        """Yield the segments of a recording, each of which has times."""
        import numpy as np

        audio = np.frombuffer(recording.samples, np.dtype("<i2")).astype(np.float32) / 32_768
        options = {"temperature": recording.temperature} if recording.temperature else {}
        segments, info = self._model.transcribe(
            audio,
            language=recording.language or None,
            task="translate" if recording.translate else "transcribe",
            initial_prompt=recording.prompt or None,
            word_timestamps=recording.words,
            **options,
        )
        for one in segments:
            yield Segment(
                one.text,
                float(one.start),
                # A last segment can end behind the recording.
                min(float(one.end), recording.seconds),
                tuple(
                    Word(word.word, float(word.start), float(word.end)) for word in one.words or ()
                ),
                float(one.avg_logprob),
                float(one.no_speech_prob),
                tuple(map(int, one.tokens)),
                info.language,
            )
