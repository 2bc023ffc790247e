"""Read the text of PDF files in other processes, with limits on time and memory (`pdf_reader`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...backends import offload
from ...schemas.limits import PDF_MEMORY, PDF_PAGES, PDF_SECONDS, PDF_TEXT
from ..dialects import unsupported
from ..errors import InvalidRequest
from .files import AS_TEXT, Pdf, decoded, too_long

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
