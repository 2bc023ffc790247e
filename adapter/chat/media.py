"""Images and audio in messages (contract 3.2)."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import IO

from ...backends import offload
from ...backends.base import Media, MediaKind
from ...backends.errors import UnreadableMedia, Unsupported
from ...backends.offload import FairThreads
from ...schemas import limits
from ...schemas.limits import WEBP_MEMORY, WEBP_PIXELS, WEBP_SECONDS
from ...schemas.openai.messages import (
    AudioPart,
    ImagePart,
    Message,
    Part,
    TextPart,
    ToolMessage,
)
from .. import data_urls
from ..errors import InvalidRequest, unsupported, wrong_value
from ..model_entry import ServedModel
from . import webp

# Frames of MPEG 1, 2 and 2.5, the last for up to 12 kHz; each without a checksum, and with one.
_MP3 = (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2", b"\xff\xe3", b"\xff\xe2")
# Formats that llama.cpp reads (stb_image, miniaudio): PNG, JPEG, GIF, BMP; WAV, MP3, FLAC. WebP is
# converted.
_BEGINNINGS: Mapping[MediaKind, tuple[bytes, ...]] = {
    "image": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM"),
    "audio": (b"RIFF", b"ID3", *_MP3, b"fLaC"),
}
# The lowest sample rate in use, in Hz.
LOWEST_RATE = 4_000
# The pixels of a WebP image that a thread converts, and the seconds that a process may take, since
# others use the CPU as well. The processes run two at a time, and the threads only wait for them.
_SMALL = 1 << 22
_WAIT = 2.0 * WEBP_SECONDS.maximum
_threads = FairThreads(2, "latimer-webp")
# Parts processed in one turn of the event loop.
PARTS = 500
_NAMES = {"image": "images", "audio": "audio"}
_UNREADABLE: Mapping[MediaKind, str] = {
    "image": "[An image was here. This model cannot see images.]",
    "audio": "[Audio was here. This model cannot hear it.]",
}


def _without(kind: MediaKind, served: ServedModel) -> str:
    """Return what a client or its operator can do about a kind that the model does not accept."""
    hint = f"The loaded model does not support {_NAMES[kind]}. Send text parts only"
    if served.model.media:
        return f"{hint}."
    # The option has this name in Latimer, llama-server and koboldcpp.
    return f"{hint}, or load the projector of the model with --mmproj FILE."


_KINDS: Mapping[type[object], MediaKind] = {ImagePart: "image", AudioPart: "audio"}


def readable(messages: Sequence[Message], served: ServedModel) -> tuple[list[Message], list[str]]:
    """Replace earlier images and audio that the model does not accept by a text that says so.

    An agent whose tool has returned an image sends it with every later request, and would never
    get an answer again. Those of a new message of the user stay, and are an error (`media_of`).

    Returns:
        The messages, and the paths of the parts that were replaced.
    """
    found, paths = [*messages], []
    for index, message in enumerate(messages):
        content = message.content
        if not isinstance(content, list) or _is_new(messages, index):
            continue
        parts: dict[int, Part] = {}
        for number, part in enumerate(content):
            kind = _KINDS.get(type(part))
            if kind is not None and kind not in served.model.media:
                parts[number] = TextPart(type="text", text=_UNREADABLE[kind])
                paths.append(f"messages[{index}].content[{number}]")
        if parts:
            all_parts = [parts.get(number, part) for number, part in enumerate(content)]
            found[index] = message.model_copy(update={"content": all_parts})
    return found, paths


def _is_new(messages: Sequence[Message], index: int) -> bool:
    """Return True for the last message of a conversation, unless it belongs to a tool's result."""
    if index < len(messages) - 1 or isinstance(messages[index], ToolMessage):
        return False
    return not index or not isinstance(messages[index - 1], ToolMessage)


