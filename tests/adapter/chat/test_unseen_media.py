"""Tests of images and audio for a model that takes none: a session with one continues."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from support.clients import adapting
from support.engines.echo import Echo
from support.projector import png, wav

H, R = "/v1/chat/completions", "/v1/responses"
URL = f"data:image/png;base64,{base64.b64encode(png(255, 0, 0)).decode()}"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
SOUND = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(wav(440, 0.1)).decode(), "format": "wav"},
}
LINE = "[An image was here. This model cannot see images.]"
USER = {"role": "user", "content": "Look."}
CALL = {"id": "c", "type": "function", "function": {"name": "view_image", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.fixture(scope="module")
async def echo() -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of a model without a projector, which repeats the last message."""
    async with adapting(Echo(context=2048)) as made:
        yield made


async def sent(client: httpx2.AsyncClient, *messages: Any, **body: Any) -> httpx2.Response:
    """Return the reply to messages of chat."""
    return await client.post(H, json={"model": "m", "messages": [*messages], **body})


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([{"role": "user", "content": [IMAGE]}, USER], "messages[0].content[0]"),
        ([{"role": "user", "content": [SOUND]}, USER], "messages[0].content[0]"),
        ([USER, CALLS, {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}],
         "messages[2].content[0]"),
        # Agents whose tools return text only send the image behind the result.
        ([USER, CALLS, {"role": "tool", "tool_call_id": "c", "content": "below"},
          {"role": "user", "content": [{"type": "text", "text": "It:"}, IMAGE]}],
         "messages[3].content[1]"),
    ],
    ids=["image", "audio", "result", "behind a result"],
)  # fmt: skip
async def test_earlier_media_become_a_line(
    echo: httpx2.AsyncClient, messages: list[Any], path: str
) -> None:
    """A text says that something was there, and the header has its path."""
    reply = await sent(echo, *messages)
    assert reply.status_code == 200, reply.text
    assert path in reply.headers["x-latimer-inexact"].split(", ")


async def test_the_line_is_what_the_model_reads(echo: httpx2.AsyncClient) -> None:
    """The prompt is that of a request with the line in place of the image."""
    counts = []
    for part in (IMAGE, {"type": "text", "text": LINE}):
        reply = await sent(echo, {"role": "user", "content": [part]}, USER)
        counts.append(reply.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


async def test_a_new_image_is_refused(echo: httpx2.AsyncClient) -> None:
    """An image in a new message of the user is a 400, which says why."""
    for before in ((), (USER, {"role": "assistant", "content": "Yes."})):
        reply = await sent(echo, *before, {"role": "user", "content": [IMAGE]})
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert error["param"] == f"messages[{len(before)}].content[0].type"
        assert "does not support images" in error["message"]


async def test_strict_refuses_every_image() -> None:
    """Under `--strict` nothing is replaced."""
    async with adapting(Echo(context=2048), strict=True) as client:
        error = (await sent(client, {"role": "user", "content": [IMAGE]}, USER)).json()["error"]
    assert error["param"] == "messages[0].content[0]"


async def test_a_session_of_codex_goes_on(echo: httpx2.AsyncClient) -> None:
    """The output of `view_image` is named, also when the next request continues the response."""
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    image = {"type": "input_image", "image_url": URL}
    items = [
        {"role": "user", "content": "Look at a.png."}, call,
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ]  # fmt: skip
    first = await echo.post(R, json={"model": "m", "input": items})
    assert first.status_code == 200, first.text
    assert "input[2].output[0]" in first.headers["x-latimer-inexact"].split(", ")
    body = {"model": "m", "input": "Go on.", "previous_response_id": first.json()["id"]}
    second = await echo.post(R, json=body)
    assert second.status_code == 200, second.text
    assert "previous_response_id" in second.headers["x-latimer-inexact"].split(", ")
