"""Turn the content parts of items into those of chat messages (contract of responses, 2.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ...backends.errors import shortened
from ...schemas.openai.messages import (
    AudioPart,
    ImagePart,
    ImageUrl,
    InputAudio,
    Part,
    TextPart,
)
from ...schemas.openai.response_items import (
    InputAudioPart,
    InputFilePart,
    InputImagePart,
    InputTextPart,
    OutputTextPart,
    RefusalPart,
    UnservedPart,
)
from ..dialects import unsupported
from ..errors import InvalidRequest
from .files import file_text

ItemPart: TypeAlias = (
    InputTextPart
    | InputImagePart
    | InputFilePart
    | InputAudioPart
    | OutputTextPart
    | RefusalPart
    | UnservedPart
)

_AUDIO = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/wave": "wav",
    "audio/mpeg": "mp3",
    "audio/mp3": "mp3",
}


def is_text(content: str | Sequence[ItemPart]) -> bool:
    """Return True for content that consists of text only."""
    return isinstance(content, str) or all(
        isinstance(part, InputTextPart | OutputTextPart | RefusalPart) for part in content
    )


def text_of(content: str | Sequence[ItemPart]) -> str:
    """Return the text of content that consists of text only."""
    if isinstance(content, str):
        return content
    return "".join(
        [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]  # type: ignore[union-attr]
    )


def chat_content(
    content: str | Sequence[ItemPart], path: str, pdf_texts: Mapping[str, str]
) -> str | list[Part]:
    """Return content as chat messages have it.

    Args:
        path: the path of the content in the request, for errors.
        pdf_texts: the text of each PDF file, by its data as the client sent it.

    Raises:
        InvalidRequest: a part is malformed, or nothing here can read it.
    """
    if is_text(content):
        return text_of(content)
    return [_part(part, f"{path}[{index}]", pdf_texts) for index, part in enumerate(content)]  # type: ignore[arg-type]


def own_path(part: object, path: str) -> tuple[str, str]:
    """Return the path of a part's data in a chat message, and in the request.

    Args:
        path: the path of the part in the request.
    """
    if isinstance(part, ImagePart):
        return ".image_url.url", f"{path}.image_url"
    return ".input_audio.data", f"{path}.input_audio.data"


def _part(part: ItemPart, path: str, pdf_texts: Mapping[str, str]) -> Part:
    if isinstance(part, InputImagePart):
        return _image(part, path)
    if isinstance(part, InputFilePart):
        return TextPart(type="text", text=file_text(part, path, pdf_texts))
    if isinstance(part, InputAudioPart):
        return AudioPart(type="input_audio", input_audio=_audio(part, path))
    if isinstance(part, UnservedPart):
        raise unsupported(f"{path}.type", f"Omit parts of type '{shortened(part.type)}'.")
    return TextPart(type="text", text=text_of([part]))


def _image(part: InputImagePart, path: str) -> ImagePart:
    if part.image_url is None:
        if part.file_id is not None:
            raise unsupported(
                f"{path}.file_id", "Send the image as a data URL, 'data:image/png;base64,…'."
            )
        raise _missing(f"{path}.image_url")
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))


def _audio(part: InputAudioPart, path: str) -> InputAudio:
    if part.input_audio is not None:
        return part.input_audio
    if part.audio_url is None:
        raise _missing(f"{path}.input_audio")
    head, _, data = part.audio_url.partition(",")
    kind = _AUDIO.get(head.removeprefix("data:").partition(";")[0].lower())
    if not head.startswith("data:") or not head.endswith(";base64") or kind is None:
        raise unsupported(
            f"{path}.audio_url", "Send a data URL, 'data:audio/wav;base64,…' or audio/mpeg."
        )
    return InputAudio(data=data, format=kind)  # type: ignore[arg-type]


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
    )
