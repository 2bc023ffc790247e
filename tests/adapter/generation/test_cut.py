"""Tests of choices that end at a stop sequence of their content, which no engine searches for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from latimer.adapter.chat.parsers import TextParser
from latimer.adapter.chat.reasoning import ReasoningParser, Tags
from latimer.adapter.generation.choice import Choice, Delta, MessageFormat, Parser
from latimer.adapter.generation.run import Plan, Sink, run
from latimer.backends.base import (
    Batch,
    Capabilities,
    Event,
    Finish,
    Generation,
    Piece,
    Prompt,
    Stops,
    Text,
    Token,
)


def parser() -> Parser:
    """Return a parser of reasoning between tags."""
    return ReasoningParser(Tags("<t>", "</t>"), True, frozenset(), TextParser())


FORM = MessageFormat(parser)


class Engine:
    """An engine that yields batches, and notes the cuts that it knows before each of them."""

    def __init__(self, batches: Sequence[Batch], late: bool = False) -> None:
        self.capabilities = Capabilities("engine", frozenset(), late_logprobs=late)
        self.known: list[dict[int, int]] = []
        self._batches = batches

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Yield the batches."""

        async def batches() -> AsyncIterator[Batch]:
            for batch in self._batches:
                yield batch
                self.known.append(dict(job.stops.ends))

        yield batches()

    async def tokenize(self, text: str, **_options: bool) -> tuple[int, ...]:
        """Return a token for each byte."""
        return tuple(text.encode())


class Kept(Sink):
    """A sink that takes the deltas of choices at their ends, or as they arrive."""

    def __init__(self, at_once: bool = False, at_end: bool = False) -> None:
        self.at_once = at_once
        self.deltas: dict[int, list[Delta]] = {}
        self.reasons: dict[int, str] = {}
        self.finishes: Sequence[Finish] = ()
        self.usage: Mapping[str, Any] = {}
        self._at_end = at_end
        self._pieces: dict[int, list[Piece]] = {}

    def begin(self, choices: Sequence[Choice], per_prompt: int) -> None:
        """Take the choices."""
        self._choices = choices
        self.deltas = {index: [] for index in range(len(choices))}
        self._pieces = {index: [] for index in range(len(choices))}

    async def take(self, batch: Batch) -> None:
        """Take events."""
        for event in batch:
            choice = self._choices[event.choice]
            if isinstance(event, Piece) and self._at_end:
                self._pieces[event.choice].append(event)
            elif isinstance(event, Piece):
                self.deltas[event.choice] += choice.take((event,))
            elif isinstance(event, Finish):
                self.deltas[event.choice] += choice.take(self._pieces[event.choice])
                rest, self.reasons[event.choice] = choice.end(event)
                self.deltas[event.choice] += rest

    async def finish(self, finishes: Sequence[Finish], usage: Any) -> None:
        """Take the ends."""
        self.finishes, self.usage = finishes, usage

    def close(self) -> None:
        """Do nothing."""

    async def fail(self, error: Exception) -> bool:
        """Let the error be raised."""
        return False

    def text(self, kind: str, choice: int = 0) -> str:
        """Return the text of one kind."""
        return "".join(delta.text for delta in self.deltas[choice] if delta.kind == kind)


async def ran(
    engine: Any, sink: Kept, choices: int = 1, logprobs: int | None = None
) -> dict[int, int]:
    """Run a job with the stop sequence `x` in content; return the cuts."""
    stops = Stops(("x",), by_reader=True)
    job = Generation(Prompt(Text("p")), 99, (None,) * choices, stops=stops, logprobs=logprobs)

    def usage(finishes: Sequence[Finish], _choices: int) -> Any:
        return {"completion_tokens_details": {}}

    await run(engine, Plan([job], choices, usage, form=FORM), sink)
    return stops.ends


def piece(text: str, choice: int = 0, count: int = 1, starts: Sequence[int] = ()) -> Piece:
    """Return a piece of some tokens."""
    return Piece(choice, text.encode(), (), False, count, starts)


@pytest.mark.parametrize("at_end", [False, True])
async def test_the_engine_learns_of_a_cut_before_its_next_batch(at_end: bool) -> None:
    """A stop sequence in content ends the choice, and what an engine sends after it neither shows
    nor counts."""
    batches: list[Batch] = [
        [piece("hx")],
        [piece("m</t>"), piece(" a")],
        [piece("bx"), piece("c")],
        [piece("late")],
        [Finish(0, "length", None, 3, 99, 2)],
    ]
    engine, sink = Engine(batches), Kept(at_end=at_end)
    assert await ran(engine, sink) == {0: 10}
    assert engine.known[1:3] == [{}, {0: 10}]
    assert (sink.text("reasoning"), sink.text("content")) == ("hxm", "ab")
    assert sink.reasons == {0: "stop"}
    assert sink.finishes == [Finish(0, "stop", "x", 3, 4, 2)]


