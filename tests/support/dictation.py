"""A speaker and a transcriber without models, for clients: a tone, and one known sentence."""

from __future__ import annotations

from typing import TypedDict

from latimer.backends.speech.base import Segment, Word
from latimer.conformance.recordings import SENTENCE

from support.engines.listener import Listener
from support.engines.paced_speaker import PacedSpeaker

# Seconds of each word of the sentence.
WORD = 0.24
_WORDS = [Word(f" {word}", WORD * at, WORD * at + 0.2) for at, word in enumerate(SENTENCE.split())]
# The recorded sentence of the conformance suite, in two segments.
SEGMENTS = tuple(
    Segment(
        "".join(word.text for word in words), words[0].start, words[-1].end, words,
        -0.25, 0.01, (1, 2), "en",
    )
    for words in (_WORDS[:3], _WORDS[3:])
)  # fmt: skip


class Dictation(TypedDict):
    """The options of an adapter that speaks and transcribes."""

    speaker: PacedSpeaker
    transcriber: Listener


def dictation(pause: float = 0.0) -> Dictation:
    """Return the adapter's options for them.

    Args:
        pause: seconds before each spoken sentence.
    """
    return {"speaker": PacedSpeaker(pause=pause), "transcriber": Listener(SEGMENTS)}
