"""Tests of the content and the events that deltas add up to (contract of messages, section 6)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from latimer.adapter.generation.choice import Choice, Delta, Kind
from latimer.adapter.generation.sinks import Result
from latimer.adapter.messages.message import Draft, MessageEncoder
from latimer.adapter.messages.output import PING, Shape
from latimer.adapter.messages.thinking import ReasoningDisplay
from latimer.backends.base import Finish, Piece
from latimer.schemas.openai.common import FinishReason, Usage
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
SAID: Sequence[tuple[Kind, str]] = [
    ("reasoning", "I need the weather and the time. é𝄞"),
    ("content", "One moment, 日本."),
    ("call", "weather"),
    ("arguments", '{"city":"Zürich","days":[1,2]}'),
    ("reasoning", "Now the time."),
    ("call", "clock"),
]
USAGE: Usage = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 12, "cache_write_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 4,
        "audio_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}


def seal(thought: str) -> str:
    """Return reasoning as a signature."""
    return f"sealed:{thought}"


def draft_of(thoughts: ReasoningDisplay = "shown", most: int = 40, plain: bool = False) -> Draft:
    """Return a message that has not begun."""
    shape = Shape(thoughts, None if plain else seal, ("END",), most, plain)
    return Draft("msg_1", "m", shape, "req_1")


def deltas_of(said: Sequence[tuple[Kind, str]], size: int = 1_000) -> list[Delta]:
    """Return deltas of at most `size` characters; each call has the id of its number."""
    found = []
    for number, (kind, text) in enumerate(said):
        if kind == "call":
            found.append(Delta(text, kind=kind, call_id=f"call_{number}"))
            continue
        found += [Delta(text[at : at + size], kind=kind) for at in range(0, len(text), size)]
    return found


def whole(draft: Draft, deltas: Sequence[Delta], reason: FinishReason = "stop") -> dict[str, Any]:
    """Return the message of a plain response."""
    return draft.whole([Result(deltas, reason)], USAGE)


def streamed(
    draft: Draft, deltas: Sequence[Delta], reason: FinishReason = "stop"
) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    frames = MessageEncoder(draft)
    choice = Choice(())
    choice.finish = Finish(0, "end", None, 20, 9)
    frames.choices = [choice]
    data = frames.start(0)
    if frames.is_plain:
        data += frames.texts(0, [delta.text for delta in deltas])
    else:
        data += b"".join(frames.delta(0, delta) for delta in deltas)
    data += frames.end(0, reason) + frames.close(USAGE)
    found = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, _, line = frame.partition("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def accumulated(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events add up to, after checks of their order."""
    start, *inner, delta, stop = [event for event in events if event["type"] != "ping"]
    assert [one["type"] for one in (start, delta, stop)] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    message: dict[str, Any] = start["message"]
    open_ = None
    partial: list[str] = []
    for event in inner:
        EVENT.validate_python(event)
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert open_ is None
            assert index == len(message["content"])
            open_, partial = index, []
            message["content"].append(event["content_block"])
            continue
        assert index == open_
        block = message["content"][index]
        if kind == "content_block_stop":
            open_ = None
            if block["type"] == "tool_use":
                assert partial[0] == ""
                block["input"] = json.loads("".join(partial) or "{}")
            continue
        name = next(name for name in event["delta"] if name != "type")
        if name == "partial_json":
            partial.append(event["delta"][name])
        else:
            assert block.get("signature") in (None, ""), "a signature is the last delta"
            block[name] += event["delta"][name]
    assert open_ is None
    message |= delta["delta"]
    message["usage"] |= delta["usage"]
    return message


@pytest.mark.parametrize("thoughts", ["shown", "omitted", "hidden"])
def test_every_split_gives_the_same_message(thoughts: ReasoningDisplay) -> None:
    """For every split of a text, a stream adds up to the message of a plain response."""
    draft = draft_of(thoughts)
    message = whole(draft, deltas_of(SAID))
    Message.model_validate(message, strict=True)
    for size in (1, 2, 7, 1_000):
        deltas = deltas_of(SAID, size)
        assert whole(draft, deltas) == message
        assert accumulated(streamed(draft, deltas)) == message
    kinds = [block["type"] for block in message["content"]]
    if thoughts == "hidden":
        assert kinds == ["text", "tool_use", "tool_use"]
        return
    assert kinds == ["thinking", "text", "tool_use", "thinking", "tool_use"]
    thought = message["content"][0]
    assert thought["signature"] == seal(SAID[0][1])
    assert thought["thinking"] == ("" if thoughts == "omitted" else SAID[0][1])
    assert message["content"][2] == {
        "type": "tool_use", "id": "toolu_2", "name": "weather",
        "input": {"city": "Zürich", "days": [1, 2]},
    }  # fmt: skip
    assert message["content"][4]["input"] == {}


