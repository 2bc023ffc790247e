"""Tests of PDF files in the input: their text is in the prompt, or the request is a 400."""

from __future__ import annotations

import asyncio
import base64
import codecs
import io
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import quote

import httpx2
import orjson
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.errors import InvalidRequest, render
from latimer.adapter.responses import files as reading
from latimer.adapter.responses.files import OF_ONE, Pdf, read_pdfs
from latimer.backends import offload, sandbox
from latimer.backends.errors import Busy
from latimer.backends.llama_cpp import LlamaCpp
from latimer.schemas import limits
from openai import AsyncOpenAI
from pypdf import PdfReader, PdfWriter
from support.clients import adapting, client_of
from support.pdf_files import drawing, pdf, pdf_url

from .requests import call, output, user

R = "/v1/responses"
FILE_DATA = "input[0].content[0].file_data"


def three() -> bytes:
    """Return a file with three pages."""
    return pdf("One page", "Another", "Third")


@cache
def endless() -> bytes:
    """Return a file with a page that takes a reader minutes."""
    return pdf(drawing("x") * 2_000_000)


def spaces() -> bytes:
    """Return a file with a page that takes a reader much memory."""
    return pdf(b" " * 70_000_000)


def file(data: bytes | str, name: str = "a.pdf") -> dict[str, Any]:
    """Return a part with a PDF file."""
    url = data if isinstance(data, str) else pdf_url(data)
    return {"type": "input_file", "filename": name, "file_data": url}


def text(value: str) -> dict[str, Any]:
    """Return a part with a text."""
    return {"type": "input_text", "text": value}


def encrypted(password: str) -> bytes:
    """Return a PDF file that only opens with a password, or with none if that is empty."""
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("Locked"))))
    writer.encrypt(password, "owner", algorithm="AES-256")
    target = io.BytesIO()
    writer.write(target)
    return target.getvalue()


@pytest.fixture(scope="module")
async def app() -> AsyncIterator[OpenAIAdapter]:
    """Return an adapter of the demo model."""
    made = OpenAIAdapter(LlamaCpp(), any_model=True)
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
async def client(app: OpenAIAdapter) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the demo model."""
    async with client_of(app) as made:
        yield made


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return the readers that are started, which have all ended after the test."""
    found: list[subprocess.Popen[bytes]] = []
    start = sandbox._start

    def recorded(*arguments: Any) -> subprocess.Popen[bytes]:
        found.append(start(*arguments))
        return found[-1]

    monkeypatch.setattr(sandbox, "_start", recorded)
    yield found
    assert [process.returncode for process in found].count(None) == 0


