"""Tests that every malformed request gets the documented error (contract, sections 1 to 3)."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from support.clients import adapting
from support.engines.echo import Echo
from support.wrong_requests import BASE, CASES, C, H, body_of


def assert_error(reply: httpx2.Response, status: int, code: str | None) -> dict[str, Any]:
    """Check the form of an error response and return its error object."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    value = reply.json()
    assert set(value) == {"error"}
    assert set(value["error"]) == {"message", "type", "param", "code"}
    assert value["error"]["code"] == code
    error: dict[str, Any] = value["error"]
    return error


@pytest.fixture(scope="module")
async def hosted(make_backend: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of an adapter with the limits of OpenAI's service."""
    async with adapting(make_backend("llama_cpp"), limits="openai") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "changes"),
    CASES,
    ids=[f"{path[4:8]}-{number}-{next(iter(one))}" for number, (path, one) in enumerate(CASES)],
)
async def test_malformed_requests(
    hosted: httpx2.AsyncClient, path: str, changes: dict[str, Any]
) -> None:
    """A malformed request is a 400 with the snapshot's error, as JSON for streams too."""
    plain, streamed = [
        await hosted.post(path, json=body_of(path, {**more, **changes}))
        for more in ({}, {"stream": True})
    ]
    error = assert_error(plain, 400, plain.json()["error"]["code"])
    assert error["type"] == "invalid_request_error"
    # Some of these fields are right, or wrong in another way, in a stream.
    if not {"stream", "stream_options", "best_of"} & changes.keys():
        assert assert_error(streamed, 400, error["code"]) == error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{nope",
        b"[1, 2]",
        b'"text"',
        b'{"model": "demo", "prompt": "x", "temperature": NaN}',
        b'{"model": "demo", "prompt": "x", "unknown": Infinity}',
        b'{"model": "demo", "prompt": "x", "unknown": 1e999}',
        b'{"model": "demo", "prompt": "\xff\xfe"}',
        b'{"model": "demo", "prompt": "\\ud800"}',
        b'{"model": "demo", "prompt": "x", "unknown": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "demo", "prompt": "x", "unknown": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"model": "demo", "prompt": "x", "u": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
    ],
    ids=["empty", "broken", "array", "string", "nan", "infinity", "huge", "bytes", "surrogate",
         "deep", "nested", "objects"],
)  # fmt: skip
async def test_bodies_that_are_no_json(echo: httpx2.AsyncClient, body: bytes) -> None:
    """A body that is not JSON, not finite or too deep is a 400 in the contract's words."""
    headers = {"content-type": "application/json"}
    error = assert_error(await echo.post(C, content=body, headers=headers), 400, None)
    assert error["message"].startswith("We could not parse the JSON body of your request.")
    assert error["param"] is None


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_compressed_body_is_named(echo: httpx2.AsyncClient, size: int) -> None:
    """A body that is compressed is a 400 that names its encoding."""
    noise = "".join(map(chr, random.Random(0).choices(range(32, 0x24F), k=size)))
    body = gzip.compress(json.dumps({**BASE[C], "user": noise}).encode())
    headers = {"content-type": "application/json", "content-encoding": "GZip"}
    reply = await echo.post(C, content=body, headers=headers)
    error = assert_error(reply, 400, "unsupported_content_type")
    assert error["message"] == (
        "Unsupported content encoding: 'gzip'. Send the body without 'Content-Encoding', "
        "uncompressed."
    )


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON", ""]
)
async def test_json_content_types(echo: httpx2.AsyncClient, content_type: str) -> None:
    """A JSON content type, with or without a charset, or none, is accepted."""
    body = json.dumps({**BASE[C], "max_tokens": 1}).encode()
    reply = await echo.post(C, content=body, headers={"content-type": content_type})
    assert reply.status_code == 200, reply.text


async def test_other_content_types(echo: httpx2.AsyncClient) -> None:
    """A form is rejected with its content type."""
    reply = await echo.post(C, data={"model": "demo"})
    error = assert_error(reply, 400, "unsupported_content_type")
    assert error["message"].startswith(
        "Unsupported content type: 'application/x-www-form-urlencoded'. This API method only "
        "accepts 'application/json' requests"
    )


async def test_every_nullable_field_may_be_null(echo: httpx2.AsyncClient) -> None:
    """An explicit null is the field's default."""
    from latimer.schemas.openai.chat import ChatRequest
    from latimer.schemas.openai.completions import CompletionRequest

    for path, schema in ((C, CompletionRequest), (H, ChatRequest)):
        required = BASE[path].keys()
        nulls = {name: None for name in schema.model_fields if name not in required}
        plain = await echo.post(path, json={**BASE[path], "seed": 1})
        nulled = await echo.post(path, json={**nulls, **BASE[path], "seed": 1})
        assert nulled.status_code == 200, nulled.text
        assert "x-latimer-ignored" not in nulled.headers
        assert nulled.json()["choices"] == plain.json()["choices"]


async def test_fields_without_effect_are_accepted(echo: httpx2.AsyncClient) -> None:
    """Fields without effect are accepted, and `service_tier` is the tier that was served."""
    fields = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "medium",
        "service_tier": "auto",
        "store": False,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "tools": [],
        "max_tokens": 2,
    }
    reply = await echo.post(H, json={**BASE[H], **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["service_tier"] == "default"
    assert "x-latimer-ignored" not in reply.headers


@pytest.mark.parametrize("verbosity", ["low", "high"])
async def test_a_verbosity_without_effect_is_listed(
    echo: httpx2.AsyncClient, verbosity: str
) -> None:
    """A `verbosity` other than `medium` is listed as ignored, and a strict server rejects it."""
    for stream in (False, True):
        reply = await echo.post(H, json={**BASE[H], "verbosity": verbosity, "stream": stream})
        assert reply.status_code == 200
        assert reply.headers["x-latimer-ignored"] == "verbosity"
    async with adapting(Echo(), strict=True) as client:
        reply = await client.post(H, json={**BASE[H], "verbosity": verbosity})
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("verbosity", "unsupported_parameter")
        reply = await client.post(H, json={**BASE[H], "verbosity": "medium"})
        assert reply.status_code == 200


async def test_unknown_fields_are_listed(echo: httpx2.AsyncClient) -> None:
    """Unknown fields are ignored and listed in a header, encoded and limited in length."""
    unknown = {"foo": 1, "é\r\nx-evil: 1": 2, "max_tokens": 1}
    messages = [{"role": "user", "content": "Hi", "mood": "good"}]
    reply = await echo.post(H, json={"model": "demo", "messages": messages, **unknown})
    assert reply.status_code == 200
    names = reply.headers["x-latimer-ignored"]
    assert names == "foo, messages[0].mood, %C3%A9%0D%0Ax-evil%3A%201"
    many = {f"field-{number}": 1 for number in range(100)}
    reply = await echo.post(C, json={**BASE[C], **many, "max_tokens": 1})
    assert reply.headers["x-latimer-ignored"].count(",") == 19
    long = {"x" * 3000: 1}
    reply = await echo.post(C, json={**BASE[C], **long, "max_tokens": 1})
    assert len(reply.headers["x-latimer-ignored"]) <= 1024
