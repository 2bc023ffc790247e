"""Tests of cutting recordings, and of joining the texts of their pieces."""

from __future__ import annotations

import io
import wave

import pytest
from latimer.backends.speech.pieces import cut, joined, wav_of
from support.sounds import tone


def test_a_recording_is_cut_where_it_is_quiet() -> None:
    """A piece ends in the pause of the last third of its length, and nothing is lost."""
    samples = tone(8) + bytes(9_600) + tone(8) + bytes(9_600) + tone(3)
    pieces = [*cut(samples, 10)]
    assert b"".join(pieces) == samples
    seconds = [len(piece) / 32_000 for piece in pieces]
    assert seconds == pytest.approx([8.15, 8.3, 3.15], abs=0.15)


def test_a_recording_without_pauses() -> None:
    """Without a pause, a piece is at most as long as it may be."""
    pieces = [*cut(tone(25), 10)]
    assert b"".join(pieces) == tone(25)
    assert all(7 * 32_000 <= len(piece) <= 10 * 32_000 for piece in pieces[:-1])
    assert all(len(piece) % 2 == 0 for piece in pieces)


def test_a_short_recording_is_one_piece() -> None:
    """A recording that is short enough, or empty, is not cut."""
    assert [*cut(b"", 1)] == [b""]
    assert [*cut(tone(1), 1)] == [tone(1)]


def test_wav_files() -> None:
    """Python reads the file as what it was made of."""
    with wave.open(io.BytesIO(wav_of(tone(1)))) as file:
        assert file.getparams()[:4] == (1, 2, 16_000, 16_000)
        assert file.readframes(16_000) == tone(1)


@pytest.mark.parametrize(
    ("before", "text", "found"),
    [
        ("", " a ", "a "),
        ("a", "b", " b"),
        ("你好。", "世界", "世界"),
        ("สวัสดี", "ครับ", "ครับ"),
        ("a", "  ", ""),
    ],
)
def test_texts_are_joined(before: str, text: str, found: str) -> None:
    """A space is between two texts, except in scripts without spaces."""
    assert joined(before, text) == found
