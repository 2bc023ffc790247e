"""Tests of the checks on servers that are right, but write streams and objects unusually."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from latimer.conformance.check import Check, Verdict, all_checks
from latimer.conformance.runner import Settings, judge
from suite.server import Fault, Server
from suite.trial import SLOW, listening

pytestmark = pytest.mark.slow

Write: TypeAlias = Callable[[bytes], Iterator[bytes]]
# The checks that read streams, apart from those that measure time.
STREAMS = [
    check for check in all_checks()
    if check.id not in SLOW and not check.id.startswith(("engine.", "responses.engine"))
    and (check.group in ("streaming", "agents") or re.search("stream|accumul|replay", check.id))
]  # fmt: skip


class Unusual:
    """The correct server, whose streams are written in another way.

    Args:
        write: returns the pieces in which an event of a stream is sent.
        fault: what else is different.
    """

    def __init__(self, write: Write, fault: Fault | None = None) -> None:
        clock = itertools.count(1_700_000_000, 2).__next__
        self._server = Server(fault or Fault(), clock)
        self._write = write

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        streams, left = False, b""

        async def rewritten(message: Any) -> None:
            nonlocal streams, left
            if message["type"] == "http.response.start":
                streams = any(value.startswith(b"text/event") for _, value in message["headers"])
            if message["type"] != "http.response.body" or not streams:
                await send(message)
                return
            *events, left = (left + message.get("body", b"")).split(b"\n\n")
            for event in events:
                for piece in self._write(event + b"\n\n"):
                    await send({**message, "body": piece, "more_body": True})
            if not message.get("more_body"):
                await send({**message, "body": left})

        await self._server(scope, receive, rewritten)


async def judged(app: Any, checks: list[Check]) -> dict[str, Verdict]:
    """Return the verdicts that are no pass, by the id of the check."""
    async with listening(app) as address:
        settings = Settings(f"{address}/v1", "org/toy", "sk-right", "demo", hosted=True)
        found = await judge(settings, checks)
    return {verdict.check.id: verdict for verdict in found if verdict.outcome != "pass"}


def _crlf(event: bytes) -> Iterator[bytes]:
    yield event.replace(b"\n", b"\r\n")


def _comments(event: bytes) -> Iterator[bytes]:
    yield b": data: {\n\n" + event + b":\n\n"


def _bytes(event: bytes) -> Iterator[bytes]:
    for at in range(0, len(event), 3):
        yield event[at : at + 3]


def _escaped(event: bytes) -> Iterator[bytes]:
    def reversed_keys(found: re.Match[bytes]) -> bytes:
        pairs = reversed(json.loads(found[1]).items())
        return b"data: " + json.dumps(dict(pairs), separators=(" , ", " : ")).encode()

    yield re.sub(rb"data: (\{.*)", reversed_keys, event)


@pytest.mark.parametrize("write", [_crlf, _comments, _bytes, _escaped])
async def test_any_form_of_a_stream(write: Write) -> None:
    """Line ends, comments, the places of chunks and the form of JSON change no verdict."""
    assert await judged(Unusual(write), STREAMS) == {}


def _no_space(event: bytes) -> Iterator[bytes]:
    yield re.sub(rb"(?m)^(data|event): ", rb"\1:", event)


async def test_no_space_in_a_stream() -> None:
    """Only one check asks for the space after `data:`, which most clients do not need."""
    assert [*await judged(Unusual(_no_space), STREAMS)] == ["streaming.frames"]
