"""Tests of the frames of texts over a WebSocket."""

from __future__ import annotations

import pytest
from latimer.adapter.text_frames import frames_of, head_of, starts, with_end
from support.frames import texts_in

SIZES = (0, 1, 125, 126, 127, 4_095, 4_097, 65_535, 65_536, 1 << 20)


def test_frames_have_their_texts() -> None:
    """A client reads the texts of any sizes, in their order."""
    texts = [b"x" * size for size in (*SIZES, 0)]
    assert texts_in(frames_of(texts)) == texts
    assert frames_of([]) == b""


@pytest.mark.parametrize("size", SIZES)
def test_a_start_is_a_head_and_the_first_bytes(size: int) -> None:
    """The size of a frame is that of its start, of what is always there, and of the rest."""
    start = starts(b"abc", 7)
    # The second time it is kept.
    for _ in range(2):
        assert start(size) == head_of(3 + 7 + size) + b"abc"


@pytest.mark.parametrize("size", [one for one in SIZES if one])
@pytest.mark.parametrize("end", [b"}", b',"headers":{}}', b"x" * 70_000])
def test_the_first_text_gets_another_end(size: int, end: bytes) -> None:
    """The last byte of the first text is replaced, and other frames stay as they are."""
    texts = [b"x" * size, b"{}", b""]
    assert texts_in(with_end(frames_of(texts), end)) == [texts[0][:-1] + end, *texts[1:]]
