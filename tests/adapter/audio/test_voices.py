"""Tests of the speaker and the voice that a request gets."""

from __future__ import annotations

import pytest
from latimer.adapter.audio.voices import OPENAI_VOICES, ChosenVoice, voice_for
from latimer.adapter.errors import InvalidRequest
from latimer.backends.errors import Unsupported
from latimer.backends.speech.base import SpeakerFacts, Voice
from latimer.schemas.openai.common import VoiceId

FACTS = SpeakerFacts("tone", [Voice("low"), Voice("high"), Voice("nova")])


@pytest.mark.parametrize(
    ("voice", "found"),
    [
        ("high", ChosenVoice("high", True)),
        (VoiceId(id="high"), ChosenVoice("high", True)),
        ("nova", ChosenVoice("nova", True)),
        ("alloy", ChosenVoice("low", False)),
        ("ash", ChosenVoice("high", False)),
        (VoiceId(id="cedar"), ChosenVoice("low", False)),
    ],
)
def test_own_voices_come_before_those_of_openai(voice: str | VoiceId, found: ChosenVoice) -> None:
    """A name of the speaker is exact; one of OpenAI's has the same voice each time, inexactly."""
    assert voice_for(FACTS, voice, "audio.voice", strict=False) == found


def test_strict_lets_no_voice_stand_for_another() -> None:
    """The error names the speaker, and lists its voices."""
    with pytest.raises(Unsupported) as caught:
        voice_for(FACTS, "alloy", "audio.voice", strict=True)
    assert (caught.value.param, caught.value.engine) == ("audio.voice", "tone")
    assert "Use one of: 'low', 'high', 'nova'." in caught.value.hint
    assert voice_for(FACTS, "nova", "voice", strict=True).is_exact


def test_each_voice_of_openai_is_spoken_by_one_voice() -> None:
    """A speaker with a single voice speaks for all thirteen."""
    facts = SpeakerFacts("tone", [Voice("only")])
    assert {voice_for(facts, name, "voice", strict=False).name for name in OPENAI_VOICES} == {
        "only"
    }


@pytest.mark.parametrize(
    ("voice", "path", "words"),
    [
        ("bass", "voice", "Supported values are: 'low', 'high', 'nova'"),
        (VoiceId(id="bass"), "voice.id", "Supported values are: 'low', 'high', 'nova'"),
    ],
)
def test_an_unknown_voice_is_refused(voice: str | VoiceId, path: str, words: str) -> None:
    """The error names the field and lists the voices."""
    with pytest.raises(InvalidRequest) as caught:
        voice_for(FACTS, voice, "voice", strict=False)
    assert caught.value.param == path
    assert words in str(caught.value.message)
