"""Drafts by a smaller model with the same vocabulary (`--draft-model`).

The smaller model evaluates the same sequences in a context of its own, and drafts its most likely
tokens. All sequences get their drafts together: each step decodes a token of every sequence. What
was evaluated of a sequence stays in the context, so only its new tokens are evaluated next time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import EngineError
from .library import Context, DecodeFailed, LoadedModel
from .options import Options
from .states import common
from .vocabulary import Vocabulary

# The tokens by which vocabularies may differ in size, as in llama.cpp: some models pad theirs.
PADDING = 128
# The weight of the latest step in the average duration.
_WEIGHT = 0.1
# The share of its duration that is believed after each time that a draft was not worth it.
_DOUBT = 0.99


class Wanted(NamedTuple):
    """A sequence, its tokens, and the length of the draft that it needs."""

    sequence: int
    history: list[int]
    length: int


class DraftModel:
    """A model that drafts; only the engine's thread may use it.

    Args:
        options: the options of the larger model; the smaller one gets no LoRA adapters.
        length: the cells of the KV cache.
        vocabulary: the vocabulary of the larger model.

    Raises:
        EngineError: the file cannot be loaded, or it cannot draft for the larger model.
    """

    def __init__(self, path: Path, options: Options, length: int, vocabulary: Vocabulary) -> None:
        if not path.is_file():
            raise EngineError(f"There is no draft model at {path}.")
        options = replace(options, lora=())
        self._model = LoadedModel(path, options)
        try:
            self._common = _common_size(path, self._model, vocabulary)
            self._context = Context(self._model, options, length)
        except EngineError:
            self._model.close()
            raise
        self._cells = length
        self._ends = vocabulary.ends
        # The tokens of each sequence that are in the KV cache.
        self._known: dict[int, list[int]] = {}
        # The average duration of a step without a prompt.
        self.seconds = 0.0

    def propose(self, wanted: Sequence[Wanted], threads: int) -> dict[int, list[int]]:
        """Return drafts by sequence; a sequence with a long prompt gets its first one later."""
        if threads != self._context.threads:
            self._context.use_threads(threads)
        wanted = self._that_fit(wanted)
        drafts: dict[int, list[int]] = {}
        try:
            self._catch_up(wanted, drafts)
            while growing := [one.sequence for one in wanted if self._grows(one, drafts)]:
                self._grow(growing, drafts)
        except DecodeFailed:
            # What the failed batch has left in the KV cache is unknown, and drafts are optional.
            self._remove([*self._known])
            return {}
        return drafts

    def doubt(self) -> None:
        """Believe a little less in the average duration, so that drafts are tried again."""
        self.seconds *= _DOUBT

    def close(self) -> None:
        """Free the context and the weights."""
        self._context.close()
        self._model.close()

    def _that_fit(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Return the sequences for which there are cells, and remove others if they need theirs."""
        fitting, needed = [], 0
        for one in wanted:
            size = len(one.history) + one.length
            if needed + size <= self._cells:
                fitting.append(one)
                needed += size
        others = self._known.keys() - {one.sequence for one in fitting}
        if needed + sum(len(self._known[sequence]) for sequence in others) > self._cells:
            self._remove(others)
        return fitting

    def _remove(self, sequences: Collection[int]) -> None:
        for sequence in sequences:
            self._context.remove(sequence)
            del self._known[sequence]

    def _catch_up(self, wanted: Sequence[Wanted], drafts: dict[int, list[int]]) -> None:
        """Evaluate new tokens, at most a batch; add the first token of the drafts that can begin.

        Args:
            drafts: the drafts by sequence.
        """
        rows: dict[int, int] = {}
        # Short ones first, so that a long prompt does not keep the others waiting.
        for one in sorted(wanted, key=self._missing):
            known = self._known.setdefault(one.sequence, [])
            # The last token is evaluated again if need be, because its logits are needed.
            shared = min(common(known, one.history), len(one.history) - 1)
            if shared < len(known):
                if not self._has_window(one.sequence, shared):
                    shared = 0
                self._context.remove(one.sequence, shared)
                del known[shared:]
            tokens = one.history[shared : shared + self._context.room]
            if not tokens or max(tokens) >= self._common:
                continue
            is_last = shared + len(tokens) == len(one.history)
            row = self._context.add(one.sequence, shared, tokens, int(is_last))
            known += tokens
            if is_last:
                rows[one.sequence] = row
        self._decode(rows, drafts)

    def _has_window(self, sequence: int, length: int) -> bool:
        """Return True if the layers with a window have most of it for the token at a position.

        Each token of a draft may have overwritten one, and a few of them change no good draft.
        """
        window = self._model.window
        return 0 <= self._context.first(sequence) <= max(length - window + window // 8, 0)

    def _missing(self, one: Wanted) -> int:
        return len(one.history) - common(self._known.get(one.sequence, []), one.history)

    def _grows(self, one: Wanted, drafts: dict[int, list[int]]) -> bool:
        """Return True if a draft has begun, and is neither long enough nor at the answer's end."""
        draft = drafts.get(one.sequence, [])
        return 0 < len(draft) < one.length and draft[-1] not in self._ends

    def _grow(self, sequences: Sequence[int], drafts: dict[int, list[int]]) -> None:
        """Add a token to the drafts of some sequences."""
        rows = {}
        for sequence in sequences:
            known, token = self._known[sequence], drafts[sequence][-1]
            rows[sequence] = self._context.add(sequence, len(known), [token], 1)
            known.append(token)
        self._decode(rows, drafts)

    def _decode(self, rows: dict[int, int], drafts: dict[int, list[int]]) -> None:
        """Evaluate the batch, and add the most likely token of each row to its draft."""
        if self._context.is_empty:
            return
        begun = time.perf_counter()
        size = self._context.decode()
        if size <= 2 * len(rows):
            took = time.perf_counter() - begun
            self.seconds += (_WEIGHT if self.seconds else 1.0) * (took - self.seconds)
        for sequence, row in rows.items():
            token = int(self._context.logits(row, 1)[0, : self._common].argmax())
            drafts.setdefault(sequence, []).append(token)


def _common_size(path: Path, model: LoadedModel, vocabulary: Vocabulary) -> int:
    """Return the number of tokens that both vocabularies have.

    Raises:
        EngineError: the model cannot draft for one with this vocabulary.
    """
    if not (model.rolls_back and model.purpose.can_generate):
        raise EngineError(
            f"{path} cannot draft, because llama.cpp cannot remove the tokens of a draft from its "
            "memory. Choose another draft model."
        )
    own = Vocabulary(model)
    size = min(own.size, vocabulary.size)
    is_same = abs(own.size - vocabulary.size) <= PADDING
    is_same = is_same and own.pieces[:size] == vocabulary.pieces[:size]
    is_same = is_same and own.ends == vocabulary.ends
    own.close()
    if not is_same:
        raise EngineError(
            f"{path} has other tokens than the model. Choose a draft model with the same "
            "vocabulary."
        )
    return size
