"""Turn the content parts of items into those of chat messages (contract of responses, 2.4)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

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

ItemPart: TypeAlias = (
    InputTextPart
    | InputImagePart
    | InputFilePart
    | InputAudioPart
    | OutputTextPart
    | RefusalPart
    | UnservedPart
)

_AS_TEXT = "Send the content of the file as text."
_TEXT_ONLY = "Only text files are read. Send the text of the file, or its pages as images."
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


def chat_content(content: str | Sequence[ItemPart], path: str) -> str | list[Part]:
    """Return content as chat messages have it.

    Args:
        path: the path of the content in the request, for errors.

    Raises:
        InvalidRequest: a part is malformed, or nothing here can read it.
    """
    if is_text(content):
        return text_of(content)
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]  # type: ignore[arg-type]


def own_path(part: object, path: str) -> tuple[str, str]:
    """Return the path of a part's data in a chat message, and in the request.

    Args:
        path: the path of the part in the request.
    """
    if isinstance(part, ImagePart):
        return ".image_url.url", f"{path}.image_url"
    return ".input_audio.data", f"{path}.input_audio.data"


def _part(part: ItemPart, path: str) -> Part:
    if isinstance(part, InputImagePart):
        return _image(part, path)
    if isinstance(part, InputFilePart):
        return TextPart(type="text", text=_file(part, path))
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


def _file(part: InputFilePart, path: str) -> str:
    """Return the content of a text file, with its name in front."""
    for name in ("file_id", "file_url"):
        if getattr(part, name) is not None:
            raise unsupported(f"{path}.{name}", _AS_TEXT)
    if part.file_data is None:
        raise _missing(f"{path}.file_data")
    data = _decoded(part.file_data, f"{path}.file_data")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise unsupported(f"{path}.file_data", _TEXT_ONLY) from None
    if "\0" in text or text.startswith("%PDF"):
        raise unsupported(f"{path}.file_data", _TEXT_ONLY)
    label = f"File '{part.filename}':\n" if part.filename else "File:\n"
    return f"{label}{text.removesuffix(chr(10))}\n"


def _decoded(encoded: str, path: str) -> bytes:
    """Return the data of a data: URL, or of base64."""
    if encoded.startswith("data:"):
        head, comma, encoded = encoded.partition(",")
        if comma and not head.endswith(";base64"):
            return unquote_to_bytes(encoded)
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise InvalidRequest(
            f"Invalid '{path}': expected a data URL or base64.", path, "invalid_value"
        ) from None


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