async def end(tasks: Sequence[asyncio.Task[Any]], started: list[subprocess.Popen[bytes]]) -> None:
    """Cancel tasks, and wait until the readers that were started have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(10):
        while None in [process.returncode for process in started]:
            await asyncio.sleep(0.01)


async def asked(client: httpx2.AsyncClient, given: Any, **more: Any) -> httpx2.Response:
    """Return the reply to an input."""
    body = {"model": "m", "input": given, "max_output_tokens": 16, "temperature": 0, **more}
    return await client.post(R, json=body)


async def tokens(client: httpx2.AsyncClient, given: Any, **more: Any) -> int:
    """Return the input tokens of a response, which are those that are counted without one."""
    reply = await asked(client, given, **more)
    assert reply.status_code == 200, reply.text
    count = await client.post(f"{R}/input_tokens", json={"model": "m", "input": given, **more})
    found: int = reply.json()["usage"]["input_tokens"]
    assert count.json()["input_tokens"] == found
    return found


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (pdf("The title is One."), "The title is One."),
        # Nothing for a page without text would hide that it may be a scan.
        (pdf("One", "", "Two"), "One\n\n[page 2 has no text]\n\nTwo"),
        (pdf("A\\000B"), "AB"),
        (encrypted(""), "Locked"),
        (base64.b64encode(pdf("Plain")).decode(), "Plain"),
        (f"data:;base64,{base64.b64encode(pdf('Untyped')).decode()}", "Untyped"),
        (pdf_url(pdf("Upper")).replace("data:", "DATA:").replace(";base64", ";BASE64"), "Upper"),
        (pdf_url(b"\n" + pdf("Line")), "Line"),
    ],
)
async def test_the_text_of_a_pdf_is_read(data: bytes | str, expected: str) -> None:
    """The pages of a PDF file are read in any form of its data, with a blank line between them."""
    url = file(data)["file_data"]
    assert await read_pdfs([Pdf(FILE_DATA, url)], "") == {url: expected}


@pytest.mark.parametrize("before", [b"\n", codecs.BOM_UTF8, b"HTTP/1.1 200 OK\r\n" * 50])
@pytest.mark.parametrize(
    "form", ["", "data:application/octet-stream;base64,", "DATA:Application/Octet-Stream,"]
)
async def test_bytes_before_a_pdf(client: httpx2.AsyncClient, form: str, before: bytes) -> None:
    """A PDF file without a type is one with lines or a mark before its header."""
    data = before + pdf("Ada.")
    percent = form.endswith("Stream,")
    given = quote(data) if percent else base64.encodebytes(data).decode()
    reply = await asked(client, [user([file(form + given)])])
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-latimer-inexact"] == FILE_DATA


@pytest.mark.parametrize(
    "data", [b'if data.startswith(b"%PDF-1.4"):', b" " * 1_024 + b"\n%PDF-1.4", b"\n%PDF"]
)
async def test_a_text_about_pdf(client: httpx2.AsyncClient, data: bytes) -> None:
    """A text without a type that has a PDF file's header inside a line, or late, stays a text."""
    reply = await asked(client, [user([file(base64.b64encode(data).decode())])])
    assert reply.status_code == 200, reply.text
    assert "x-latimer-inexact" not in reply.headers


FIELDS = {
    b"/T(name)/FT/Tx/V(Ada Lovelace)": "name: Ada Lovelace",
    b"/T(n1)/TU(Your age)/FT/Tx/V(36)": "Your age: 36",
    b"/Parent<</T(city)/FT/Tx/V(London)>>": "city: London",
    b"/T(color)/FT/Ch/V(1)/Opt[[(1)(red)][(2)(blue)]]": "color: red",
    b"/T(months)/FT/Ch/V[(May)(June)]/Opt[(May)(June)]": "months: May, June",
    b"/T(married)/FT/Btn/AS/Yes": "married: Yes",
    b"/T(single)/FT/Btn/AS/Off": None,
    b"/T(empty)/FT/Tx": None,
    b"/T(hidden)/FT/Tx/F 2/V(x)": None,
    b"/T(secret)/FT/Tx/Ff 8192/V(x)": None,
    b"/T(signed)/FT/Sig/V<</Type/Sig>>": None,
}


async def test_the_values_of_a_form_are_read() -> None:
    """The values of form fields that a reader shows follow the text of their page."""
    fields = b"".join(b"<</Subtype/Widget%s>>" % one for one in FIELDS)
    url = pdf_url(pdf("First", "Application", fields=fields + b"null<</Subtype/Link>>"))
    shown = "\n".join(text for text in FIELDS.values() if text)
    found = await read_pdfs([Pdf(FILE_DATA, url)], "")
    assert found == {url: f"First\n\nApplication\n{shown}"}
    only = pdf_url(pdf("", fields=b"<</Subtype/Widget/T(name)/FT/Tx/V(Ada)>>"))
    assert await read_pdfs([Pdf(FILE_DATA, only)], "") == {only: "name: Ada"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-4] + b"oops", "Two"),
        (lambda data: data[:-2], "Two"),
        (lambda data: data + b"\r", "Two"),
        (lambda _: b"", "[page 2 has no text]"),
    ],
    ids=["wrong checksum", "no checksum", "more bytes", "no bytes"],
)
async def test_a_whole_stream_is_read(change: Callable[[bytes], bytes], text: str) -> None:
    """A page whose compressed text is whole is read, also with a wrong checksum."""
    url = pdf_url(pdf("One", "Two", damage=change))
    assert await read_pdfs([Pdf(FILE_DATA, url)], "") == {url: f"One\n\n{text}"}


