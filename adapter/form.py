"""Requests with a form (`multipart/form-data`), whose files are temporary files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, NamedTuple

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from typing_extensions import override

from ..schemas import limits
from .errors import InvalidRequest, as_ascii, wrong_value
from .request import Exchange, check_coding

_TYPE = "multipart/form-data"
# A decimal number. Python would also take `nan`, `1_0`, `1e999` and the digits of other scripts.
# No text may hold the event loop: each part has few characters, and only one way to match.
_NUMBER = re.compile(r"[-+]?(\d{1,99}(\.\d{0,99})?|\.\d{1,99})(e[-+]?\d{1,2})?", re.ASCII | re.I)
# Forms have no booleans. OpenAI's clients write words, and others write digits.
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
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
    _check_encoding(exchange)
    data = await _parsed(_Parser(exchange))
    texts: dict[str, list[str]] = {}
    files: dict[str, UploadFile] = {}
    try:
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
        for _, value in data.multi_items():
            if isinstance(value, UploadFile):
                loop.run_in_executor(None, value.file.close)


def _check_encoding(exchange: Exchange) -> None:
    """Check what the headers say about the body.

    Raises:
        InvalidRequest: the body is not a form, or is compressed.
    """
    kind = exchange.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != _TYPE:
        raise InvalidRequest(
            f"Unsupported content type: '{as_ascii(kind)}'. This API method only accepts "
            f"'{_TYPE}' requests. Send the fields and the file as parts of a form.",
            code="unsupported_content_type",
        )
    check_coding(exchange.named.get(b"content-encoding", b""), "form")


class _Parser(MultiPartParser):
    """Starlette's parser, for which a form that has no end is an error; it closes all files then.

    Args:
        exchange: the request whose body is parsed.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(
            exchange.headers,
            self._arriving(exchange),
            max_files=limits.FORM_PARTS.maximum,
            max_fields=limits.FORM_PARTS.maximum,
            max_part_size=limits.FORM_TEXT.maximum,
        )
        self._has_ended = False

    @override
    def on_end(self) -> None:
        self._has_ended = True

    async def _arriving(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        async for data in exchange.arriving():
            yield data
        if not self._has_ended:
            raise InvalidRequest(
                "We could not read the form of your request: the body ends before its last "
                "boundary, which has '--' at its end. Send the whole form."
            )


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


def values_of(
    form: Form, arrays: frozenset[str], numbers: frozenset[str], booleans: frozenset[str]
) -> dict[str, Any]:
    """Return the values that the texts of a form stand for.

    A text that is not a number stays a text, which the field's type then rejects. Clients send
    empty texts for settings that are not set, so these are omitted.

    Args:
        arrays: the fields with a list of values; other fields have their last value.
        numbers: the fields with a decimal number.
        booleans: the fields with `true` or `false`, or with `1` or `0`.

    Raises:
        InvalidRequest: a boolean is another text.
    """
    found: dict[str, Any] = {}
    for name, texts in form.texts.items():
        last = texts[-1]
        if name in arrays:
            if kept := [text for text in texts if text]:
                found[name] = kept
        elif last and name in booleans:
            if last.lower() not in _BOOLEANS:
                raise wrong_value(name, "expected 'true' or 'false'.", "invalid_type")
            found[name] = _BOOLEANS[last.lower()]
        elif last:
            found[name] = _number(last) if name in numbers else last
    return found


def _number(text: str) -> Any:
    return float(text) if _NUMBER.fullmatch(text.strip()) else text