async def media_of(messages: Sequence[Message], served: ServedModel) -> tuple[Media, ...]:
    """Return the images and audio of messages, in their order.

    Raises:
        InvalidRequest: there are too many parts, or one is invalid.
        UnreadableMedia: a file is not in a format that engines read.
        Unsupported: the model does not accept a part, or the server does not fetch its URL.
    """
    found: list[Media] = []
    # The pixels of all images, and of each WebP image by its place.
    pixels, unread = 0, dict[int, int]()
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            if number % PARTS == PARTS - 1:
                # Let other tasks run.
                await asyncio.sleep(0)
            if not isinstance(part, ImagePart | AudioPart):
                continue
            here = f"messages[{index}].content[{number}]"
            if len(found) == limits.IMAGES.maximum:
                raise wrong_value(
                    here,
                    f"at most {limits.IMAGES.maximum} images and audio files are allowed in one "
                    "request.",
                    "array_above_max_length",
                )
            engine = served.capabilities.engine
            kind: MediaKind = "image" if isinstance(part, ImagePart) else "audio"
            if kind not in served.model.media:
                raise Unsupported(f"{here}.type", engine, _without(kind, served))
            if isinstance(part, AudioPart):
                param = f"{here}.input_audio.data"
                encoded = part.input_audio.data
                decode = data_urls.decode_base64
                data = await offload.run(len(encoded), _decoded, decode, encoded, param)
            else:
                param = f"{here}.image_url.url"
                data = await _image(part.image_url.url, param, served)
            is_webp = kind == "image" and data[:4] == b"RIFF" and data[8:12] == b"WEBP"
            # koboldcpp drops files that it cannot read, without an error.
            if not data.startswith(_BEGINNINGS[kind]) and not is_webp:
                raise UnreadableMedia(param)
            if kind == "audio":
                await offload.run(len(data), _check_length, data, param)
            else:
                its = await offload.run(len(data), _check_pixels, data, param)
                pixels += its
                if pixels > limits.ALL_PIXELS.maximum:
                    raise _too_many_pixels(param)
                if is_webp:
                    unread[len(found)] = its
            found.append(Media(kind, data, param))
    # All are checked before the first one is converted.
    for place, its in unread.items():
        _, data, param = found[place]
        found[place] = Media("image", await _as_png(data, its, param), param)
    return tuple(found)


async def _image(url: str, param: str, served: ServedModel) -> bytes:
    if data_urls.is_data_url(url):
        return await offload.run(len(url), _inline, url, param)
    if not url.startswith(("http://", "https://")):
        raise _no_image_url(url, param)
    if served.policy.fetch is None:
        engine = served.capabilities.engine
        hint = "This server does not fetch images. Send a data URL, 'data:image/png;base64,…'."
        raise Unsupported(param, engine, hint)
    return await served.policy.fetch(url, param)


def _inline(url: str, param: str) -> bytes:
    parsed = data_urls.parse(url)
    if parsed is None:
        raise _no_image_url(url, param)
    if parsed.kind and not parsed.kind.startswith("image/"):
        raise wrong_value(
            param,
            f"its MIME type is '{parsed.kind[:60]}'. Only image types are supported.",
            "invalid_image_format",
        )
    return _decoded(data_urls.decode, url, param)


async def _as_png(data: bytes, pixels: int, param: str) -> bytes:
    """Return a WebP file, which no engine reads, as PNG.

    Most images take milliseconds, and a process a tenth of a second, so that only large ones have
    one.
    """
    if pixels <= _SMALL:
        return await offload.run(offload.UNKNOWN, _in_thread, data, param)
    run = partial(offload.run, offload.UNKNOWN, threads=_threads, seconds=inf)
    return await run(_in_process, data, param)


def _in_thread(data: bytes, param: str) -> bytes:
    # An import that is abandoned fails once more for the next image.
    with offload.shielded():
        import PIL.Image  # noqa: F401
    try:
        return webp.as_png(data, _SMALL)
    except (ValueError, MemoryError):
        raise UnreadableMedia(param) from None


