"""Files in the input: text files are decoded, PDF files are read in other processes.

A reader of PDF files (`pdf_reader`) has limits on time and memory.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes
from weakref import WeakKeyDictionary

from ...backends import offload
from ...schemas import limits
from ...schemas.limits import PDF_MEMORY, PDF_PAGES, PDF_SECONDS, PDF_TEXT
from ...schemas.openai.response_items import InputFilePart, InputMessage
from ..dialects import unsupported
from ..errors import InvalidRequest
from .items import Output, Placed

AS_TEXT = "Send the content of the file as text."
_TEXT_ONLY = "Only text and PDF files are read. Send the text of the file, or its pages as images."
# `%PDF` in base64, without its last bits; as plain text in a data URL, and percent-encoded there.
_IN_BASE64 = "JVBER"
_PLAIN = ("%PDF", "%25PDF")
_TYPES = ("data:application/pdf", "data:application/x-pdf")
# The longest beginning of a data URL that is searched for its comma.
_HEAD = 256


class Pdf(NamedTuple):
    """A PDF file: its path in the request, and its data as the client sent it."""

    path: str
    data: str


class UnreadPdfs(Exception):
    """PDF files without a known text; the caller reads them and calls again.

    They are read in another process, for which synchronous code cannot wait. A request without PDF
    files costs nothing more.
    """

    def __init__(self, pdfs: list[Pdf]) -> None:
        super().__init__(f"{len(pdfs)} PDF files")
        self.pdfs = pdfs


def check_pdfs(items: Iterable[Placed], texts: Mapping[str, str]) -> list[str]:
    """Return the paths of the PDF files in items; for stored items, the field that names them.

    Args:
        texts: the text of each PDF file, by its data as the client sent it.

    Raises:
        UnreadPdfs: texts are missing.
        InvalidRequest: the texts are too long together.
    """
    found = [pdf for item in items for pdf in _pdfs_of(item)]
    unread = [pdf for pdf in found if pdf.data not in texts]
    if unread:
        raise UnreadPdfs(unread)
    size = 0
    for pdf in found:
        size += len(texts[pdf.data])
        if size > limits.PDF_TEXT.most:
            raise too_long(pdf.path)
    paths = [pdf.path for pdf in found]
    return [path if path.startswith("input") else path.partition("[")[0] for path in paths]


def too_long(path: str) -> InvalidRequest:
    """Return the error for PDF files with too much text."""
    return InvalidRequest(
        f"Invalid '{path}': the text of PDF files is too long; at most {limits.PDF_TEXT.most} "
        "characters are allowed in one request. Send fewer pages.",
        path,
        "file_too_large",
    )


def file_text(part: InputFilePart, path: str, texts: Mapping[str, str]) -> str:
    """Return the text of a file, with its name in front.

    Args:
        path: the path of the part in the request.
        texts: the text of each PDF file, by its data as the client sent it.

    Raises:
        InvalidRequest: the part has no data, or that of a file that is not read.
    """
    for name in ("file_id", "file_url"):
        if getattr(part, name) is not None:
            raise unsupported(f"{path}.{name}", AS_TEXT)
    if part.file_data is None:
        where = f"{path}.file_data"
        raise InvalidRequest(
            f"Missing required parameter: '{where}'.", where, "missing_required_parameter"
        )
    text = texts.get(part.file_data)
    if text is None:
        text = _decoded_text(part.file_data, f"{path}.file_data")
    label = f"File '{part.filename}':\n" if part.filename else "File:\n"
    return f"{label}{text.removesuffix(chr(10))}\n"


def decoded(encoded: str, path: str) -> bytes:
    """Return the data of a data: URL, or of base64.

    Raises:
        InvalidRequest: the data is neither.
    """
    if encoded.startswith("data:"):
        head, comma, encoded = encoded.partition(",")
        if comma and not head.endswith(";base64"):
            return unquote_to_bytes(encoded)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            f"Invalid '{path}': expected a data URL or base64.", path, "invalid_value"
        ) from None


def _decoded_text(encoded: str, path: str) -> str:
    data = decoded(encoded, path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise unsupported(path, _TEXT_ONLY) from None
    if "\0" in text or text.startswith("%PDF"):
        raise unsupported(path, _TEXT_ONLY)
    return text


def _pdfs_of(placed: Placed) -> Iterator[Pdf]:
    item, path = placed
    content: str | Sequence[object] = ""
    if isinstance(item, InputMessage):
        content, path = item.content, f"{path}.content"
    elif isinstance(item, Output):
        content, path = item.output, f"{path}.output"
    for index, part in enumerate(() if isinstance(content, str) else content):
        # A part with an id or a URL as well is an error (`file_text`).
        if (
            isinstance(part, InputFilePart)
            and part.file_data is not None
            and part.file_id is part.file_url is None
            and _is_pdf(part.file_data)
        ):
            yield Pdf(f"{path}[{index}].file_data", part.file_data)


def _is_pdf(data: str) -> bool:
    """Return True for the data of a PDF file, by its beginning or its MIME type."""
    if not data.startswith("data:"):
        return data.startswith(_IN_BASE64)
    comma = data.find(",", 0, _HEAD)
    if comma < 0:
        return False
    if data[:comma].lower().startswith(_TYPES):
        return True
    return data.startswith((_IN_BASE64, *_PLAIN), comma + 1)


_PROGRAM = Path(__file__).with_name("pdf_reader.py")
# The number of processes at once.
AT_ONCE = 2
# The characters of texts that are kept, since each turn of a conversation sends its files again.
_KEPT = 2 * PDF_TEXT.most
_HEAVY = {"error": "heavy"}
_REASONS = {
    "broken": "it is damaged. Send its text, or its pages as images.",
    "encrypted": "it needs a password. Send it without encryption, or send its text.",
    "empty": "it has no text. Send its pages as images.",
}

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class _Texts:
    """The texts that were used last, by the owner of the request and the file's hash."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._texts: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def get(self, key: tuple[str, bytes]) -> str | None:
        text = self._texts.get(key)
        if text is not None:
            self._texts.move_to_end(key)
        return text

    def keep(self, key: tuple[str, bytes], text: str) -> None:
        if key in self._texts:
            return
        self._texts[key] = text
        self._size += len(text)
        while self._size > self._most:
            self._size -= len(self._texts.popitem(last=False)[1])


