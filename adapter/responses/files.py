"""Files in the input: text files are decoded, PDF files are read in other processes.

The reader of PDF files (`pdf_reader`) runs in a sandbox, with limits on time and memory.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from encodings import normalize_encoding
from encodings.aliases import aliases
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from ...backends import offload, sandbox
from ...backends.offload import FairThreads, Memo
from ...schemas import limits
from ...schemas.limits import PDF_MEMORY, PDF_PAGES, PDF_SECONDS, PDF_TEXT
from ...schemas.openai.messages import File, FilePart, Message, TextPart
from ...schemas.openai.response_items import InputFilePart, InputMessage
from ...schemas.openai.responses import CONTEXTS
from .. import data_urls
from ..errors import InvalidRequest, missing, unsupported, wrong_value
from .items import Output, Placed

AS_TEXT = "Send the content of the file as text."
_TEXT_ONLY = (
    "Only PDF files and text in UTF-8 are read. Send the text of the file in UTF-8, or its pages "
    "as images."
)
# `%PDF` in base64, without its last bits; as plain text in a data URL, and percent-encoded there.
_IN_BASE64 = "JVBER"
_PLAIN = ("%PDF", "%25PDF")
_TYPES = ("application/pdf", "application/x-pdf")
# Readers of PDF allow bytes before the header: here lines or a byte order mark, in a file without
# a type.
_UNTYPED = ("", "application/octet-stream")
_HEADER = re.compile(rb"(?:^|[\r\n\xbf])%PDF-\d")
_HEADER_WITHIN = 1_024

# Each codec by the byte order mark that it drops.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# The charsets that a data URL may name; Python remembers each unknown name that it looks up.
_CHARSETS = {*aliases, *aliases.values()}


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
    """Return the paths of the PDF files in items; see `own_path`.

    Args:
        texts: the text of each PDF file, by its data as the client sent it.

    Raises:
        UnreadPdfs: texts are missing.
        InvalidRequest: the texts are too long together.
    """
    found = [pdf for item in items for pdf in _pdfs_of(item)]
    check_texts(found, texts)
    return [own_path(pdf.path) for pdf in found]


def check_texts(pdfs: Sequence[Pdf], texts: Mapping[str, str]) -> None:
    """Check the texts of PDF files; see `check_pdfs`."""
    unread = [pdf for pdf in pdfs if pdf.data not in texts]
    if unread:
        raise UnreadPdfs(unread)
    size = 0
    for pdf in pdfs:
        size += len(texts[pdf.data])
        if size > limits.PDF_TEXT.maximum:
            raise too_long(pdf.path)


def own_path(path: str) -> str:
    """Return a path in the request; for a stored item, the field that names it."""
    field = path.partition("[")[0]
    return field if field in CONTEXTS else path


def too_long(path: str) -> InvalidRequest:
    """Return the error for PDF files with too much text."""
    return wrong_value(
        path,
        f"the text of PDF files is too long; at most {limits.PDF_TEXT.maximum} characters are "
        "allowed in one request. Send fewer pages.",
        "file_too_large",
    )


def file_text(part: InputFilePart | File, path: str, texts: Mapping[str, str]) -> str:
    """Return the text of a file, with its name in front.

    Args:
        path: the path in the request of the object with the data.
        texts: the text of each PDF file, by its data as the client sent it.

    Raises:
        InvalidRequest: the part has no data, or that of a file that is not read.
    """
    for name in ("file_id", "file_url"):
        if getattr(part, name, None) is not None:
            raise unsupported(f"{path}.{name}", AS_TEXT)
    if part.file_data is None:
        raise missing(f"{path}.file_data")
    text = texts.get(part.file_data)
    if text is None:
        text = _decoded_text(part.file_data, f"{path}.file_data")
    label = f"File '{part.filename}':\n" if part.filename else "File:\n"
    return f"{label}{text.removesuffix(chr(10))}\n"


def _decoded(encoded: str, path: str) -> bytes:
    with suppress(ValueError):
        if encoded:
            return data_urls.decode(encoded)
    raise wrong_value(path, "expected a data URL or base64.")


def _decoded_text(encoded: str, path: str) -> str:
    url = data_urls.parse(encoded)
    text = _text(_decoded(encoded, path), "" if url is None else url.charset)
    # A zip file can happen to be valid text, as can a part of a PDF file.
    if text is None or "\0" in text or text.startswith(("%PDF", "PK\3\4")):
        raise unsupported(path, _TEXT_ONLY)
    return text


def _text(data: bytes, charset: str) -> str | None:
    """Return a text whose byte order mark or URL may name its charset; None for other data."""
    marked = [codec for mark, codec in _MARKS.items() if data.startswith(mark)]
    declared = {normalize_encoding(charset)} & _CHARSETS
    for codec in (*marked, *declared, "utf-8"):
        # Some charsets, such as `base64`, are not those of a text.
        with suppress(UnicodeError, LookupError):
            text = data.decode(codec)
            # UTF-7 can spell a lone surrogate, which is not a character.
            text.encode()
            return text
    return None


def _pdfs_of(placed: Placed) -> Iterator[Pdf]:
    item, path = placed
    content: str | Sequence[object] = ""
    if isinstance(item, InputMessage):
        content, path = item.content, f"{path}.content"
    elif isinstance(item, Output):
        content, path = item.output, f"{path}.output"
    for index, part in enumerate(() if isinstance(content, str) else content):
        pdf = pdf_of(part, f"{path}[{index}]") if isinstance(part, InputFilePart) else None
        if pdf is not None:
            yield pdf


def pdf_of(part: InputFilePart | File, path: str) -> Pdf | None:
    """Return the PDF file of a part, or None if it has another file or none; see `file_text`."""
    data = part.file_data
    if data is None or part.file_id is not None or getattr(part, "file_url", None) is not None:
        # A part with an id or a URL as well is an error (`file_text`).
        return None
    return Pdf(f"{path}.file_data", data) if _is_pdf(data) else None


def _is_pdf(data: str) -> bool:
    """Return True for the data of a PDF file, by its beginning or its MIME type."""
    url = data_urls.parse(data)
    if url is None:
        kind, is_first = "", data.startswith(_IN_BASE64)
    else:
        kind, is_first = url.kind, data.startswith((_IN_BASE64, *_PLAIN), url.start)
    if is_first or kind in _TYPES:
        return True
    if kind not in _UNTYPED:
        return False
    return _HEADER.search(data_urls.beginning(data, _HEADER_WITHIN)) is not None


_READER = Path(__file__).with_name("pdf_reader.py")
# The number of processes at once, and of those for one key, which leaves a place for another one.
AT_ONCE, OF_ONE = 3, 2
_REASONS = {
    "broken": "it is damaged. Send its text, or its pages as images.",
    "encrypted": "it needs a password. Send it without encryption, or send its text.",
    "empty": "it has no text. Send its pages as images.",
}

# The texts that were used last, by the owner of the request and the file's hash: each turn of a
# conversation sends its files again. The threads only wait for processes.
_texts: Memo[tuple[str, bytes], str] = Memo(
    2 * PDF_TEXT.maximum,
    lambda _, text: len(text),
    FairThreads(AT_ONCE, "latimer-pdf", OF_ONE),
    seconds=inf,
)


class _Refused(Exception):
    """The reader's `error` for a file; see `pdf_reader.read`."""

    def __init__(self, error: str, count: int = 0) -> None:
        super().__init__(error)
        self.error = error
        self.count = count