def test_the_keys_of_a_message_have_anthropics_order() -> None:
    """A message and its usage have their keys in the order of Anthropic's."""
    message = whole(draft_of(), deltas_of(SAID))
    assert [*message] == [
        "model", "id", "type", "role", "content", "stop_reason", "stop_sequence", "stop_details",
        "usage",
    ]  # fmt: skip
    assert message["usage"] == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 12,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 4},
        "service_tier": "standard",
    }
    assert [*message["usage"]][3] == "cache_creation"


def test_plain_text_has_the_same_events() -> None:
    """A stream of text alone, whose frames are made together, has the events of any stream."""
    deltas = deltas_of([("content", "Hello, world.")], 3)
    events = streamed(draft_of(plain=True), deltas)
    assert events == streamed(draft_of(), deltas)
    assert [event["type"] for event in events[:4]] == [
        "message_start", "content_block_start", "ping", "content_block_delta",
    ]  # fmt: skip
    assert accumulated(events) == whole(draft_of(plain=True), deltas)


def test_nothing_has_no_blocks() -> None:
    """An answer without text has no content, never an empty block."""
    for plain in (True, False):
        message = whole(draft_of(plain=plain), [Delta("")])
        assert message["content"] == []
        assert accumulated(streamed(draft_of(plain=plain), [])) == message


def test_a_prompt_that_is_only_read_has_no_answer() -> None:
    """With `max_tokens` 0 the token that the engine needs is not in the answer."""
    for plain in (True, False):
        draft = draft_of(most=0, plain=plain)
        message = whole(draft, [Delta("x")], "length")
        assert accumulated(streamed(draft, [Delta("x")], "length")) == message
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert message["usage"]["output_tokens"] == 0


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": [1, 2', {"a": [1]}),
        ('{"a": [1, 2]', {"a": [1, 2]}),
        ('{"a": 1, "n": 12', {"a": 1}),
        ('{"a": 1, "n": -12.5e', {"a": 1}),
        ('{"a": 1, "n": 12 ', {"a": 1, "n": 12}),
        ('{"a": 1, "n": tru', {"a": 1}),
        ('{"a', {}),
        ("", {}),
        ("no", {}),
        ("[1", {}),
    ],
)
def test_cut_arguments_keep_what_is_complete(cut: str, told: dict[str, Any]) -> None:
    """The input of a call that the limit has cut has its complete members, and is an object."""
    deltas = [Delta("f", kind="call", call_id="call_1"), Delta(cut, kind="arguments")]
    message = whole(draft_of(most=9), deltas, "length")
    assert message["content"][0]["input"] == told
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("rest", ["}", ', "b": "x'])
def test_integers_of_any_size_are_written(rest: str) -> None:
    """The input of a call has integers of more than 64 bits with all of their digits."""
    deltas = [
        Delta("f", kind="call", call_id="call_1"),
        Delta(f'{{"a": 12345678901234567890123{rest}', kind="arguments"),
    ]
    message = json.loads(orjson.dumps(whole(draft_of(most=9), deltas, "length")))
    assert message["content"][0]["input"] == {"a": 12345678901234567890123}


@pytest.mark.parametrize(
    ("reason", "stop", "most", "told"),
    [
        ("stop", None, 40, "end_turn"),
        ("stop", "<|im_end|>", 40, "end_turn"),
        ("stop", "END", 40, "stop_sequence"),
        ("length", None, 9, "max_tokens"),
        ("length", None, 40, "model_context_window_exceeded"),
    ],
)
def test_the_reason_of_the_end(
    reason: FinishReason, stop: str | None, most: int, told: str
) -> None:
    """A message says whether the turn, a stop sequence, `max_tokens` or the context ended it."""
    message = draft_of(most=most).whole([Result([Delta("x")], reason, stop=stop)], USAGE)
    named = "END" if told == "stop_sequence" else None
    assert (message["stop_reason"], message["stop_sequence"]) == (told, named)


def test_silence_gets_pings_once_the_message_has_begun() -> None:
    """Comments fill the silence before the message begins, and pings after that."""
    frames = MessageEncoder(draft_of())
    assert frames.comment.startswith(b":")
    frames.start(0)
    assert frames.comment == PING


def test_a_choice_knows_the_stop_sequence_that_ended_it() -> None:
    """The stop sequence of a choice is the one that was found in its text."""
    choice = Choice(["xyz", "lo"])
    choice.take([Piece(0, b"Hello")])
    choice.end(Finish(0, "end", None, 3, 2))
    assert choice.stop == "lo"
