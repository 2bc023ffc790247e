"""Files in the input: text files are decoded here, PDF files are read before (`pdf`)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from ...schemas import limits
from ...schemas.openai.response_items import InputFilePart, InputMessage
from ..dialects import unsupported
from ..errors import InvalidRequest
from .calls import Output, Placed

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
