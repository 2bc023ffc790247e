"""Tests of the bytes of a streamed response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latimer.adapter.generation.choice import Delta
from latimer.adapter.generation.frames import STEP, ObfuscatedEncoder
from latimer.adapter.generation.sinks import Result
from latimer.adapter.responses.output import Output, ReasoningDisplay, Shape
from latimer.adapter.responses.response import (
    Draft,
    FrameEncoder,
    ResponseEncoder,
    SocketEncoder,
)
from latimer.adapter.responses.tools import CalledTool
from latimer.backends.errors import Busy, EngineError, LatimerError
from latimer.schemas.openai.common import FinishReason, Usage
from support.frames import texts_in
from support.samples import sample

BEGUN: dict[str, Any] = {
    "id": "resp_" + "0" * 48, "object": "response", "created_at": 1, "status": "in_progress",
    "completed_at": None, "error": None, "incomplete_details": None, "model": "é",
    "output": [], "service_tier": "auto", "usage": None,
}  # fmt: skip
USAGE: Usage = {
    "prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 2, "audio_tokens": 0,
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    },
}  # fmt: skip


def draft(thoughts: ReasoningDisplay = "shown") -> Draft:
    """Return a draft of a response that may call two tools."""
    names = {"f": CalledTool("f"), "p": CalledTool("p", is_custom=True)}
    return Draft(BEGUN, Shape(names, thoughts), "default")


def streamed(
    deltas: Sequence[Delta],
    reason: FinishReason,
    of: Draft,
    encoder: type[ResponseEncoder] = ResponseEncoder,
) -> bytes:
    """Return the whole stream of a choice."""
    frames = encoder(of)
    # A sink formats the first delta before the beginning.
    first = b"".join([frames.delta(0, delta) for delta in deltas[:1]])
    data = frames.start(0) + first + b"".join([frames.delta(0, delta) for delta in deltas[1:]])
    data += frames.end(0, reason)
    return data + frames.close(USAGE, frames.whole([Result(deltas, reason)], USAGE))


def parsed(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, after a check of their form."""
    *blocks, rest = data.split(b"\n\n")
    assert rest == b""
    found = []
    for number, block in enumerate(blocks):
        name, line = block.split(b"\n")
        event = json.loads(line.removeprefix(b"data: "))
        assert list(event)[:2] == ["type", "sequence_number"]
        assert name == b"event: " + event["type"].encode()
        assert event["sequence_number"] == number
        found.append(event)
    return found


@settings(max_examples=sample(30, 300))
@given(
    st.lists(
        st.builds(
            Delta,
            st.text(max_size=5),
            kind=st.sampled_from(["content", "reasoning", "call", "arguments"]),
        ),
        max_size=12,
    ),
    st.sampled_from(["stop", "length"]),
    st.sampled_from(["shown", "summarised", "hidden"]),
)
def test_prebuilt_events(
    deltas: list[Delta], reason: FinishReason, thoughts: ReasoningDisplay
) -> None:
    """Every event is byte for byte the serialized one, and the end is the plain response."""
    begun = False
    named: list[Delta] = []
    for delta in deltas:
        calls = delta.kind == "call"
        begun = calls or (begun and delta.kind == "arguments")
        if begun or delta.kind != "arguments":
            named.append(delta._replace(text="fp"[len(named) % 2]) if calls else delta)
    of = draft(thoughts)
    output = Output(of.id, of.shape)
    data = streamed(named, reason, of)
    events = parsed(data)
    plain = [event for delta in named for event in output.add(delta)] + output.end(reason)
    expected = [{"type": name, **fields} for name, fields in plain]
    for number, (event, wanted) in enumerate(zip(events[2:-1], expected, strict=True), 2):
        whole = {"type": wanted.pop("type"), "sequence_number": number, **wanted}
        assert orjson.dumps(event) == orjson.dumps(whole)
    assert (
        b"".join(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
            for event in events
        )
        == data
    )
    texts = texts_in(streamed(named, reason, of, FrameEncoder))
    assert texts[:-1] == [*map(orjson.dumps, events[:-1])]
    last = {**events[-1]["response"], "completed_at": None}
    assert last == {**of.whole([Result(named, reason)], USAGE), "completed_at": None}