async def read_pdfs(
    pdfs: Sequence[Pdf], owner: str, seconds: float = PDF_SECONDS.maximum
) -> dict[str, str]:
    """Return the text of each PDF file, by its data as the client sent it.

    Cancelling the caller kills the process that reads.

    Args:
        owner: the owner of the request's texts; others do not notice that they are kept.
        seconds: the time for all files, without the time that they wait for others.

    Raises:
        InvalidRequest: a file has no text, cannot be read, or takes too much.
    """
    texts: dict[str, str] = {}
    spent: list[float] = []
    for pdf in pdfs:
        if pdf.data in texts:
            continue
        data, digest = await offload.run(len(pdf.data), _content, pdf)
        reading = partial(_read, data, seconds - sum(spent), spent)
        try:
            texts[pdf.data] = await _texts.get((owner, digest), reading)
        except _Refused as error:
            raise _invalid(pdf.path, error) from None
        except OSError:
            message = f"This server cannot start a reader of PDF files. {AS_TEXT}"
            raise unsupported(pdf.path, message) from None
    return texts


async def files_as_text(
    messages: Sequence[Message], size: int, owner: str
) -> tuple[Sequence[Message], list[str]]:
    """Replace the files in chat messages by their texts.

    Args:
        size: the size of the request in bytes.
        owner: see `read_pdfs`.

    Returns:
        The messages, and the paths of the PDF files.

    Raises:
        InvalidRequest: a file cannot be read, or is not in the request.
    """
    files = _files_of(messages)
    pdfs = [pdf for path, file in files.items() if (pdf := pdf_of(file, path)) is not None]
    texts = await read_pdfs(pdfs, owner)
    check_texts(pdfs, texts)
    if files:
        messages = await offload.run(size, _with_texts, messages, texts)
    return messages, [pdf.path for pdf in pdfs]


