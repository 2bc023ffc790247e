"""Tests of the speaker and the voice that a request gets."""

from __future__ import annotations

import pytest
from latimer.adapter.audio.voices import OPENAI_VOICES, ChosenVoice, voice_for
from latimer.adapter.errors import InvalidRequest
from latimer.backends.speech.base import SpeakerFacts, Voice

FACTS = SpeakerFacts("tone", [Voice("low"), Voice("high"), Voice("nova")])


@pytest.mark.parametrize(
    ("voice", "found"),
    [
        ("high", ChosenVoice("high", True)),
        ({"id": "high"}, ChosenVoice("high", True)),
        ("nova", ChosenVoice("nova", True)),
        ("alloy", ChosenVoice("low", False)),
        ("ash", ChosenVoice("high", False)),
        ({"id": "cedar"}, ChosenVoice("low", False)),
    ],
)
def test_own_voices_come_before_those_of_openai(
    voice: str | dict[str, str], found: ChosenVoice
) -> None:
    """A name of the speaker is exact; one of OpenAI's has the same voice each time, inexactly."""
    assert voice_for(FACTS, voice, "audio.voice") == found


def test_each_voice_of_openai_is_spoken_by_one_voice() -> None:
    """A speaker with a single voice speaks for all thirteen."""
    facts = SpeakerFacts("tone", [Voice("only")])
    assert {voice_for(facts, name, "voice").name for name in OPENAI_VOICES} == {"only"}


@pytest.mark.parametrize(
    ("voice", "path", "words"),
    [
        ("bass", "voice", "Supported values are: 'low', 'high', 'nova'"),
        ({"id": "bass"}, "voice.id", "Supported values are: 'low', 'high', 'nova'"),
        ({}, "voice.id", "Missing required parameter: 'voice.id'"),
        ({"id": 5}, "voice.id", "expected a string, but got an integer"),
    ],
)
def test_an_unknown_voice_is_refused(voice: object, path: str, words: str) -> None:
    """The error names the field and lists the voices."""
    with pytest.raises(InvalidRequest) as caught:
        voice_for(FACTS, voice, "voice")  # type: ignore[arg-type]
    assert caught.value.param == path
    assert words in str(caught.value.message)
