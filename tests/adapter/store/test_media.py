"""Tests of media that are taken out of a request's JSON and put back."""

from __future__ import annotations

import base64
import copy
import json
import timeit
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.store import media
from latimer.adapter.store.media import Medium, extract, restore

PNG = b"\x89PNG" + bytes(range(256))
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"
HASH = "a" * 64


def chat(*parts: Any) -> dict[str, Any]:
    """Return a chat request with one message of some parts."""
    return {"model": "demo", "messages": [{"role": "user", "content": list(parts)}]}


def image(url: str) -> dict[str, Any]:
    """Return a part with an image."""
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def blobs(found: list[Medium]) -> dict[str, bytes]:
    """Return the bytes of media by their hash."""
    return {medium.place.hash: medium.data for medium in found}


def places(found: list[Medium]) -> list[media.MediaRef]:
    """Return the places of media as a column of JSON returns them."""
    return media.loads(media.dumps([medium.place for medium in found]))


def again(request: dict[str, Any]) -> Any:
    """Return a request that was stored and read as JSON, with its media put back."""
    bare, found = extract(request)
    stored = orjson.loads(orjson.dumps(bare))
    done = restore(stored, places(found), blobs(found).get)
    assert done.missing == []
    return done.request


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (image(URL), ("image_url", "url")),
        ({"type": "input_audio", "input_audio": {"data": TEXT, "format": "wav"}},
         ("input_audio", "data")),
        ({"type": "file", "file": {"file_data": URL, "filename": "a.pdf"}}, ("file", "file_data")),
        ({"type": "file", "file": {"file_data": TEXT}}, ("file", "file_data")),
        ({"type": "input_image", "image_url": URL}, ("image_url",)),
        ({"type": "input_file", "file_data": TEXT, "filename": "a.pdf"}, ("file_data",)),
        ({"type": "input_audio", "audio_url": URL}, ("audio_url",)),
    ],
)  # fmt: skip
def test_a_medium_is_taken_out_of_its_field(part: dict[str, Any], path: tuple[str, ...]) -> None:
    """Each field that can have base64 is emptied, and has its exact text when it is restored."""
    bare, found = extract(chat({"type": "text", "text": "What is this?"}, part))
    assert [medium.data for medium in found] == [PNG]
    assert found[0].place.path == ("messages", 0, "content", 1, *path)
    assert TEXT not in json.dumps(bare)
    assert again(chat(part)) == chat(part)


@pytest.mark.parametrize("holder", ["content", "output"])
@pytest.mark.parametrize("is_list", [True, False])
def test_items_of_responses(holder: str, is_list: bool) -> None:
    """Media of input messages and of tools' outputs are taken out, one part or a list."""
    part = {"type": "computer_screenshot", "image_url": URL}
    request = {"model": "demo", "input": ["?", {holder: [part] if is_list else part}]}
    bare, found = extract(request)
    assert [medium.data for medium in found] == [PNG]
    assert TEXT not in json.dumps(bare)
    assert again(request) == request


@pytest.mark.parametrize(
    "text",
    [
        "",
        "data:image/png;base64,",
        "https://example.com/a.png",
        "data:image/svg+xml,%3Csvg/%3E",
        f"data:image/png;base64,{TEXT[:-1]}",
        f"data:image/png;base64,{TEXT[:9]}\n{TEXT[9:]}",
        f"data:image/png;base64, {TEXT}",
        "-_-_",
        "AAB=",
        "AA==BBBB",
        "AAAA====",
        "A" * (media.CHARACTERS - 2) + "==" + "AAAA",
        "data:" + "x" * 300 + f";base64,{TEXT}",
        f"data:image/ü;base64,{TEXT}",
        "émoi",
    ],
)
def test_what_is_not_exact_stays(text: str) -> None:
    """A text that its bytes would not give again stays in the request."""
    request = chat(image(text))
    bare, found = extract(request)
    assert bare is request
    assert found == []


def test_the_request_is_not_changed_but_shared() -> None:
    """The given request keeps its media, and branches without media are the same objects."""
    request = {**chat(image(URL)), "tools": [{"type": "function"}]}
    request["messages"].insert(0, {"role": "system", "content": "You help."})
    before = copy.deepcopy(request)
    bare, _found = extract(request)
    assert request == before
    assert bare["tools"] is request["tools"]
    assert bare["messages"][0] is request["messages"][0]


def test_a_medium_that_is_sent_twice_is_stored_once() -> None:
    """Equal bytes have one hash and one object, also with different prefixes."""
    request = chat(image(URL), image(URL), image(f"data:image/jpeg;base64,{TEXT}"))
    _bare, found = extract(request)
    assert len(found) == 3
    assert len(blobs(found)) == 1
    assert all(medium.data is found[0].data for medium in found)
    assert again(request) == request


