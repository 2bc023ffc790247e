"""Whisper by faster-whisper (MIT), in the process of `worker`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .base import Recording, Segment, TranscriberFacts, Word, name_of

# The library's own default; more threads hardly help.
_MOST_THREADS = 4
# The languages of Whisper, which programs that run its models do not all report.
LANGUAGES = (
    "en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar", "sv",
    "it", "id", "hi", "fi", "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu", "ta", "no",
    "th", "ur", "hr", "bg", "lt", "la", "mi", "ml", "cy", "sk", "te", "fa", "lv", "bn", "sr",
    "az", "sl", "kn", "et", "mk", "br", "eu", "is", "hy", "ne", "mn", "bs", "kk", "sq", "sw",
    "gl", "mr", "pa", "si", "km", "sn", "yo", "so", "af", "oc", "ka", "be", "tg", "sd", "gu",
    "am", "yi", "lo", "uz", "fo", "ht", "ps", "tk", "nn", "mt", "sa", "lb", "my", "bo", "tl",
    "mg", "as", "tt", "haw", "ln", "ha", "ba", "jw", "su", "yue",
)  # fmt: skip


class Whisper:
    """A Whisper model.

    Args:
        model: a folder, or a name on Hugging Face's hub or of faster-whisper (`base`, `large-v3`),
            which is downloaded on first use.

    Attributes:
        facts: what it can do; some models know English only.
    """

    def __init__(self, model: str) -> None:
        from faster_whisper import WhisperModel

        # With more threads than cores, they wait for each other longer than they compute.
        threads = min(os.cpu_count() or 1, _MOST_THREADS)
        self._model = WhisperModel(model, device="auto", compute_type="auto", cpu_threads=threads)
        self.facts = TranscriberFacts(
            name_of("faster-whisper", model),
            has_segments=True,
            has_words=True,
            translates=self._model.model.is_multilingual,
            takes_language=True,
            takes_prompt=True,
            takes_temperature=True,
            languages=tuple(self._model.supported_languages),
        )

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
