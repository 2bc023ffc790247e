"""Pictures and sounds of messages (contract 3.2)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote_to_bytes

from ..backends.base import Media, MediaKind, Model
from ..backends.errors import RequestError, UnreadableMedia, Unsupported
from ..schemas.openai.chat import AudioPart, FilePart, ImagePart, Message, RefusalPart, TextPart
from .service import Service

_DATA = re.compile(
    r"data:(?P<type>[^;,]*)(?:;[^;,]*)*?(?P<base64>;base64)?,(?P<data>.*)", re.DOTALL
)
# What llama.cpp's readers know (stb_image, miniaudio): PNG, JPEG, GIF, BMP; WAV, MP3, FLAC.
_BEGINNINGS: Mapping[MediaKind, tuple[bytes, ...]] = {
    "image": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM"),
    "audio": (b"RIFF", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"fLaC"),
}
_NAMES = {"image": "images", "audio": "audio"}


async def media_of(
    messages: Sequence[Message], model: Model, service: Service
) -> tuple[Media, ...]:
    """What messages hold beside text, in its order.

    Raises:
        RequestError: a part is not what it says.
        Unsupported: the model does not take it, or its address must not be fetched.
    """
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            here = f"messages[{index}].content[{number}]"
            if isinstance(part, TextPart | RefusalPart):
                continue
            engine = service.backend.capabilities.engine
            if isinstance(part, FilePart):
                raise Unsupported(f"{here}.type", engine, "Send what the file says as text.")
            kind: MediaKind = "image" if isinstance(part, ImagePart) else "audio"
            if kind not in model.media:
                hint = f"The model that it serves takes no {_NAMES[kind]}; send text parts only."
                raise Unsupported(f"{here}.type", engine, hint)
            if isinstance(part, AudioPart):
                param = f"{here}.input_audio.data"
                data = _decoded(part.input_audio.data, param)
            else:
                param = f"{here}.image_url.url"
                data = await _image(part.image_url.url, param, service)
            # koboldcpp leaves out what it cannot read, without a word.
            if not data.startswith(_BEGINNINGS[kind]):
                raise UnreadableMedia(param)
            found.append(Media(kind, data, param))
    return tuple(found)


async def _image(url: str, param: str, service: Service) -> bytes:
    match = _DATA.fullmatch(url)
    if match is not None:
        if match["type"] and not match["type"].startswith("image/"):
            raise RequestError(
                f"Invalid '{param}': its MIME type is '{match['type']}'. Only image types are "
                "supported.",
                param,
                "invalid_image_format",
            )
        if match["base64"]:
            return _decoded(match["data"], param)
        return unquote_to_bytes(match["data"])
    if not url.startswith(("http://", "https://")):
        raise RequestError(
            f"Invalid '{param}': '{url[:60]}' is no image URL. Send a data: URL, "
            "'data:image/png;base64,…'.",
            param,
            "invalid_image_url",
        )
    if service.fetch is None:
        engine = service.backend.capabilities.engine
        hint = "This server fetches no addresses; send a data: URL, 'data:image/png;base64,…'."
        raise Unsupported(param, engine, hint)
    return await service.fetch(url, param)


def _decoded(text: str, param: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise RequestError(
            f"Invalid '{param}': expected base64-encoded data.", param, "invalid_base64"
        )
    return data
