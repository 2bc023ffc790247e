"""English by PocketSphinx (BSD), whose package has its model, in the process of `worker`.

It needs little memory and is much less exact than Whisper.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .base import TRANSCRIBED_RATE, Recording, Segment, TranscriberFacts, Word, name_of
from .pieces import cut

# Seconds of a recording that are decoded together, and of silence that ends a segment.
_PIECE, _PAUSE = 15.0, 0.4
# Frames of a decoder's second.
_FRAMES = 100
# Silence and noises, and the number of a pronunciation.
_FILLER, _VARIANT = re.compile(r"[<\[+]"), re.compile(r"\(\d+\)$")


class Sphinx:
    """The decoder.

    Args:
        model: empty for the model of the package; or the folder of another acoustic model, with
            `model.dict` and `model.lm.bin` in it.
    """

    def __init__(self, model: str) -> None:
        from pocketsphinx import Decoder

        own = {"hmm": model, "dict": f"{model}/model.dict", "lm": f"{model}/model.lm.bin"}
        self._decoder = Decoder(
            samprate=float(TRANSCRIBED_RATE), loglevel="FATAL", **(own if model else {})
        )
        self.facts = TranscriberFacts(
            name_of("pocketsphinx", model), has_segments=True, has_words=True, languages=("en",)
        )

    def transcribe(self, recording: Recording) -> Iterator[Segment]:
        """Yield the words between pauses; every segment has times."""
        start = 0.0
        # It adapts to what it hears, and would hear the same recording differently the next time.
        self._decoder.reinit_feat()
        for samples in cut(recording.samples, _PIECE):
            for words in _phrases(self._words(samples, start)):
                text = "".join([word.text for word in words])
                yield Segment(text, words[0].start, words[-1].end, words if recording.words else ())
            start += len(samples) / (2 * TRANSCRIBED_RATE)

    def _words(self, samples: bytes, start: float) -> Iterator[Word]:
        decoder = self._decoder
        decoder.start_utt()
        decoder.process_raw(samples, full_utt=True)
        decoder.end_utt()
        for one in decoder.seg() or ():
            if not _FILLER.match(one.word):
                begin, end = one.start_frame / _FRAMES, (one.end_frame + 1) / _FRAMES
                yield Word(f" {_VARIANT.sub('', one.word)}", start + begin, start + end)


def _phrases(words: Iterator[Word]) -> Iterator[Sequence[Word]]:
    """Yield words that no pause separates."""
    phrase: list[Word] = []
    for word in words:
        if phrase and word.start - phrase[-1].end > _PAUSE:
            yield phrase
            phrase = []
        phrase.append(word)
    if phrase:
        yield phrase