@pytest.mark.parametrize("form", [base64.b64encode(pdf("Ada.")).decode(), pdf_url(pdf("Ada."))])
async def test_a_pdf_is_as_its_text(client: httpx2.AsyncClient, form: str) -> None:
    """A PDF file has the prompt of a text file with its text, and the response says so."""
    plain = file(f"data:text/plain;base64,{base64.b64encode(b'Ada.').decode()}")
    question = text("Who is this?")
    reply = await asked(client, [user([file(form), question])])
    same = await asked(client, [user([plain, question])])
    assert reply.json()["usage"]["input_tokens"] == same.json()["usage"]["input_tokens"]
    assert reply.json()["output"][0]["content"] == same.json()["output"][0]["content"]
    assert reply.headers["x-latimer-inexact"] == FILE_DATA
    assert "x-latimer-inexact" not in same.headers
    stored = (await client.get(f"{R}/{reply.json()['id']}/input_items")).json()
    assert stored["data"][0]["content"][0]["file_data"] == form


async def test_a_pdf_in_an_output_and_in_a_chain(client: httpx2.AsyncClient) -> None:
    """The output of a call may have PDF files, and they stay in the prompt of later turns."""
    items = [user("Read it."), call("1"), output("1", [file(pdf("One"))])]
    first = await asked(client, items)
    assert first.headers["x-latimer-inexact"] == "input[2].output[0].file_data"
    next_ = user("And now?")
    before = first.json()
    reply = await asked(client, [next_], previous_response_id=before["id"])
    assert reply.headers["x-latimer-inexact"] == "previous_response_id"
    assert await tokens(client, [next_], previous_response_id=before["id"]) == await tokens(
        client, [*items, *before["output"], next_]
    )


async def test_a_pdf_in_a_conversation(client: httpx2.AsyncClient) -> None:
    """A conversation may have PDF files; one that cannot be read is named as one of its own."""
    for data, status in ((pdf("One"), 200), (b"%PDF-1.4", 400)):
        items = [{"type": "message", **user([file(data)])}]
        made = (await client.post("/v1/conversations", json={"items": items})).json()
        reply = await asked(client, "What is it?", conversation=made["id"])
        assert reply.status_code == status, reply.text
        if status == 200:
            assert reply.headers["x-latimer-inexact"] == "conversation"
        else:
            path = reply.json()["error"]["param"]
            assert re.fullmatch(r"conversation\[msg_\w+\]\.content\[0\]\.file_data", path)


async def test_strict_refuses_a_pdf() -> None:
    """Under `--strict` a PDF file is a 400, since its pictures and its layout are lost."""
    async with adapting(LlamaCpp(), strict=True) as client:
        error = (await asked(client, [user([file(pdf("One"))])])).json()["error"]
    assert (error["param"], error["code"]) == (FILE_DATA, "unsupported_parameter")


async def test_openais_client_sends_a_pdf(app: OpenAIAdapter) -> None:
    """OpenAI's client sends a PDF file and gets an answer, also as a stream."""
    transport = httpx2.ASGITransport(app)
    http = httpx2.AsyncClient(transport=transport, base_url="http://latimer")
    async with AsyncOpenAI(
        api_key="k", base_url="http://latimer/v1", http_client=http, max_retries=0
    ) as client:
        given: Any = [user([file(pdf("Title: One.")), text("Name the title.")])]
        made = await client.responses.create(model="m", input=given, temperature=0)
        streamed = await client.responses.create(model="m", input=given, temperature=0, stream=True)
        events = [event async for event in streamed]
    assert made.output_text
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == made.output_text


