"""Requests with a form (`multipart/form-data`), whose files are temporary files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, NamedTuple

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ..schemas import limits
from .errors import InvalidRequest, as_ascii
from .request import Exchange

_TYPE = "multipart/form-data"
# Starlette writes large files in anyio's threads. anyio imports what it needs for them on first
# use, which would hold the event loop for 20 ms.
import_module("anyio._backends._asyncio")


class Form(NamedTuple):
    """The parts of a form.

    Args:
        texts: the values of each other field, in their order; `x[]` is `x`.
        files: the first file of each name.
    """

    texts: Mapping[str, list[str]]
    files: Mapping[str, UploadFile]


@asynccontextmanager
async def form_of(exchange: Exchange) -> AsyncIterator[Form]:
    """Read the form of a request; its files are deleted at the end of the context.

    A file of more than 1 MB is on disk. The size of the request is then that of its texts.

    Raises:
        InvalidRequest: the body is not a form, or 413 for a large one, which is not read further.
        Disconnected: the client disconnected before the end of the body.
    """
    kind = exchange.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != _TYPE:
        raise InvalidRequest(
            f"Unsupported content type: '{as_ascii(kind)}'. This API method only accepts "
            f"'{_TYPE}' requests. Send the fields and the file as parts of a form.",
            code="unsupported_content_type",
        )
    parser = MultiPartParser(
        exchange.headers,
        exchange.arriving(),
        max_files=limits.FORM_PARTS.maximum,
        max_fields=limits.FORM_PARTS.maximum,
        max_part_size=limits.FORM_TEXT.maximum,
    )
    try:
        data = await _parsed(parser)
        texts: dict[str, list[str]] = {}
        files: dict[str, UploadFile] = {}
        for name, value in data.multi_items():
            name = name.removesuffix("[]")
            if isinstance(value, UploadFile):
                files.setdefault(name, value)
            else:
                texts.setdefault(name, []).append(value)
        exchange.size = sum(len(one) for values in texts.values() for one in values)
        yield Form(texts, files)
    finally:
        # A thread frees their memory, which takes milliseconds. Nothing is awaited, since the
        # client may have got its reply and left.
        loop = asyncio.get_running_loop()
        # The form lacks the file of a part that has no end.
        for file in parser._files_to_close_on_error:
            loop.run_in_executor(None, file.close)


async def _parsed(parser: MultiPartParser) -> FormData:
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(
            f"We could not read the form of your request: {error.message} At most "
            f"{limits.FORM_PARTS.maximum} fields of {limits.FORM_TEXT.maximum} bytes are allowed."
        ) from None
    except (LookupError, UnicodeError):
        # The Content-Type names the encoding of its texts.
        raise InvalidRequest(
            "We could not read the form of your request: its texts are not in the encoding that "
            "its Content-Type names. Send them in UTF-8, without 'charset'."
        ) from None


def values_of(form: Form, arrays: frozenset[str], numbers: frozenset[str]) -> dict[str, Any]:
    """Return the values that the texts of a form stand for.

    A text that is not a value of its field stays a text, which the field's type then rejects.
    Clients send empty texts for settings that are not set, so these are omitted.

    Args:
        arrays: the fields with a list of values; other fields have their last value.
        numbers: the fields with a decimal number, or with `true` or `false`.
    """
    found: dict[str, Any] = {}
    for name, texts in form.texts.items():
        if name in arrays:
            if kept := [text for text in texts if text]:
                found[name] = kept
        elif texts[-1]:
            found[name] = _number(texts[-1]) if name in numbers else texts[-1]
    return found


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text
