"""Tests of the formats of transcripts."""

from __future__ import annotations

import json

import pytest
from latimer.adapter.audio.languages import NAMES, code_of
from latimer.adapter.audio.transcript import TextStream, Transcribed, body_of
from latimer.backends.speech.base import Segment


def srt(*segments: Segment) -> str:
    """Return segments as subtitles."""
    return body_of(Transcribed(segments, 9.0), "srt").decode()


def test_times_of_subtitles() -> None:
    """Hours have at least two digits, and rounding carries over to seconds and minutes."""
    found = srt(Segment("a", 0.9996, 59.9999), Segment("b", 3_599.9996, 360_000.5))
    times = [line for line in found.splitlines() if "-->" in line]
    assert times == [
        "00:00:01,000 --> 00:01:00,000",
        "01:00:00,000 --> 100:00:00,500",
    ]


def test_text_that_would_end_a_cue() -> None:
    """Line ends and arrows in a text cannot be taken for another cue; empty segments have none."""
    found = srt(Segment(" \n", 0, 1), Segment("a\n\n2\n00:00 --> b ", 1, 2))
    assert found == "1\n00:00:01,000 --> 00:00:02,000\na 2 00:00 -> b\n\n"


def test_every_way_to_cut_a_stream() -> None:
    """For all pieces, the deltas have no space around them, and are the text."""
    text = "  Hello  there, \n you \n"
    for first in range(len(text)):
        for second in range(first, len(text)):
            stream = TextStream()
            pieces = (text[:first], text[first:second], text[second:])
            events = [json.loads(event[6:]) for piece in pieces if (event := stream.feed(piece))]
            assert "".join(one["delta"] for one in events) == text.strip()


def test_usage_of_a_language_model() -> None:
    """A language model counts tokens; others the length of the recording."""
    found = Transcribed([Segment("a", completion_tokens=3, prompt_tokens=9)], 1.2)
    usage = json.loads(body_of(found, "json"))["usage"]
    assert usage == {"type": "tokens", "input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
    usage = json.loads(body_of(Transcribed((), 1.2), "json"))["usage"]
    assert usage == {"type": "duration", "seconds": 2}


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("en", "en"),
        ("English", "en"),
        ("zh-CN", "zh"),
        ("pt_BR", "pt"),
        ("yue", "yue"),
        ("fil-PH", "fil"),
        ("nb-NO", "no"),
        ("jv", "jw"),
        ("iw", "he"),
        ("in", "id"),
        ("xx", ""),
    ],
)
def test_languages(given: str, code: str) -> None:
    """A language is known by its code, with or without a region, and by its English name."""
    assert code_of(given) == code
    assert all(code_of(one) == one for one in NAMES)