def test_a_long_stream_is_numbered() -> None:
    """The numbers of thousands of events have no gap."""
    deltas = [Delta("a")] * 3_000
    assert len(parsed(streamed(deltas, "stop", draft("shown")))) > len(deltas)


@pytest.mark.parametrize("encoder", [ResponseEncoder, SocketEncoder, FrameEncoder])
@given(st.lists(st.lists(st.text(min_size=1, max_size=5), max_size=6), max_size=4))
def test_a_burst(encoder: type[ResponseEncoder], bursts: list[list[str]]) -> None:
    """The texts of a burst have the same events as one delta after another."""
    frames, single = encoder(draft()), encoder(draft())
    for burst in bursts:
        deltas = b"".join([single.delta(0, Delta(text)) for text in burst])
        assert frames.texts(0, burst) == deltas
    assert frames.end(0, "stop") == single.end(0, "stop")


@pytest.mark.parametrize("encoder", [ResponseEncoder, SocketEncoder, FrameEncoder])
def test_a_long_burst_is_numbered(encoder: type[ResponseEncoder]) -> None:
    """A burst that goes beyond the prepared numbers has the same events as its deltas."""
    frames, single = encoder(draft()), encoder(draft())
    burst = ["a"] * 3_000
    assert frames.texts(0, burst) == b"".join([single.delta(0, Delta(text)) for text in burst])