@pytest.mark.parametrize(
    ("data", "message", "code"),
    [
        (encrypted("secret"), "because it needs a password. Send it without encryption, or send "
         "its text.", "invalid_value"),
        (pdf(""), "because it has no text. Send its pages as images.", "invalid_value"),
        (pdf("One")[:200], "because it is damaged. Send its text, or its pages as images.",
         "invalid_value"),
        (b"%PDF-1.4\n%%EOF\n", "because it is damaged.", "invalid_value"),
        (pdf("One", "Two", "Three", damage=lambda _: b"garbage!!"), "because it is damaged.",
         "invalid_value"),
        (pdf("One", "Two", "Three", damage=lambda data: data[:-9]), "because it is damaged.",
         "invalid_value"),
        (b"", "because it is damaged.", "invalid_value"),
        # 100 MB of spaces in 100 KB.
        (lambda: pdf(b" " * 100_000_000), "PDF files take more than 20 s or 512 MiB to read. Send "
         "their text, or their pages as images.", "file_too_large"),
    ],
    ids=["encrypted", "scan", "broken", "no pages", "damaged page", "cut page", "no data", "bomb"],
)  # fmt: skip
async def test_a_pdf_that_is_not_read(
    client: httpx2.AsyncClient,
    started: list[subprocess.Popen[bytes]],
    data: bytes | Callable[[], bytes],
    message: str,
    code: str,
) -> None:
    """A PDF file without a text is a 400 that names the part, the reason and what to send."""
    reply = await asked(client, [user([file(data() if callable(data) else data)])])
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (FILE_DATA, code)
    assert message in error["message"]
    assert len(started) == 1


async def test_wrong_base64_is_named(client: httpx2.AsyncClient) -> None:
    """A PDF file whose base64 is wrong is the 400 of any other file."""
    for wrong in ("data:application/pdf;base64,?", "data:application/pdf;base64,é", "JVBERi0é"):
        error = (await asked(client, [user([file(wrong)])])).json()["error"]
        assert error["message"] == f"Invalid '{FILE_DATA}': expected a data URL or base64."


