"""The phonemes of an utterance, cut into runs: what a voice computes at once cannot be interrupted.

A text has as many phonemes as its words need when they are spoken: a sign such as `%` has eight,
and a letter that the language does not know is spelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# The phonemes of an utterance at most, which are two minutes of speech. Plain text has 400.
MOST = 1_500
# Those of a run at most, and at least if a pause allows it.
_RUN, _LEAST = 300, 100
# Where a run may end, the better places first.
_PAUSES = (",;:–—、，", " ")


class TooLong(ValueError):
    """An utterance that takes too long to speak."""


def runs_of(sentences: Iterable[list[str]]) -> list[list[str]]:
    """Return sentences in runs of at most `_RUN` phonemes.

    Raises:
        TooLong: they have more than `MOST` phonemes.
    """
    found = list(sentences)
    size = sum(map(len, found))
    if size > MOST:
        raise TooLong(
            f"a sentence has {size:,} phonemes, and at most {MOST:,} are spoken. Use shorter "
            "sentences, with fewer signs, in the language of the voice."
        )
    return [run for sentence in found for run in _cut(sentence)]


def _cut(sentence: list[str]) -> Iterator[list[str]]:
    while len(sentence) > _RUN:
        end = next(filter(None, (_last(sentence, marks) for marks in _PAUSES)), _RUN)
        yield sentence[:end]
        sentence = sentence[end:]
    yield sentence


def _last(sentence: list[str], marks: str) -> int:
    """Return the place after the last mark of a run; 0 if it has none."""
    places = range(_RUN, _LEAST, -1)
    return next((place for place in places if sentence[place - 1] in marks), 0)
