"""The speaker of a request, and its voice (contract of audio, sections 1 and 2)."""

from __future__ import annotations

from typing import NamedTuple

from ...backends.errors import Unsupported, shortened
from ...backends.speech.base import Speaker, SpeakerFacts
from ...schemas.openai.audio import SpokenVoice
from ...schemas.openai.common import VoiceId
from ..admission import AudioUse
from ..errors import InvalidRequest
from ..model_entry import ServedModel
from ..service import Service

OPENAI_MODELS = frozenset({"tts-1", "tts-1-hd", "gpt-4o-mini-tts"})
# The voices of OpenAI. A speaker's own voices stand for them in this order, again from its first
# one if it has fewer.
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "onyx", "nova", "sage", "shimmer", "verse",
    "marin", "cedar",
)  # fmt: skip
# The most voices that an error lists.
_LISTED = 60


class ChosenVoice(NamedTuple):
    """One of the speaker's voices.

    Args:
        is_exact: False if it stands for one of OpenAI's voices.
    """

    name: str
    is_exact: bool


async def _speaks(served: ServedModel) -> bool:
    return await served.backend.speaker() is not None


def speech_use(service: Service, path: str) -> AudioUse:
    """Return how a speech request finds its model.

    Args:
        path: the path of the request, for errors.
    """
    return AudioUse(service.speaker, _speaks, OPENAI_MODELS, _nothing(path))


async def speaker_for(service: Service, served: ServedModel, path: str = "") -> Speaker:
    """Return what speaks for a model.

    Args:
        path: the path of the request, if it asks for nothing but speech.

    Raises:
        Unsupported: nothing speaks, and the request is a chat.
        InvalidRequest: nothing speaks; 404, as for a path that is not served.
    """
    speaker = service.speaker or await served.backend.speaker()
    if speaker is not None:
        return speaker
    if path:
        raise _nothing(path)
    hint = "Request text only, or start the server with --speech."
    raise Unsupported("modalities", served.capabilities.engine, hint)


def _nothing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"This server does not serve {path}, because nothing here speaks. Start it with --speech, "
        "or with an engine that speaks.",
        code="unsupported_endpoint",
        status=404,
    )


def voice_for(facts: SpeakerFacts, voice: str | VoiceId, path: str, strict: bool) -> ChosenVoice:
    """Return the voice that a request names.

    Args:
        path: the field of the voice, for errors.
        strict: reject OpenAI's voices, for which others stand.

    Raises:
        InvalidRequest: the speaker has no such voice; the error lists those it has.
        Unsupported: the same, for one of OpenAI's.
    """
    if not isinstance(voice, str):
        path, voice = f"{path}.id", voice.id
    names = [one.name for one in facts.voices]
    if voice in names:
        return ChosenVoice(voice, True)
    listed = ", ".join(f"'{shortened(name)}'" for name in names[:_LISTED])
    more = "" if len(names) <= _LISTED else f", and {len(names) - _LISTED} more"
    if voice in OPENAI_VOICES:
        if strict:
            hint = f"'{voice}' is a voice of OpenAI, for which --strict lets no other stand. "
            raise Unsupported(path, facts.name, f"{hint}Use one of: {listed}{more}.")
        return ChosenVoice(names[OPENAI_VOICES.index(voice) % len(names)], False)
    raise InvalidRequest(
        f"Invalid value: '{shortened(voice)}'. Supported values are: {listed}{more}. OpenAI's "
        "voices are accepted, too, and are spoken with one of these.",
        path,
        "invalid_value",
    )


def voices_of(facts: SpeakerFacts) -> list[SpokenVoice]:
    """Return the voices of a speaker as clients see them."""
    return [{"id": one.name, "name": one.name, "language": one.language} for one in facts.voices]