def _files_of(messages: Sequence[Message]) -> dict[str, File]:
    """Return the files in chat messages by their paths in the request."""
    return {
        f"messages[{index}].content[{number}].file": part.file
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if isinstance(part, FilePart)
    }


def _with_texts(messages: Sequence[Message], texts: Mapping[str, str]) -> Sequence[Message]:
    found = []
    for index, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            parts = [
                TextPart(
                    type="text",
                    text=file_text(part.file, f"messages[{index}].content[{number}].file", texts),
                )
                if isinstance(part, FilePart)
                else part
                for number, part in enumerate(content)
            ]
            message = message.model_copy(update={"content": parts})
        found.append(message)
    return found


def _read(data: bytes, seconds: float, spent: list[float]) -> str:
    """Return the text of a PDF file, in a thread; add the seconds that it took to `spent`."""
    start = time.monotonic()
    ended = sandbox.run(
        _READER, data, str(PDF_PAGES.maximum), str(PDF_TEXT.maximum),
        cpu=PDF_SECONDS.maximum, memory=PDF_MEMORY.maximum << 20, wait=seconds,
    )  # fmt: skip
    spent.append(time.monotonic() - start)
    if ended.status is None or ended.status < 0:
        raise _Refused("heavy")
    if ended.status:
        raise OSError("the reader failed")
    found = json.loads(ended.output)
    if "error" in found:
        raise _Refused(**found)
    return str(found["text"])


def _content(pdf: Pdf) -> tuple[bytes, bytes]:
    data = _decoded(pdf.data, pdf.path)
    return data, hashlib.sha256(data).digest()


def _invalid(path: str, refused: _Refused) -> InvalidRequest:
    """Return the error for a file that the reader refused."""
    reason = refused.error
    if reason == "long":
        return too_long(path)
    if reason in _REASONS:
        message = f"the PDF file cannot be read, because {_REASONS[reason]}"
        return wrong_value(path, message)
    if reason == "pages":
        message = (
            f"the PDF file has {refused.count} pages; at most {PDF_PAGES.maximum} are allowed. "
            "Send fewer pages."
        )
    else:
        message = (
            f"PDF files take more than {PDF_SECONDS.maximum} s or {PDF_MEMORY.maximum} MiB to "
            "read. Send their text, or their pages as images."
        )
    return wrong_value(path, message, "file_too_large")
