"""Tests that a stream's choices begin in order for any order of their events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from latimer.adapter.chat import message
from latimer.adapter.chat.formats import HERMES
from latimer.adapter.chat.message import ChatEncoder
from latimer.adapter.generation.choice import MessageFormat
from latimer.adapter.generation.frames import ChunkEncoder, CompletionEncoder
from latimer.adapter.generation.run import Plan, run
from latimer.adapter.generation.sinks import Answer, StreamSink, usage_of
from latimer.adapter.model_entry import Policy, ServedModel
from latimer.adapter.request import Exchange
from latimer.backends.base import (
    Batch,
    Event,
    Finish,
    Generation,
    Model,
    Piece,
    Prompt,
    Stops,
)
from support.engines.echo import Echo
from support.samples import FULL

CALL = b'<tool_call>{"name": "f", "arguments": {"a": 5}}</tool_call>'
HEAD = {"id": "x", "object": "y", "created": 7, "model": "m"}
MODEL = Model("m", 100, None, "", "", False, "f", 7)
FORM = MessageFormat(lambda: HERMES.parser({"f": {}}, frozenset(), False, False))


class Shape(NamedTuple):
    """A kind of stream and the texts of its three choices, each of which begins differently."""

    chat: bool
    form: MessageFormat | None
    texts: tuple[bytes, bytes, bytes]


SHAPES = {
    "calls": Shape(True, FORM, (CALL, CALL, CALL)),
    "calls and content": Shape(True, FORM, (CALL, b"EN is no stop", b"<tool is no call")),
    "chat": Shape(True, None, (b"EN", "é…".encode(), b"")),
    "completions": Shape(False, None, (b"EN", "é…".encode(), b"")),
}


def whole(*_: object) -> Mapping[str, Any]:
    """Fail, since no stream is sent as one response."""
    raise AssertionError


async def streamed(shape: Shape, batches: Sequence[Batch]) -> list[Any]:
    """Return the choices of a stream's chunks, in their order."""
    sent = bytearray()

    async def send(message: Mapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        raise AssertionError

    job = Generation(Prompt((1,)), None, (None,) * 3, stops=Stops(("END",)))
    frames: ChunkEncoder = CompletionEncoder(HEAD, False)
    if shape.chat:
        frames = ChatEncoder(HEAD, False, shape=message.Shape(shape.form is not None))
    plan = Plan([job], 3, usage_of, form=shape.form)
    exchange = Exchange({"type": "http", "method": "POST", "headers": []}, receive, send)
    served = ServedModel(Echo(batches), MODEL, Policy())
    sink = StreamSink(exchange, served, Answer(whole), frames)
    await run(served.backend, plan, sink)
    *events, done = sent.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


def orders(counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield every order of events as a list of choice indices, given the counts per choice."""
    if not any(counts):
        yield []
    for choice, count in enumerate(counts):
        if count:
            rest = [number - (index == choice) for index, number in enumerate(counts)]
            for order in orders(rest):
                yield [choice, *order]


def check(shape: Shape, chunks: Sequence[Any]) -> None:
    """Check that each choice begins in order, ends once, and has all of its text."""
    firsts = list(dict.fromkeys(chunk["index"] for chunk in chunks))
    assert firsts == [0, 1, 2]
    ends = [chunk["index"] for chunk in chunks if chunk["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    for index, data in enumerate(shape.texts):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[-1]["finish_reason"]
        if shape.chat:
            assert "role" in own[0]["delta"]
            assert not any("role" in chunk["delta"] for chunk in own[1:])
        assert text_of(shape, own) == ('{"a": 5}' if data == CALL else data.decode())


def text_of(shape: Shape, chunks: Sequence[Any]) -> str:
    """Return the content of a choice, or the arguments of its call."""
    if not shape.chat:
        return "".join(chunk["text"] for chunk in chunks)
    deltas = [chunk["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    return arguments + "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("name", SHAPES)
async def test_choices_begin_in_their_order(name: str) -> None:
    """Choices begin in order for every order of three events of three choices."""
    shape = SHAPES[name]
    for order in orders([3, 3, 3]):
        queues: list[Iterator[Event]] = []
        for choice, data in enumerate(shape.texts):
            at = len(data) // 2
            pieces = (Piece(choice, data[:at]), Piece(choice, data[at:]))
            queues.append(iter((*pieces, Finish(choice, "end", None, 1, 2))))
        check(shape, await streamed(shape, [[next(queues[choice])] for choice in order]))


@pytest.mark.parametrize("name", SHAPES)
async def test_choices_begin_in_their_order_wherever_they_are_cut(name: str) -> None:
    """Choices begin in order at every split of their texts, in batches of one or two events."""
    shape = SHAPES[name]
    longest = max(map(len, shape.texts))
    every = [*orders([2, 2, 2])]
    some = 1 if FULL else 3
    for at in range(1, longest):
        await cut(shape, at, every[at % some :: some])


async def cut(shape: Shape, at: int, chosen: Sequence[list[int]]) -> None:
    """Check some orders of choices that are cut at a place, in batches of one or two events."""
    for order in chosen:
        queues: list[Iterator[list[Event]]] = []
        for choice, data in enumerate(shape.texts):
            first: list[Event] = [Piece(choice, data[:at])]
            rest: list[Event] = [Piece(choice, data[at:]), Finish(choice, "end", None, 1, 2)]
            queues.append(iter((first, rest)))
        parts = [next(queues[choice]) for choice in order]
        pairs = [[*first, *second] for first, second in zip(parts[::2], parts[1::2], strict=True)]
        check(shape, await streamed(shape, parts if at % 2 else pairs))
