"""Engines that replay recorded responses, except for one that is wrong."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Container, Iterator
from typing import Any, NamedTuple

from httpcore2 import AsyncConnectionInterface, Request, Response
from latimer.backends.http import ConnectionPool

STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 5, 1.5, 1e300, 2**70, "", "x", "é" * 40, [], [None], ["x"], [-5], {},
    {"a": 1},
)  # fmt: skip
RUBBISH = (b"", b"null", b"[]", b"5", b'"x"', b"{}", b"<html>Bad Gateway</html>", b"\xff\xfe", b"{")


class Answer(NamedTuple):
    """A recorded response."""

    status: int
    content_type: str
    body: bytes


Record = dict[tuple[str, str], list[Answer]]


class Recorder(AsyncConnectionInterface):
    """A client that records every response by method and path."""

    def __init__(self, address: str) -> None:
        self._pool = ConnectionPool(address)
        self.record: Record = defaultdict(list)

    async def handle_async_request(self, request: Request) -> Response:
        """Send a request and record its response."""
        async with await self._pool.handle_async_request(request) as response:
            data = await response.aread()
            answer = Answer(response.status, response.content_type, data)
        self.record[_key(request)].append(answer)
        return _response(answer)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()


class Replayed(AsyncConnectionInterface):
    """A client that replays each path's responses in order and repeats the last one."""

    def __init__(self, record: Record) -> None:
        self._record = {key: list(answers) for key, answers in record.items()}

    async def handle_async_request(self, request: Request) -> Response:
        """Replay a response."""
        answers = self._record.get(_key(request), [Answer(404, "text/html", b"not found")])
        return _response(answers.pop(0) if len(answers) > 1 else answers[0])


def _key(request: Request) -> tuple[str, str]:
    return request.method.decode(), request.url.target.decode()


def _response(answer: Answer) -> Response:
    return Response(
        answer.status,
        headers=[(b"content-type", answer.content_type.encode())],
        content=_lines(answer.body),
    )


async def _lines(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body in lines, as a stream does."""
    for line in re.findall(rb"[^\n]*\n|[^\n]+", body):
        yield line


def mutants(
    record: Record, generator: random.Random, count: int, methods: Container[str]
) -> Iterator[tuple[str, Record]]:
    """Yield a description and a record with one wrong response, several for each response.

    Args:
        methods: those of the requests whose responses are wrong.
    """
    for key, answers in record.items():
        for at, answer in enumerate(answers if key[0] in methods else ()):
            for body in _bodies(answer.body, generator, count):
                changed = {**record, key: [*answers]}
                changed[key][at] = answer._replace(body=body)
                yield f"{' '.join(key)} #{at}: {body[:300]!r}", changed
            for status in (200, 204, 400, 401, 404, 500, 503):
                changed = {**record, key: [*answers]}
                changed[key][at] = answer._replace(status=status)
                yield f"{' '.join(key)} #{at}: status {status}", changed


def _bodies(body: bytes, generator: random.Random, count: int) -> Iterator[bytes]:
    yield from RUBBISH
    for cut in generator.sample(range(len(body) + 1), min(3, len(body))):
        yield body[:cut]
    lines = body.split(b"\n")
    places = [n for n, line in enumerate(lines) if line.lstrip(b"data: ")[:1] in (b"{", b"[")]
    for _ in range(count if places else 0):
        at = generator.choice(places)
        start = lines[at].index(lines[at].lstrip(b"data: ")[:1])
        value = json.loads(lines[at][start:])
        changed = json.dumps(_changed(value, generator)).encode()
        yield b"\n".join([*lines[:at], lines[at][:start] + changed, *lines[at + 1 :]])


def _changed(value: Any, generator: random.Random) -> Any:
    """Return a value, of which it deletes one item or replaces it by a strange value."""
    places = list(_places(value))
    if not places:
        return generator.choice(STRANGE)
    holder, key = generator.choice(places)
    if generator.random() < 0.3:
        del holder[key]
    else:
        holder[key] = generator.choice(STRANGE)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value[:50])
        for key, inner in pairs:
            yield value, key
            yield from _places(inner)
