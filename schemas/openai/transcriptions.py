"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations` (contract of audio, 3 and 4).

Their bodies are forms. The models here describe the values that the texts of a form stand for.
"""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from .common import Array, Request

PlainFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranslationRequest(Request):
    """Body of `POST /v1/audio/translations`, without its `file`."""

    model: str
    prompt: str | None = None
    response_format: PlainFormat | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None


class TranscriptionRequest(Request):
    """Body of `POST /v1/audio/transcriptions`, without its `file`."""

    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: PlainFormat | Literal["diarized_json"] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    timestamp_granularities: Array[Literal["word", "segment"]] | None = None
    stream: bool | None = None
    # Without effect here; they are listed.
    include: Array[Literal["logprobs"]] | None = None
    chunking_strategy: str | None = None
    known_speaker_names: Array[str] | None = None
    known_speaker_references: Array[str] | None = None
    languages: Array[str] | None = None
    keywords: Array[str] | None = None


class TranslationForm(TranslationRequest):
    """The form of a translation."""

    file: bytes


class TranscriptionForm(TranscriptionRequest):
    """The form of a transcription."""

    file: bytes


class DurationUsage(TypedDict):
    """The length of the recording; `seconds` is rounded up."""

    type: Literal["duration"]
    seconds: int


class TokenUsage(TypedDict):
    """The tokens of a language model that transcribes."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class TranscriptSegment(TypedDict):
    """A part of a transcript with its times in seconds.

    `seek` is its start in hundredths of a second. Numbers that the transcriber does not know are 0.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(TypedDict):
    """A word with its times in seconds."""

    word: str
    start: float
    end: float


class Transcript(TypedDict):
    """The reply: the text and the usage; a translation has the text only.

    The other fields are those of `verbose_json`. `language` is an English name, in lower case.
    """

    text: str
    usage: NotRequired[DurationUsage | TokenUsage]
    task: NotRequired[Literal["transcribe", "translate"]]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[TranscriptSegment]]
    words: NotRequired[list[TranscriptWord]]


class TranscriptEvent(TypedDict):
    """An event of a stream: a part of the text, or at the end all of it and the usage."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: NotRequired[str]
    text: NotRequired[str]
    usage: NotRequired[dict[str, Any]]
