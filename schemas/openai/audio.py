"""`POST /v1/audio/speech` and `GET /v1/audio/voices` (contract of audio, section 2).

The second is not an endpoint of OpenAI; local servers share its shape.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from .. import limits
from .common import Request, VoiceName, empty_string, too_long

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


def _check_text(value: object) -> object:
    if isinstance(value, str) and len(value) > limits.SPOKEN.maximum:
        raise too_long("string", limits.SPOKEN.maximum, len(value))
    return value


def _check_input(value: object) -> object:
    if value == "":
        raise empty_string()
    return _check_text(value)


class SpeechRequest(Request):
    """Body of `POST /v1/audio/speech`.

    `voice` is one of the server's voices (`GET /v1/audio/voices`), or one of OpenAI's, for which
    one of the server's stands.
    """

    input: Annotated[str, BeforeValidator(_check_input)]
    voice: VoiceName
    model: str | None = None
    instructions: Annotated[str | None, BeforeValidator(_check_text)] = None
    response_format: SpeechFormat | None = None
    speed: Annotated[float, Field(ge=0.25, le=4.0)] | None = None
    stream_format: Literal["audio", "sse"] | None = None


class SpeechUsage(TypedDict):
    """Token counts; zero, because the speaker of a local server has no tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(TypedDict):
    """A piece of the audio, as base64; each is decoded by itself."""

    type: Literal["speech.audio.delta"]
    audio: str


class SpeechDone(TypedDict):
    """The last event of a stream."""

    type: Literal["speech.audio.done"]
    usage: SpeechUsage


SpeechEvent = SpeechDelta | SpeechDone


class SpokenVoice(TypedDict):
    """A voice of the server; `language` is an ISO 639-1 code, or empty if it is not known."""

    id: str
    name: str
    language: str


class VoiceList(TypedDict):
    """The voices of the server; the first is the default."""

    object: Literal["list"]
    model: str
    voices: list[SpokenVoice]
