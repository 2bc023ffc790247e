"""Tests of the runs in which the phonemes of an utterance are computed."""

from __future__ import annotations

import pytest
from latimer.backends.speech.phonemes import MOST, TooLong, runs_of


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("", [0]), ("a" * 300, [300]), ("a" * 301, [300, 1]),
        ("a" * 150 + "," + "a b" * 100, [151, 300]),
        ("a" * 250 + " " + "b" * 100, [251, 100]),
        ("a" * 50 + "," + "b" * 300, [300, 51]),
    ],
)  # fmt: skip
def test_runs_end_at_pauses(text: str, sizes: list[int]) -> None:
    """A run ends behind a comma, else behind a word, else anywhere, and nothing is lost."""
    found = runs_of([list(text)])
    assert [len(run) for run in found] == sizes
    assert "".join("".join(run) for run in found) == text


def test_sentences_stay_apart() -> None:
    """Each sentence begins a run; together they have a limit."""
    assert runs_of([["a"], ["b", "c"]]) == [["a"], ["b", "c"]]
    assert sum(map(len, runs_of([["a"] * (MOST // 2)] * 2))) == MOST
    with pytest.raises(TooLong, match=r"a sentence has 1,501 phonemes, and at most 1,500"):
        runs_of([["a"] * MOST, ["b"]])
