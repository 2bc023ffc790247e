"""Tests of files in chat messages: their text is in the prompt, as in Responses."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from support.clients import adapting, client_of
from support.engines.echo import Echo
from support.pdf_files import pdf, pdf_url

H = "/v1/chat/completions"
FILE_DATA = "messages[0].content[0].file.file_data"
HELLO = {"type": "text", "text": "Who is this?"}


def file(data: str | None, **members: Any) -> dict[str, Any]:
    """Return a part with a file."""
    return {"type": "file", "file": {"filename": "a.pdf", "file_data": data, **members}}


def plain(text: str) -> str:
    """Return a data URL of a text file."""
    return f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}"


@pytest.fixture(scope="module")
async def app() -> AsyncIterator[OpenAIAdapter]:
    """Return an adapter that repeats the last message."""
    made = OpenAIAdapter(Echo(context=512), any_model=True)
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
async def client(app: OpenAIAdapter) -> AsyncIterator[httpx2.AsyncClient]:
    """Return its client."""
    async with client_of(app) as made:
        yield made


async def asked(client: httpx2.AsyncClient, *parts: Any, **body: Any) -> httpx2.Response:
    """Return the reply to a message of the user."""
    messages = [{"role": "user", "content": [*parts]}]
    return await client.post(H, json={"model": "m", "messages": messages, **body})


@pytest.mark.parametrize("data", [pdf_url(pdf("Ada.")), plain("Ada."), plain("Ada.\n")])
async def test_the_text_of_a_file_is_in_the_prompt(client: httpx2.AsyncClient, data: str) -> None:
    """A file has its name in front of its text, and a PDF file is named as inexact."""
    reply = await asked(client, file(data), HELLO)
    assert reply.status_code == 200, reply.text
    content = reply.json()["choices"][0]["message"]["content"]
    assert content == "File 'a.pdf':\nAda.\nWho is this?"
    is_pdf = "application/pdf" in data
    assert reply.headers.get("x-latimer-inexact") == (FILE_DATA if is_pdf else None)


@pytest.mark.parametrize(
    ("charset", "data"),
    [
        ("iso-8859-1", "é".encode("latin-1")),
        ('"Windows-1252"', "é".encode("cp1252")),
        ("utf-16be", "é".encode("utf-16-be")),
        # A byte order mark prevails over the URL, and UTF-8 replaces a charset that fails.
        ("iso-8859-1", "é".encode("utf-8-sig")),
        ("x", "é".encode("utf-8-sig")),
        ("us-ascii", "é".encode()),
        ("", "é".encode("utf-16")),
        ("", "\N{BYTE ORDER MARK}é".encode("utf-16-be")),
    ],
)
async def test_the_charset_of_a_text(client: httpx2.AsyncClient, charset: str, data: bytes) -> None:
    """A text is read in the charset of its byte order mark, which is dropped, or of its URL."""
    parameter = charset and f";charset={charset}"
    url = f"data:text/plain{parameter};base64,{base64.b64encode(data).decode()}"
    for given in (url, url.replace("data:", "DATA:").replace(";base64", ";BASE64")):
        reply = await asked(client, file(given))
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "File 'a.pdf':\né\n"


async def test_half_a_character_of_utf_7(client: httpx2.AsyncClient) -> None:
    """A text that UTF-7 does not spell in whole characters is read as UTF-8."""
    url = f"data:text/plain;charset=utf-7;base64,{base64.b64encode(b'+2AA-').decode()}"
    reply = await asked(client, file(url))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "File 'a.pdf':\n+2AA-\n"


async def test_a_file_in_a_stream_and_a_tool_result(client: httpx2.AsyncClient) -> None:
    """A file may be in any message with parts, also of a request that streams."""
    messages = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [file(pdf_url(pdf("Ada.")))]},
    ]  # fmt: skip
    reply = await client.post(H, json={"model": "m", "messages": messages, "stream": True})
    assert reply.status_code == 200, reply.text
    path = FILE_DATA.replace("messages[0]", "messages[2]")
    assert path in reply.headers["x-latimer-inexact"].split(", ")


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (file(None), FILE_DATA, "Missing required parameter"),
        (file(None, file_id="file_1"), FILE_DATA.replace("file_data", "file_id"),
         "Send the content of the file as text."),
        (file(pdf_url(b"%PDF-1.4")), FILE_DATA, "it is damaged"),
        (file("data:;base64,/w=="), FILE_DATA, "Only PDF files and text in UTF-8 are read."),
        # Not a text, and a charset that Python does not know.
        (file("data:;charset=base64;base64,/w=="), FILE_DATA, "text in UTF-8"),
        (file("data:;charset=x;base64,/w=="), FILE_DATA, "text in UTF-8"),
        # The start of a zip file, whose bytes are valid text here.
        (file("data:application/zip;base64,UEsDBGEudHh0"), FILE_DATA,
         "Only PDF files and text in UTF-8 are read."),
        (file("?"), FILE_DATA, "expected a data URL or base64."),
        (file(""), FILE_DATA, "expected a data URL or base64."),
    ],
    ids=["no data", "id", "broken", "other", "no text", "unknown", "zip", "no base64", "empty"],
)  # fmt: skip
async def test_a_file_that_is_not_read(
    client: httpx2.AsyncClient, part: Any, param: str, message: str
) -> None:
    """A file without a text is a 400 that names its path in the request."""
    reply = await asked(client, part, HELLO)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


async def test_strict_refuses_a_pdf() -> None:
    """Under `--strict` a PDF file is a 400, since its pictures and its layout are lost."""
    async with adapting(Echo(context=512), strict=True) as client:
        error = (await asked(client, file(pdf_url(pdf("Ada."))))).json()["error"]
        assert (error["param"], error["code"]) == (FILE_DATA, "unsupported_parameter")
        assert (await asked(client, file(plain("Ada.")))).status_code == 200
