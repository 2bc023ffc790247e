"""Tests of the checks on servers that are right, but write streams and objects unusually."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import pytest
from latimer.conformance.check import Check, Verdict, all_checks
from latimer.conformance.runner import Settings, judge
from suite.audio import TRANSCRIPTIONS
from suite.faults.audio import _text
from suite.faults.edits import (
    chunks,
    drop,
    error,
    events,
    has,
    put,
    rejects,
    reply,
    request,
    says,
    turn,
)
from suite.server import Fault, Server
from suite.trial import SLOW, listening
from suite.work import CHAT

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
            *whole, left = (left + message.get("body", b"")).split(b"\n\n")
            for event in whole:
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


# What servers of speech and transcription do, the check that would notice, and its verdict.
SPEECH: Mapping[str, tuple[Fault, str, str]] = {
    "an architecture in one word": (
        reply(put("data.*.architecture", "llama"), at="/models"), "audio.models", "skip"),
    "no transcriptions": (rejects(lambda method, path, headers: path == TRANSCRIPTIONS, 404),
                          "audio.key", ""),
    "no end of a spoken stream": (
        chunks(drop("*.choices.*.finish_reason"), at=CHAT, when=has("modalities.*", "audio")),
        "audio.stream-end", "diverges"),
    "vtt without hours": (_text("vtt", lambda text: text.replace("00:00:", "00:")),
                          "audio.vtt", ""),
    "segments from 1": (_text("verbose_json", turn("segments", lambda found: [
        {**one, "id": one["id"] + 1} for one in found])), "audio.verbose", ""),
    "segments without spaces": (_text("verbose_json", turn(
        "segments.*.text", lambda text: text.strip())), "audio.verbose", ""),
    "no stream of whisper-1": (request(drop("stream"), at=TRANSCRIPTIONS),
                               "audio.transcription-stream", "diverges"),
}  # fmt: skip


async def compare(fault: Fault, check: str, outcome: str) -> None:
    """Compare the verdict of a check on a server with what it should be; empty for a pass."""
    found = await judged(Server(fault), [one for one in all_checks() if one.id == check])
    assert {name: verdict.outcome for name, verdict in found.items()} == (
        {check: outcome} if outcome else {}
    )


@pytest.mark.parametrize("name", SPEECH)
async def test_any_server_of_speech(name: str) -> None:
    """A server may do what the contract leaves open, and what OpenAI does."""
    await compare(*SPEECH[name])


def _thinks(path: str, body: Any, sent: Any) -> Any:
    """Return a Response whose few tokens are all reasoning."""
    made = [one for one in body.get("output", ()) if one["type"] == "message"]
    if path != "/responses" or not made or sent.get("max_output_tokens", 400) > 64:
        return body
    part = {"type": "reasoning_text", "text": made[0]["content"][0]["text"]}
    item = {"id": "rs_1", "type": "reasoning", "summary": [], "content": [part]}
    reason = {"reason": "max_output_tokens"}
    return {**body, "status": "incomplete", "incomplete_details": reason, "output": [item]}


# The checks that read the text of a short Response.
SHORT = ("message", "answer", "items", "logprobs", "logprobs-none", "logprobs-agree", "stop",
         "seed", "store", "conversation-continued", "conversation-unstored")  # fmt: skip


async def test_a_model_that_only_reasons() -> None:
    """A check whose limit of tokens is used up by reasoning is skipped."""
    names = {f"responses.{name}" for name in SHORT}
    checks = [one for one in all_checks() if one.id in names]
    found = await judged(Server(Fault(reply=_thinks)), checks)
    assert {name: verdict.outcome for name, verdict in found.items()} == dict.fromkeys(
        names, "skip"
    )


async def test_a_conversation_with_reasoning() -> None:
    """A conversation may have items of reasoning between its messages."""

    def listed(path: str, body: Any, sent: Any) -> Any:
        if path != "conversation items":
            return body
        thought = {"id": "rs_1", "type": "reasoning", "summary": []}
        return {**body, "data": [*body["data"], thought]}

    checks = [one for one in all_checks() if one.id == "responses.conversation-unstored"]
    assert await judged(Server(Fault(reply=listed)), checks) == {}


def _searched(found: list[Any]) -> list[Any]:
    """Return the events of a Response whose service has also searched the web."""
    *before, last = found
    item = {"id": "ws_1", "type": "web_search_call", "status": "completed",
            "action": {"type": "search", "query": "files"}}  # fmt: skip
    done = {"type": "response.output_item.done", "output_index": 9, "item": item,
            "sequence_number": last["sequence_number"]}  # fmt: skip
    output = [*last["response"]["output"], item]
    return [*before, done, {**last, "response": {**last["response"], "output": output}}]


NAMELESS = error(put("error.param", None), put("error.message", "Tools of file_search: none."),
                 when=says("tool"))  # fmt: skip
# What servers do, the check that would notice, and its verdict.
OTHERS: Mapping[str, tuple[Fault, str, str]] = {
    "an answer of one character": (
        reply(put("content.*.text", "1"), at="/messages"), "messages.prefill", "skip"),
    "a call of the service": (events(_searched), "responses.codex", ""),
    "a tool that only the message names": (NAMELESS, "responses.hosted-choice", ""),
    "one more key": (reply(put("note", "x"), when=lambda sent: not sent), "stored.delete", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
async def test_any_server(name: str) -> None:
    """A server may do what the contract leaves open."""
    await compare(*OTHERS[name])


def _no_space(event: bytes) -> Iterator[bytes]:
    yield re.sub(rb"(?m)^(data|event): ", rb"\1:", event)


async def test_no_space_in_a_stream() -> None:
    """Only one check asks for the space after `data:`, which most clients do not need."""
    assert [*await judged(Unusual(_no_space), STREAMS)] == ["streaming.frames"]