def test_a_text() -> None:
    """The stream of a text has the events and the objects of the contract."""
    found = parsed(streamed([Delta("Hel"), Delta("lo.")], "stop", draft()))
    item = found[2]["item"]["id"]
    at = {"item_id": item, "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
    message = {"id": item, "type": "message", "status": "completed",
               "content": [{**empty, "text": "Hello."}], "role": "assistant"}  # fmt: skip
    usage = {
        "input_tokens": 11, "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 4},
        "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 14,
    }  # fmt: skip
    completed_at = found[-1]["response"]["completed_at"]
    end = {**BEGUN, "status": "completed", "completed_at": completed_at,
           "service_tier": "default", "output": [message], "usage": usage}  # fmt: skip
    text = "response.output_text"
    wanted: list[dict[str, Any]] = [
        {"type": "response.created", "response": BEGUN},
        {"type": "response.in_progress", "response": BEGUN},
        {"type": "response.output_item.added", "output_index": 0,
         "item": {**message, "status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **at, "part": empty},
        {"type": f"{text}.delta", **at, "delta": "Hel", "logprobs": []},
        {"type": f"{text}.delta", **at, "delta": "lo.", "logprobs": []},
        {"type": f"{text}.done", **at, "text": "Hello.", "logprobs": []},
        {"type": "response.content_part.done", **at, "part": {**empty, "text": "Hello."}},
        {"type": "response.output_item.done", "output_index": 0, "item": message},
        {"type": "response.completed", "response": end},
    ]  # fmt: skip
    assert isinstance(completed_at, int)
    assert ordered(found) == ordered(wanted)


def test_reasoning_then_a_call() -> None:
    """The stream of reasoning and a call has the events and the objects of the contract."""
    deltas = [
        Delta("I need ", kind="reasoning"), Delta("it.", kind="reasoning"),
        Delta("f", kind="call", call_id="call_B1"),
        Delta('{"city":', kind="arguments"), Delta('"Paris"}', kind="arguments"),
    ]  # fmt: skip
    found = parsed(streamed(deltas, "tool_calls", draft()))
    one, two = found[2]["item"]["id"], found[9]["item"]["id"]
    at, here = {"item_id": one, "output_index": 0}, {"item_id": two, "output_index": 1}
    part = {"type": "reasoning_text", "text": "I need it."}
    thought = {"id": one, "type": "reasoning", "status": "completed", "summary": [],
               "content": [part]}  # fmt: skip
    call = {"id": two, "type": "function_call", "status": "completed",
            "arguments": '{"city":"Paris"}', "call_id": "call_B1", "name": "f"}  # fmt: skip
    kind = "response.function_call_arguments"
    wanted: list[dict[str, Any]] = [
        {"type": "response.output_item.added", "output_index": 0,
         "item": {**thought, "status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **at, "content_index": 0,
         "part": {**part, "text": ""}},
        {"type": "response.reasoning_text.delta", **at, "content_index": 0, "delta": "I need "},
        {"type": "response.reasoning_text.delta", **at, "content_index": 0, "delta": "it."},
        {"type": "response.reasoning_text.done", **at, "content_index": 0, "text": "I need it."},
        {"type": "response.content_part.done", **at, "content_index": 0, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": thought},
        {"type": "response.output_item.added", "output_index": 1,
         "item": {**call, "status": "in_progress", "arguments": ""}},
        {"type": f"{kind}.delta", **here, "delta": '{"city":'},
        {"type": f"{kind}.delta", **here, "delta": '"Paris"}'},
        {"type": f"{kind}.done", **here, "name": "f", "arguments": '{"city":"Paris"}'},
        {"type": "response.output_item.done", "output_index": 1, "item": call},
    ]  # fmt: skip
    assert ordered(found[2:-1]) == ordered(wanted)
    assert found[-1]["response"]["output"] == [thought, call]


def ordered(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return events as JSON with their keys in order, but without their numbers."""
    return [
        json.dumps({key: value for key, value in event.items() if key != "sequence_number"})
        for event in events
    ]


def test_a_limit() -> None:
    """A response that reaches the limit ends with `response.incomplete` and the reason."""
    last = parsed(streamed([Delta("Hel")], "length", draft()))[-1]
    assert last["type"] == "response.incomplete"
    response = last["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["usage"]["total_tokens"] == 14


def failed(error: LatimerError, *deltas: Delta) -> list[dict[str, Any]]:
    """Return the events of a stream that an error ends."""
    frames = ResponseEncoder(draft())
    data = frames.start(0) if deltas else b""
    data += b"".join([frames.delta(0, delta) for delta in deltas])
    return parsed(data + frames.error(error))


def test_an_error() -> None:
    """An error has both of its shapes; the failed response follows, with the finished items."""
    deltas = [Delta("So", kind="reasoning"), Delta("Hel")]
    *_, delta, error, end = failed(EngineError("lost power"), *deltas)
    assert delta["type"] == "response.output_text.delta"
    flat = {"code": "engine_error", "message": "lost power", "param": None}
    del error["sequence_number"]
    assert error == {"type": "error", **flat, "error": {"type": "server_error", **flat}}
    response = end["response"]
    assert end["type"] == "response.failed"
    assert response["error"] == {"code": "server_error", "message": "lost power"}
    assert (response["status"], response["usage"]) == ("failed", None)
    assert [item["type"] for item in response["output"]] == ["reasoning"]


def test_an_error_before_the_first_event() -> None:
    """After a comment, a stream can only fail with events; the response is created first."""
    events = failed(Busy("too many", 1.5))
    names = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in events] == names
    assert events[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_obfuscation() -> None:
    """Only deltas are padded, and their lengths have the same remainder."""
    frames = ObfuscatedEncoder(ResponseEncoder(draft()))
    data = frames.start(0) + b"".join([frames.delta(0, Delta(text)) for text in ("a", "bcd", "e")])
    data += frames.end(0, "stop")
    padded = {event["type"] for event in parsed(data) if "obfuscation" in event}
    assert padded == {"response.output_text.delta"}
    sizes = {len(block) % STEP for block in data.split(b"\n\n") if b'"obfuscation"' in block}
    assert len(sizes) == 1


def test_an_obfuscated_failure() -> None:
    """A padded stream that fails has the failed response, so that it is stored."""
    frames = ObfuscatedEncoder(ResponseEncoder(draft()))
    frames.start(0)
    failed_response = frames.failed(EngineError("lost power"))
    assert failed_response is not None
    assert failed_response["status"] == "failed"