def test_the_text_of_a_client_is_never_a_place() -> None:
    """A request that imitates places and hashes is stored and returned as it was sent."""
    _bare, found = extract(chat(image(URL)))
    place = media.dumps([found[0].place])
    known = blobs(found)
    forged = chat(
        {"type": "text", "text": place}, image(""), image(found[0].place.hash + "!"),
        {"type": "image_url", "image_url": orjson.loads(place)[0]},
    )  # fmt: skip
    forged |= {"places": place, "hash": found[0].place.hash}
    bare, taken = extract(forged)
    assert taken == []
    assert restore(orjson.loads(orjson.dumps(bare)), [], known.get).request == forged


@pytest.mark.parametrize("data", [None, b"", PNG + b"!"])
def test_a_missing_medium_is_named(data: bytes | None) -> None:
    """A medium that was deleted or damaged is reported, and its field has only the prefix."""
    bare, found = extract(chat(image(URL), {"input_audio": {"data": "AAAA"}}))
    kept = blobs(found)
    kept |= {} if data is None else {found[0].place.hash: data}
    if data is None:
        del kept[found[0].place.hash]
    done = restore(bare, places(found), kept.get)
    assert done.missing == [found[0].place]
    parts = done.request["messages"][0]["content"]
    assert parts[0]["image_url"]["url"] == "data:image/png;base64,"
    assert parts[1]["input_audio"]["data"] == "AAAA"


@pytest.mark.parametrize("path", [("messages", 9), ("nothing", 0), ("model", 0), ("messages", "x")])
def test_places_of_another_request(path: media.Path) -> None:
    """Places that do not fit a request are an error with one type."""
    with pytest.raises(ValueError, match="not of this request"):
        restore(chat(), [media.MediaRef(path, "", HASH)], blobs([]).get)


def test_a_medium_is_read_once() -> None:
    """Restoring reads each hash once for all of its places."""
    bare, found = extract(chat(*[image(URL)] * 9))
    read: list[str] = []
    known = blobs(found)
    restore(bare, places(found), lambda digest: read.append(digest) or known[digest])  # type: ignore[func-returns-value]
    assert read == [found[0].place.hash]


def test_large_media() -> None:
    """A medium of several pieces is exact, at each length around the size of a piece."""
    for size in range(media.BYTES * 2 - 2, media.BYTES * 2 + 3):
        request = chat(image(f"data:;base64,{base64.b64encode(bytes(size)).decode()}"))
        _bare, found = extract(request)
        assert [len(medium.data) for medium in found] == [size]
        assert again(request) == request


ENCODED = st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode())
TEXTS = st.one_of(
    st.text(max_size=20),
    st.text("AB+/-_= \n", max_size=12),
    ENCODED,
    st.tuples(st.sampled_from(["data:image/png", "data:", "data"]), ENCODED).map(";base64,".join),
)
LEAVES = st.one_of(TEXTS, st.none(), st.integers(-9, 9), st.booleans())
KEYS = st.sampled_from(
    ["type", "text", "content", "output", "url", "data", "detail", "messages", *media.MEDIA]
)
JSON = st.recursive(
    LEAVES,
    lambda inside: st.one_of(st.lists(inside, max_size=3), st.dictionaries(KEYS, inside)),
    max_leaves=12,
)
PARTS = st.dictionaries(KEYS, st.one_of(TEXTS, st.dictionaries(KEYS, TEXTS, max_size=3)))
ITEMS = st.dictionaries(KEYS, st.one_of(JSON, PARTS, st.lists(PARTS, max_size=3)), max_size=3)
REQUESTS = st.dictionaries(
    st.sampled_from(["messages", "input", "model"]), st.one_of(JSON, st.lists(ITEMS, max_size=3))
)


@pytest.mark.slow
@given(REQUESTS)
def test_any_request_is_restored_exactly(request: dict[str, Any]) -> None:
    """Any JSON is the same after it was stored and restored, and is not changed meanwhile."""
    before = orjson.dumps(request)
    assert orjson.dumps(again(request)) == before
    assert orjson.dumps(request) == before


@given(st.lists(ENCODED, min_size=1, max_size=5))
def test_no_medium_stays(texts: list[str]) -> None:
    """Every text that is canonical base64 is taken out of its part."""
    bare, found = extract(chat(*map(image, texts)))
    assert [medium.data for medium in found] == [base64.b64decode(text) for text in texts if text]
    assert {part["image_url"]["url"] for part in bare["messages"][0]["content"]} == {""}


@pytest.mark.timed
def test_a_request_without_media_costs_little() -> None:
    """Looking for media takes at most 10 microseconds in a request of ten texts."""
    request = {"model": "demo", "messages": [{"role": "user", "content": "Hello" * 50}] * 10}
    seconds = min(timeit.repeat(lambda: extract(request), number=1000, repeat=20)) / 1000
    assert seconds < 10e-6