_texts = _Texts(_KEPT)


async def read_pdfs(
    pdfs: Sequence[Pdf], owner: str, seconds: float = PDF_SECONDS.most
) -> dict[str, str]:
    """Return the text of each PDF file, by its data as the client sent it.

    Cancelling the caller kills the process that reads.

    Args:
        owner: the owner of the request's texts; others do not notice that they are kept.
        seconds: the time for all files, without the time that they wait for others.

    Raises:
        InvalidRequest: a file has no text, cannot be read, or takes too much.
    """
    loop = asyncio.get_running_loop()
    texts: dict[str, str] = {}
    for pdf in pdfs:
        if pdf.data in texts:
            continue
        data, digest = await offload.run(len(pdf.data), _content, pdf)
        text = _texts.get((owner, digest))
        if text is None:
            async with _turns.setdefault(loop, asyncio.Semaphore(AT_ONCE)):
                start = loop.time()
                found = await _run(data, seconds, pdf.path)
                seconds -= loop.time() - start
            if "error" in found:
                raise _refused(pdf.path, found)
            text = found["text"]
            _texts.keep((owner, digest), text)
        texts[pdf.data] = text
    return texts


def _content(pdf: Pdf) -> tuple[bytes, bytes]:
    data = decoded(pdf.data, pdf.path)
    return data, hashlib.sha256(data).digest()


def _refused(path: str, found: Mapping[str, Any]) -> InvalidRequest:
    """Return the error for a file that the reader refused."""
    reason = found["error"]
    if reason == "long":
        return too_long(path)
    if reason in _REASONS:
        message = f"the PDF file cannot be read, because {_REASONS[reason]}"
        return InvalidRequest(f"Invalid '{path}': {message}", path, "invalid_value")
    if reason == "pages":
        message = (
            f"the PDF file has {found['count']} pages; at most {PDF_PAGES.most} are allowed. Send "
            "fewer pages."
        )
    else:
        message = (
            f"PDF files take more than {PDF_SECONDS.most} s or {PDF_MEMORY.most} MiB to read. Send "
            "their text, or their pages as images."
        )
    return InvalidRequest(f"Invalid '{path}': {message}", path, "file_too_large")


async def _run(data: bytes, seconds: float, path: str) -> Mapping[str, Any]:
    """Return what the reader finds in a file (`pdf_reader.read`).

    Raises:
        InvalidRequest: no reader can be started here.
    """
    try:
        process = await _started()
    except (OSError, NotImplementedError):
        # On Windows, some event loops cannot start processes.
        raise _no_reader(path) from None
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate(data)
    except TimeoutError:
        return _HEAVY
    finally:
        await _ended(process)
    if process.returncode:
        if process.returncode > 0:
            raise _no_reader(path)
        return _HEAVY
    found = await offload.run(len(output), json.loads, output)
    assert isinstance(found, dict)
    return found


async def _started() -> asyncio.subprocess.Process:
    if not sys.executable:
        # Python is embedded in another program, so there is no interpreter to start.
        raise OSError("no interpreter")
    limits = (PDF_SECONDS, PDF_MEMORY, PDF_PAGES, PDF_TEXT)
    return await asyncio.create_subprocess_exec(
        # -P keeps the script's folder out of `sys.path`.
        sys.executable, "-P", str(_PROGRAM), *(str(limit.most) for limit in limits),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        # Ctrl-C in a terminal is for the server, which then drains its requests.
        start_new_session=True,
    )  # fmt: skip


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill a process unless it has ended, and close its pipes."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        # Unread output would keep the pipe open.
        await process.communicate()


def _no_reader(path: str) -> InvalidRequest:
    return unsupported(path, f"This server cannot start a reader of PDF files. {AS_TEXT}")
