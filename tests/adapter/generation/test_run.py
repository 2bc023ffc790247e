"""Tests of the generation loop: what is measured, and the reply that a stream adds up to."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from latimer.adapter.generation.run import naming
from latimer.adapter.observers import Observers
from latimer.adapter.record import Record
from latimer.adapter.request import Exchange
from latimer.backends.errors import ContextExceeded

USER = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
FUNCTION = {"type": "function",
            "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}  # fmt: skip
CUSTOM = {"type": "custom", "custom": {"name": "write"}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER, "stop": ["zzz"]}),
    "chat with tokens": (
        "/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2, "n": 2}
    ),
    "calls": (
        "/v1/chat/completions",
        {"messages": USER, "tools": [FUNCTION], "tool_choice": "required", "logprobs": True},
    ),
    "a custom tool that is cut off": (
        "/v1/chat/completions",
        {"messages": USER, "tools": [CUSTOM], "tool_choice": "required"},
    ),
    "the tokens of a custom tool that is cut off": (
        "/v1/chat/completions",
        {"messages": USER, "tools": [CUSTOM], "tool_choice": "required", "logprobs": True},
    ),
    "a deprecated call": (
        "/v1/chat/completions",
        {"messages": USER, "functions": [FUNCTION["function"]], "function_call": {"name": "f"}},
    ),
    "completions": (
        "/v1/completions", {"prompt": ["1, 2, ", "1, 2, 3, "], "n": 2, "max_tokens": 6}
    ),
    "an echo with tokens": ("/v1/completions", {"prompt": "1, 2, ", "echo": True, "logprobs": 2}),
    "an echo": ("/v1/completions", {"prompt": "One day, é", "echo": True}),
}  # fmt: skip


class Recorder:
    """An observer that keeps what was measured."""

    follows = False

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.records: list[Record] = []

    def take(self, ended: Sequence[Record]) -> None:
        """Keep what was measured."""
        self.records += ended


@contextmanager
def observed(app: Any, keeps: bool) -> Iterator[Recorder]:
    """Observe the requests of an app."""
    service, recorder = app.service, Recorder(keeps)
    before = service.observers.all
    service.observers.replace([recorder])
    try:
        yield recorder
    finally:
        service.observers.replace(before)


def alike(reply: Any) -> Any:
    """Return a reply without ids, times, cached and drafted tokens, and the values of floats."""
    text = json.loads(json.dumps(reply), parse_float=lambda _: 0.0)
    for name in ("id", "created"):
        del text[name]
    text["usage"].get("prompt_tokens_details", {}).pop("cached_tokens", None)
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        text["usage"].get("completion_tokens_details", {}).pop(name, None)
    for choice in text["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    return text


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_comes_to_its_reply(apps: Any, client_of: Any, name: str) -> None:
    """An observer that keeps replies gets the same reply from a stream as from a plain request."""
    app = apps("llama_cpp")
    path, body = BODIES[name]
    body = {"model": "m", "max_tokens": 40, "temperature": 0, "seed": 7, **body}
    async with client_of(app) as client:
        with observed(app, keeps=True) as recorder:
            whole = (await client.post(path, json=body)).json()
            stream = await client.post(path, json={**body, "stream": True})
    first, second = recorder.records
    assert first.reply == whole
    assert second.reply is not None
    assert alike(second.reply) == alike(whole)
    usage = second.reply["usage"]
    assert second.prompt_tokens == usage["prompt_tokens"]
    assert second.completion_tokens == usage["completion_tokens"]
    if "prompt_tokens_details" in usage:
        assert second.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
        assert second.reasoning_tokens == usage["completion_tokens_details"]["reasoning_tokens"]
    chunk = json.loads(stream.text.partition("\n\n")[0].removeprefix("data: "))
    assert (second.reply["id"], second.reply["created"]) == (chunk["id"], chunk["created"])
    for choice in second.reply["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call["id"] in stream.text


async def test_nothing_is_kept_for_nobody(apps: Any, client_of: Any) -> None:
    """Without an observer that keeps replies there are only counts; a refused job has none."""
    app = apps("llama_cpp")
    async with client_of(app) as client:
        with observed(app, keeps=False) as recorder:
            await _two(client)
    one, refused = recorder.records
    assert (one.completion_tokens, one.reply) == (3, None)
    assert one.arrivals is not None
    assert one.begun < one.arrivals[0] <= one.last < one.ended
    # Tokens that arrive together have one time.
    assert 1 <= len(one.arrivals) <= 3
    assert refused.begun
    assert not refused.arrivals
    assert refused.prompt_tokens is None
    assert (refused.failed, refused.error_code) == (400, "context_length_exceeded")


async def test_times_of_plain_responses_are_not_measured(apps: Any, client_of: Any) -> None:
    """The tokens of a plain response arrive together, so their times are no measurement."""
    app = apps("llama_cpp")
    with observed(app, keeps=False) as recorder:
        async with client_of(app) as client:
            body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 3}
            await client.post("/v1/completions", json=body)
    (one,) = recorder.records
    assert one.arrivals is None
    assert one.begun < one.last < one.ended


async def test_a_large_request_does_not_wait_for_its_observers(
    apps: Any, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observers get a large request at its end, and a small one together with others."""
    monkeypatch.setattr("latimer.adapter.observers.OBSERVED_AFTER", 60)
    app = apps("llama_cpp")
    async with client_of(app) as client:
        with observed(app, keeps=False) as recorder:
            for size, seen in ((10, 0), (100_000, 2)):
                body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 1, "user": "u" * size}
                await client.post("/v1/completions", json=body)
                assert len(recorder.records) == seen