def _in_process(data: bytes, param: str) -> bytes:
    # Few servers need it.
    from ...backends import sandbox

    converted = b""
    try:
        with _output() as png:
            status, _ = sandbox.run(
                webp.__file__, data, str(WEBP_PIXELS.maximum), cpu=WEBP_SECONDS.maximum,
                memory=WEBP_MEMORY.maximum << 20, wait=_WAIT, output=png,
            )  # fmt: skip
            size = png.seek(0, 2)
            png.seek(0)
            converted = png.read(size) or b""
    except OSError:
        status = webp.FULL
    if status == webp.FULL:
        hint = "This server cannot convert large WebP images. Send PNG or JPEG."
        raise unsupported(param, hint)
    if status == webp.BROKEN:
        raise UnreadableMedia(param)
    if status != 0:
        raise wrong_value(
            param,
            f"the WebP image takes more than {WEBP_SECONDS.maximum} s or "
            f"{WEBP_MEMORY.maximum} MiB to convert. Send a smaller image, or PNG or JPEG.",
            "image_too_large",
        )
    return converted


def _output() -> IO[bytes]:
    """Return a file for a PNG, in memory if the system can.

    Through a pipe the parts would be joined, which holds the interpreter for long.
    """
    # Nobody would close a descriptor that work had when it was abandoned; a file closes itself.
    with offload.shielded():
        # A sandbox around the server may refuse it.
        with suppress(AttributeError, OSError):
            return open(os.memfd_create("latimer-webp"), "r+b", buffering=0)
        return tempfile.TemporaryFile(buffering=0)


def _check_pixels(data: bytes, param: str) -> int:
    """Return the pixels of an image; reject one that would take too much memory when decoded."""
    # Few servers get images: the parsers of both kinds of media are imported on use.
    import imagesize

    try:
        width, height = imagesize.get(io.BytesIO(data))
    except Exception:
        # The library does not document its exceptions for broken files.
        raise UnreadableMedia(param) from None
    if width <= 0 or height <= 0:
        raise UnreadableMedia(param)
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > limits.SCANS.maximum:
        raise wrong_value(
            param,
            f"the progressive JPEG has too many scans; at most {limits.SCANS.maximum} are "
            "allowed. Save it with fewer scans.",
            "image_too_large",
        )
    most = (WEBP_PIXELS if data.startswith(b"RIFF") else limits.PIXELS).maximum
    if width * height > most:
        raise wrong_value(
            param,
            f"the image has {width} x {height} pixels; at most {most} are allowed. Send a smaller "
            "image.",
            "image_too_large",
        )
    return int(width * height)


def _too_many_pixels(param: str) -> InvalidRequest:
    return wrong_value(
        param,
        f"the images up to this one have more than {limits.ALL_PIXELS.maximum} pixels. Send fewer "
        "or smaller images.",
        "image_too_large",
    )


def _check_length(data: bytes, param: str) -> None:
    """Reject audio that would take too much memory when decoded.

    Engines convert audio of any sample rate to 16,000 samples per second.
    """
    from tinytag import TinyTag

    kind = {b"RIFF": "wav", b"fLaC": "flac"}.get(data[:4], "mp3")
    try:
        sound = TinyTag.get(f"sound.{kind}", io.BytesIO(data), tags=False)
    except Exception:
        # The library does not document its exceptions for broken files.
        raise UnreadableMedia(param) from None
    if not sound.duration or not sound.samplerate:
        raise UnreadableMedia(param)
    if sound.samplerate < LOWEST_RATE:
        raise wrong_value(
            param,
            f"the sample rate of the audio is {sound.samplerate} Hz; at least {LOWEST_RATE} Hz is "
            "required.",
            "image_parse_error",
        )
    if sound.duration > limits.SOUND.maximum:
        raise wrong_value(
            param,
            f"the audio is {sound.duration:.0f} s long; at most {limits.SOUND.maximum} s are "
            "allowed. Send shorter audio.",
            "audio_too_long",
        )


def _no_image_url(url: str, param: str) -> InvalidRequest:
    return wrong_value(
        param,
        f"'{url[:60]}' is not an image URL. Send a data URL, 'data:image/png;base64,…'.",
        "invalid_image_url",
    )


def _decoded(decode: Callable[[str], bytes], text: str, param: str) -> bytes:
    try:
        data = decode(text)
    except ValueError:
        data = b""
    if not data:
        raise wrong_value(param, "expected base64-encoded data.", "invalid_base64")
    return data