async def test_an_end_in_the_batch_of_the_cut_is_cut_too() -> None:
    """The end token of an answer that ends in the batch of the stop sequence does not count."""
    end = Token(9, b"", b"<e>", True, -1.0)
    batch: Batch = [
        piece("</t>"), piece("a"), piece("x"), Finish(0, "end", None, 3, 3, 0, end)
    ]  # fmt: skip
    sink = Kept()
    await ran(Engine([batch]), sink)
    assert sink.finishes == [Finish(0, "stop", "x", 3, 2, 0)]


@pytest.mark.parametrize(
    ("events", "count"),
    [
        # Control tokens without text count if text follows them before the cut.
        ([piece("</t>"), piece(""), piece("a"), piece(""), piece("x")], 3),
        # Several tokens of a piece count up to the cut.
        ([piece("</t>"), piece("\u20aca", count=3, starts=(0, 1, 3)), piece("x")], 4),
        # Without counts of the pieces, the engine counts.
        ([piece("</t>a", count=0), piece("x", count=0)], 7),
    ],
)
async def test_the_tokens_before_a_cut_count(events: list[Event], count: int) -> None:
    """The usage counts the tokens that begin before the cut."""
    sink = Kept()
    await ran(Engine([*([event] for event in events), [Finish(0, "stop", None, 3, 7)]]), sink)
    assert sink.finishes[0].completion_tokens == count


async def test_each_choice_has_its_own_cut() -> None:
    """A stop sequence ends its own choice only."""
    batches: list[Batch] = [
        [piece("</t>a", 0), piece("</t>b", 1)],
        [piece("x", 1), piece("a", 0)],
        [Finish(1, "stop", None, 3, 2), Finish(0, "length", None, 3, 2)],
    ]
    sink = Kept()
    assert await ran(Engine(batches), sink, choices=2) == {1: 5}
    assert [sink.text("content", choice) for choice in (0, 1)] == ["aa", "b"]
    assert sink.reasons == {0: "length", 1: "stop"}


@pytest.mark.parametrize("at_once", [False, True])
async def test_tokens_that_come_last_belong_to_the_text_before(at_once: bool) -> None:
    """The engine learns of a cut before the tokens that come after their text."""
    tokens = [
        Token(index, data, data, False, -1.0)
        for index, data in enumerate((b"h", b"</t>", b"a", b"b", b"x", b"c"))
    ]
    batches: list[Batch] = [
        [piece("h</", count=0)],
        [piece("t>a", count=0)],
        [piece("bxc", count=0)],
        [Piece(0, b"", tokens), Finish(0, "stop", None, 3, 4)],
    ]
    engine, sink = Engine(batches, late=True), Kept(at_once=at_once, at_end=not at_once)
    await ran(engine, sink, logprobs=0)
    assert engine.known[2] == {0: 7}
    assert [(delta.kind, delta.text) for delta in sink.deltas[0]] == [
        ("reasoning", "h"), ("content", "ab")
    ]  # fmt: skip
    shown = [entry.token.data for delta in sink.deltas[0] for entry in delta.entries]
    assert shown == [b"a", b"b"]
    assert sink.finishes[0].completion_tokens == 4
    # The token of the marker is one of the reasoning.
    assert sink.usage["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_a_control_token_ends_content_only() -> None:
    """A control token as a stop sequence ends content, with its whitespace, and no reasoning."""
    form = MessageFormat(parser, ending=frozenset({b"<|end|>"}))
    choice = Choice(("<|end|>",), form=form)
    end = Piece(0, b"<|end|>", is_control=True, token_count=1)
    assert [choice.read(one) for one in (piece("h"), end, piece("</t>a\n"))] == [None] * 3
    assert choice.read(end) == len("h<|end|></t>a\n")
    deltas, reason = choice.end(Finish(0, "length", None, 3, 9))
    assert [(delta.kind, delta.text) for delta in deltas] == [
        ("reasoning", "h<|end|>"), ("content", "a\n")
    ]  # fmt: skip
    assert (reason, choice.stop) == ("stop", "<|end|>")
    assert choice.finish is not None
    assert choice.finish.completion_tokens == 3