async def test_an_observer_that_fails_takes_nothing_from_others(
    apps: Any, client_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """If an observer raises an error, the log has it, and the others get the requests."""

    class Failing(Recorder):
        def take(self, ended: Sequence[Record]) -> None:
            raise RuntimeError("the disk is full")

    app, recorder = apps("llama_cpp"), Recorder(False)
    before = app.service.observers.all
    app.service.observers.replace([Failing(False), recorder])
    try:
        async with client_of(app) as client:
            for _ in range(2):
                body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 1}
                assert (await client.post("/v1/completions", json=body)).is_success
    finally:
        app.service.observers.replace(before)
    assert len(recorder.records) == 2
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_has_ended_is_released_before_it_is_observed(
    apps: Any, client_of: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A request that waits for its observers keeps its measurements, and not the exchange."""
    kept: list[weakref.ref[Exchange]] = []
    ended = Observers.ended

    def note(observers: Observers, exchange: Exchange, record: Record) -> None:
        kept.append(weakref.ref(exchange))
        ended(observers, exchange, record)

    monkeypatch.setattr("latimer.adapter.observers.OBSERVED_AFTER", 60)
    monkeypatch.setattr(Observers, "ended", note)
    app = apps("llama_cpp")
    async with client_of(app) as client:
        with observed(app, keeps=False) as recorder:
            body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 2, "stream": stream}
            for _ in range(3):
                await client.post("/v1/completions", json=body)
            # The client has the last one. The first has started timers for all, which have its
            # context; the second has started short ones at most.
            await asyncio.sleep(0.1)
            assert kept[1]() is None
            assert not recorder.records
    assert len(recorder.records) == 3


async def test_a_record_needs_no_dictionary(apps: Any, client_of: Any) -> None:
    """A record has few attributes besides its slots; Python puts many of them in a dictionary."""
    app = apps("llama_cpp")
    async with client_of(app) as client:
        with observed(app, keeps=False) as recorder:
            await _two(client)
    for record in recorder.records:
        # Observers only add what they derive from the engine.
        assert len(vars(record)) <= 13


async def _two(client: Any) -> None:
    """Send a stream of three tokens, and a request beyond the context."""
    body = {
        "model": "m",
        "prompt": "1, 2, ",
        "max_tokens": 3,
        "stream": True,
        "ignore_eos": True,
    }
    await client.post("/v1/completions", json=body)
    refused = await client.post("/v1/completions", json={**body, "prompt": "a " * 9_000})
    assert refused.status_code == 400


def test_an_error_of_several_requests_keeps_its_field() -> None:
    """Each prompt is named in an error of its own, since several requests may share the first."""
    shared = ContextExceeded(100, 90, 20, hint="Use less.")
    for index in range(2):
        with pytest.raises(ContextExceeded) as caught, naming(index, 2):
            raise shared
        error = caught.value
        assert (error.param, shared.param) == (f"prompt[{index}]", "prompt")
        assert (error.context, error.prompt_tokens, error.hint) == (100, 90, "Use less.")