def limited(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """Give a limit another value."""
    other = getattr(limits, name)._replace(maximum=most)
    monkeypatch.setattr(limits, name, other)
    monkeypatch.setattr(reading, name, other)


@pytest.mark.parametrize(
    ("name", "most", "data", "message"),
    [
        ("PDF_PAGES", 2, three, "has 3 pages; at most 2 are allowed. Send fewer pages."),
        ("PDF_TEXT", 8, three, "is too long; at most 8 characters are allowed in one request."),
        ("PDF_MEMORY", 150, spaces, "take more than 20 s or 150 MiB to read."),
        ("PDF_SECONDS", 1, endless, "take more than 1 s or 512 MiB to read."),
    ],
    ids=["pages", "text", "memory", "seconds"],
)
async def test_limits_of_a_pdf(
    client: httpx2.AsyncClient,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    most: int,
    data: Callable[[], bytes],
    message: str,
) -> None:
    """A PDF file beyond a limit is a 400 with the limit, and its reader has ended."""
    limited(monkeypatch, name, most)
    error = (await asked(client, [user([file(data())])])).json()["error"]
    assert (error["param"], error["code"]) == (FILE_DATA, "file_too_large")
    assert message in error["message"]
    assert len(started) == 1


async def test_one_text_many_times_is_too_long(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the text counts a file as often as the request has it."""
    limited(monkeypatch, "PDF_TEXT", 20)
    part = file(pdf("Ten chars."))
    assert (await asked(client, [user([part, part])])).status_code == 200
    error = (await asked(client, [user([part, part, part])])).json()["error"]
    assert (error["param"], error["code"]) == ("input[0].content[2].file_data", "file_too_large")


async def test_time_is_limited(started: list[subprocess.Popen[bytes]]) -> None:
    """A reader that takes too long is killed, and the time is that of all files together."""
    pdfs = [Pdf("a", pdf_url(pdf("In time"))), Pdf("b", pdf_url(endless()))]
    # On a busy machine the first file alone can take longer than that.
    for seconds in (0.6, 2.4, 9.6):
        started.clear()
        with pytest.raises(InvalidRequest) as caught:
            await read_pdfs(pdfs, "", seconds)
        assert caught.value.code == "file_too_large"
        assert started[-1].returncode == -signal.SIGKILL
        if caught.value.param == "b":
            break
    assert caught.value.param == "b"
    assert [process.returncode for process in started] == [0, -signal.SIGKILL]


async def test_a_client_that_leaves_ends_the_reader(
    app: OpenAIAdapter, started: list[subprocess.Popen[bytes]]
) -> None:
    """When a client disconnects, the reader of its file is killed and the next one has a turn."""
    body = orjson.dumps({"model": "m", "input": [user([file(endless())])]})
    messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, Any]:
        while (message := next(messages, None)) is None:
            if started:
                return {"type": "http.disconnect"}
            await asyncio.sleep(0.01)
        return message

    replies: list[Any] = []

    async def send(message: Any) -> None:
        replies.append(message)

    scope = {"type": "http", "method": "POST", "path": R, "headers": [], "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), 10)
    assert [one.get("status", one.get("body")) for one in replies] == [499, b""]
    async with asyncio.timeout(10):
        while started[0].returncode is None:
            await asyncio.sleep(0.01)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert await read_pdfs([Pdf("", pdf_url(pdf("Next")))], "")


async def test_few_readers_at_once(started: list[subprocess.Popen[bytes]]) -> None:
    """Two readers run at a time for one key, and the others wait for them."""
    most = 0
    names = [f"Reader {number}" for number in range(5)]
    urls = [pdf_url(pdf(name)) for name in names]
    tasks = [asyncio.create_task(read_pdfs([Pdf("", url)], "")) for url in urls]
    while not all(task.done() for task in tasks):
        most = max(most, [process.returncode for process in started].count(None))
        await asyncio.sleep(0)
    assert [task.result() for task in tasks] == [
        {url: name} for url, name in zip(urls, names, strict=True)
    ]
    assert most == OF_ONE


async def test_keys_take_turns_with_readers(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file waits for one turn of another key's files, and a wait that is too long is a 429."""

    def reading_of(key: str, number: int) -> asyncio.Task[dict[str, str]]:
        token = offload.OWNER.set(key)
        url = pdf_url(endless()) if key == "greedy" else pdf_url(pdf("Polite"))
        task = asyncio.create_task(read_pdfs([Pdf("a", url)], f"{key} {number}", 0.6))
        offload.OWNER.reset(token)
        return task

    greedy = [reading_of("greedy", number) for number in range(6)]
    await asyncio.sleep(0.1)
    with suppress(InvalidRequest):
        # On a busy machine this short file can take longer as well.
        await reading_of("polite", 0)
    # The polite one has the third place, while those of the greedy one have a second turn.
    assert len(started) <= 2 * OF_ONE + 1
    monkeypatch.setattr(offload, "MOST_WAIT", 0.1)
    with pytest.raises(Busy) as error:
        await reading_of("greedy", 6)
    assert render(error.value)[0] == 429
    await end(greedy, started)


async def test_a_key_leaves_a_reader_to_others(
    started: list[subprocess.Popen[bytes]],
) -> None:
    """A key with many slow files holds two readers, and a file of another key is read meanwhile."""
    token = offload.OWNER.set("greedy")
    slow = Pdf("a", pdf_url(endless()))
    greedy = [asyncio.create_task(read_pdfs([slow], f"greedy {number}")) for number in range(6)]
    async with asyncio.timeout(10):
        while len(started) < OF_ONE:
            await asyncio.sleep(0.01)
    offload.OWNER.set("polite")
    quick = Pdf("b", pdf_url(pdf("Polite")))
    assert await read_pdfs([quick], "polite") == {quick.data: "Polite"}
    offload.OWNER.reset(token)
    assert [process.returncode for process in started] == [None, None, 0]
    await end(greedy, started)


async def test_a_text_is_kept_for_its_owner(started: list[subprocess.Popen[bytes]]) -> None:
    """A file is read once for the turns of a conversation, and again for another API key."""
    found = [Pdf("", pdf_url(pdf("Kept"))), Pdf("", pdf_url(pdf("Kept")))]
    for owner, count in (("one", 1), ("one", 1), ("two", 2)):
        assert [*(await read_pdfs(found, owner)).values()] == ["Kept"]
        assert len(started) == count


async def test_without_a_reader(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """If no reader can be started, a PDF file is a 400 that asks for its text."""
    broken = tmp_path / "reader.py"
    broken.write_text("raise SystemExit(1)")
    for place, name, value in ((reading, "_READER", broken), (sys, "executable", "")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            error = (await asked(client, [user([file(pdf("No reader"))])])).json()["error"]
        assert (error["param"], error["code"]) == (FILE_DATA, "unsupported_parameter")
        assert error["message"].endswith("Send the content of the file as text.")
