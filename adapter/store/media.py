"""Take images, audio and files out of the JSON of a request, and put them back.

A medium is base64 in one of a few fields. Its bytes are stored once, by their SHA-256. The field is
then an empty string, and its `MediaRef` is stored apart from the request, so no text of a client
can be taken for a reference to a medium.
"""

from __future__ import annotations

import hashlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import orjson

from .. import data_urls

# The lists of a request (chat, Responses) whose items have parts, and the keys of an item that
# contain its parts: a list of them, or a single one.
LISTS = ("messages", "input")
HOLDERS = ("content", "output")
# The keys of a part with a medium, and the key inside if the value is an object.
MEDIA: Mapping[str, str] = {
    "image_url": "url",
    "audio_url": "url",
    "input_audio": "data",
    "file": "file_data",
    "file_data": "",
}
# The longest prefix that is stored with a place.
PREFIX = 256
# Characters that are decoded, and bytes that are encoded, without releasing the interpreter lock.
CHARACTERS, BYTES = 4 << 16, 3 << 16

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A field of a request that had a medium.

    Args:
        path: the keys and indices that lead to the field.
        prefix: the text before the base64, such as `data:image/png;base64,`.
        hash: the SHA-256 of the medium in hexadecimal digits.
    """

    path: Path
    prefix: str
    hash: str


class Medium(NamedTuple):
    """The bytes of a medium and the field that had them."""

    place: MediaRef
    data: bytes


class Restored(NamedTuple):
    """A request with its media, and the places whose medium is missing or damaged.

    A field without its medium has its prefix only.
    """

    request: dict[str, Any]
    missing: list[MediaRef]


def extract(request: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Medium]]:
    """Return a request without its media, and the media.

    The given request is not changed, and what has no media is shared with it. A text that cannot be
    encoded again to exactly the same text stays in the request.
    """
    found: list[Medium] = []
    once: dict[str, bytes] = {}
    for path, text in _candidates(request):
        start = _start(text)
        data = None if start is None else _decoded(text, start)
        if data:
            digest = hashlib.sha256(data).hexdigest()
            place = MediaRef(path, text[:start], digest)
            found.append(Medium(place, once.setdefault(digest, data)))
    if not found:
        return request, found
    return _replaced(request, [(medium.place.path, "") for medium in found]), found


def restore(
    request: Mapping[str, Any], places: Iterable[MediaRef], read: Callable[[str], bytes | None]
) -> Restored:
    """Return a request with the media that were extracted from it.

    Args:
        read: returns the bytes of a hash, or None if there are none.

    Raises:
        ValueError: the places are of another request.
    """
    texts: dict[str, str] = {}
    missing, changes = [], []
    for place in places:
        if place.hash not in texts:
            data = read(place.hash)
            is_whole = data is not None and hashlib.sha256(data).hexdigest() == place.hash
            texts[place.hash] = _encoded(data) if data and is_whole else ""
        if not texts[place.hash]:
            missing.append(place)
        changes.append((place.path, place.prefix + texts[place.hash]))
    try:
        return Restored(_replaced(request, changes), missing)
    except (LookupError, TypeError, AttributeError):
        raise ValueError("these places are not of this request") from None


def dumps(places: Sequence[MediaRef]) -> str:
    """Return places as JSON."""
    return orjson.dumps(places).decode()


def loads(text: str | bytes) -> list[MediaRef]:
    """Return the places of a JSON text."""
    return [MediaRef(tuple(one["path"]), one["prefix"], one["hash"]) for one in orjson.loads(text)]


def _candidates(request: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each field that can have a medium."""
    for name in LISTS:
        items = request.get(name)
        if not isinstance(items, list):
            continue
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                continue
            for holder in HOLDERS:
                held = item.get(holder)
                if isinstance(held, list):
                    for number, part in enumerate(held):
                        if isinstance(part, dict) and not MEDIA.keys().isdisjoint(part):
                            yield from _fields(part, (name, index, holder, number))
                elif isinstance(held, dict):
                    yield from _fields(held, (name, index, holder))


def _fields(part: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, str]]:
    for key, inner in MEDIA.items():
        value = part.get(key)
        if isinstance(value, str):
            yield (*path, key), value
        elif isinstance(value, dict) and isinstance(value.get(inner), str):
            yield (*path, key, inner), value[inner]


def _start(text: str) -> int | None:
    """Return the index at which the base64 of a text begins, or None if it has no base64."""
    if not data_urls.is_data_url(text):
        return 0
    url = data_urls.parse(text)
    if url is None or not url.is_base64 or url.start > PREFIX:
        return None
    return url.start if text[: url.start].isascii() else None


def _decoded(text: str, start: int) -> bytes | None:
    """Return the bytes of a base64 text, or None if they have another text as well."""
    pieces = []
    for at in range(start, len(text), CHARACTERS):
        piece = text[at : at + CHARACTERS]
        try:
            data = a2b_base64(piece, strict_mode=True)
        except ValueError:
            return None
        is_padded_early = piece.endswith("=") and at + CHARACTERS < len(text)
        if is_padded_early or b2a_base64(data, newline=False).decode() != piece:
            return None
        pieces.append(data)
    return b"".join(pieces)


def _encoded(data: bytes) -> str:
    return "".join(
        b2a_base64(data[at : at + BYTES], newline=False).decode()
        for at in range(0, len(data), BYTES)
    )


def _replaced(node: Any, changes: Sequence[tuple[Path, str]]) -> Any:
    """Return a copy of a JSON value with texts at some paths; other branches are shared."""
    copy = node.copy()
    inside: dict[str | int, list[tuple[Path, str]]] = {}
    for path, text in changes:
        inside.setdefault(path[0], []).append((path[1:], text))
    for key, deeper in inside.items():
        rest, text = deeper[0]
        copy[key] = _replaced(copy[key], deeper) if rest else text
    return copy
