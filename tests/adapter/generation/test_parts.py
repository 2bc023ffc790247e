"""Tests of plain responses whose choices have parts: reasoning, content and calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter.chat.formats import HERMES
from latimer.adapter.chat.message import Shape, message_of
from latimer.adapter.chat.parsers import TextParser
from latimer.adapter.chat.reasoning import TAGS, ReasoningParser
from latimer.adapter.generation.choice import Choice, MessageFormat, Part
from latimer.adapter.generation.run import Plan, run
from latimer.adapter.generation.sinks import Answer, JsonSink, Result, detailed_usage_of
from latimer.adapter.model_entry import Policy, ServedModel
from latimer.adapter.request import Exchange
from latimer.backends.base import Finish, Generation, Model, Piece, Prompt, Stops, Token
from support.clients import adapting
from support.engines.echo import Echo

TESTS = Path(__file__).parents[2]
GEMMA = (TESTS / "templates" / "google-gemma-4-31B-it-interleaved.jinja").read_text()
MODEL = Model("m", 100, None, "", "", False, "f", 7)
THOUGHT, ANSWER = "Is it é? " * 300, "It is, because " * 300


class Noting(TextParser):
    """A parser that notes the threads in which it runs."""

    def __init__(self, threads: set[int]) -> None:
        self._threads = threads

    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        """Parse more text."""
        self._threads.add(threading.get_ident())
        return super().feed(data, is_control)


async def answered(text: str, size: int, stops: Stops) -> tuple[Any, set[int]]:
    """Return the response to a text in pieces of a size, and the threads of its parser."""
    data, threads, sent = text.encode(), set[int](), bytearray()

    async def send(message: Mapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        raise AssertionError

    def whole(results: Sequence[Result], usage: Any) -> Mapping[str, Any]:
        (result,) = results
        return {"message": message_of(result.deltas, Shape(True)), "usage": usage}

    form = MessageFormat(
        lambda: ReasoningParser(TAGS[0], False, frozenset(), Noting(threads))
    )  # fmt: skip
    pieces = [Piece(0, data[at : at + size], (), False, 1) for at in range(0, len(data), size)]
    end = Finish(0, "length", None, 3, len(pieces))
    served = ServedModel(Echo([[*pieces, end]]), MODEL, Policy())
    exchange = Exchange({"type": "http", "method": "POST", "headers": []}, receive, send)
    plan = Plan([Generation(Prompt((1,)), None, stops=stops)], 1, detailed_usage_of, form=form)
    await run(served.backend, plan, JsonSink(exchange, served, Answer(whole)))
    return json.loads(sent), threads


@pytest.mark.parametrize("stops", [Stops(), Stops(("because",), by_reader=True)])
@pytest.mark.parametrize("size", [1, 4, 100_000])
async def test_parts_are_the_same_for_pieces_of_any_size(size: int, stops: Stops) -> None:
    """The message and its reasoning tokens do not depend on the pieces, also with a stop."""
    text = f"<think>{THOUGHT}</think>{ANSWER}"
    reply, _ = await answered(text, size, stops)
    assert reply["message"]["reasoning_content"] == THOUGHT.strip()
    assert reply["message"]["content"] == ("It is, " if stops.texts else ANSWER)
    details = reply["usage"]["completion_tokens_details"]
    tokens = -(-len(f"<think>{THOUGHT}</think>".encode()) // size)
    assert details["reasoning_tokens"] == tokens


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "<|channel>thought\nHm.<channel|>Paris. <|channel>thought\nSure?<channel|>Yes.",
        "Paris. <|channel>thought\nSure?<channel|>Yes.",
        "<|channel>thought\nHm.<channel|>Paris. <|channel>thought\nSure?",
    ],
)
async def test_later_reasoning_counts(text: str, logprobs: bool) -> None:
    """A model that thinks again has all tokens but those of its answer as reasoning tokens."""
    async with adapting(Echo(text, template=GEMMA)) as client:
        body = {
            "model": "demo",
            "logprobs": logprobs,
            "messages": [{"role": "user", "content": ""}],
        }
        body |= {"logprobs": logprobs}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
    usage, content = reply["usage"], reply["choices"][0]["message"]["content"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning == usage["completion_tokens"] - len(content)


async def test_a_long_answer_is_parsed_in_a_thread() -> None:
    """A plain response of thousands of tokens leaves the event loop to others; a short one does not
    pay for a thread."""
    here = {threading.get_ident()}
    assert (await answered("<think>Hm.</think>Yes.", 4, Stops()))[1] == here
    _, threads = await answered(f"<think>{THOUGHT}</think>{ANSWER}", 4, Stops())
    assert threads
    assert not threads & here


def test_the_tokens_of_a_call_that_is_not_shown_are_hidden() -> None:
    """Without parallel calls, content after a second call has its own tokens only, and names those
    of the call."""
    call = b'<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts = call, call[:20], call[20:35], call[35:40], call[40:], b"b"
    own = partial(HERMES.parser, {"f": {}}, frozenset(), False, False)
    choice = Choice((), form=MessageFormat(own, parallel=False))
    tokens = [Token(at, text, text, False, -1.0) for at, text in enumerate(parts)]
    deltas = [*choice.take([Piece(0, token.data, (token,)) for token in tokens])]
    deltas += choice.end(Finish(0, "end", None, 3, 6))[0]
    entries = [entry for delta in deltas for entry in delta.entries]
    assert [(entry.token.id, entry.hidden) for entry in entries] == [(0, ()), (5, (1, 2, 3, 4))]
    assert deltas[-1].text == "b"


def test_the_end_of_reasoning_before_a_call_is_hidden() -> None:
    """A call right after reasoning has no entries of the tokens that end the reasoning."""
    own = partial(HERMES.parser, {"f": {}}, frozenset(), False, False)
    choice = Choice(
        (), form=MessageFormat(lambda: ReasoningParser(TAGS[0], True, frozenset(), own()))
    )
    parts = (
        *(b"Hm.", b"</think>", b"\n\n"),
        *(b"<tool_call>", b'{"name": "f", "arguments": ', b"{}", b"}", b"</tool_call>"),
    )
    tokens = [Token(at, text, text, False, -1.0) for at, text in enumerate(parts)]
    deltas = [*choice.take([Piece(0, token.data, (token,)) for token in tokens])]
    deltas += choice.end(Finish(0, "end", None, 3, len(parts)))[0]
    entries = [entry for delta in deltas for entry in delta.entries]
    assert [entry.token.id for entry in entries] == [3, 4, 5]
    assert entries[0].hidden == (0, 1, 2)
    assert choice.reasoning_tokens == 3


@pytest.mark.parametrize("stop", ["<|end|>", "ab"])
def test_a_stop_after_reasoning_is_none_of_its_tokens(stop: str) -> None:
    """A stop sequence or a control token right after the reasoning is not one of its tokens."""
    parser = partial(ReasoningParser, TAGS[0], True, frozenset(), TextParser())
    choice = Choice((stop,), form=MessageFormat(parser, ending=frozenset({b"<|end|>"})))
    for text in (b"h", b"</think>", stop.encode()):
        choice.read(Piece(0, text, (), text == b"<|end|>", 1))
    choice.end(Finish(0, "length", None, 1, 3))
    assert choice.finish is not None
    assert choice.finish.completion_tokens == choice.reasoning_tokens == 2
