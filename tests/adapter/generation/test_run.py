"""Tests of the generation loop: calls of observers, and the reply that a stream adds up to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

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
    """An observer that records its calls."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.seen: list[str] = []
        self.usage: Any = None
        self.reply: Mapping[str, Any] | None = None

    def start(self) -> None:
        """Record the call."""
        self.seen.append("start")

    def first_token(self) -> None:
        """Record the call."""
        self.seen.append("first token")

    def finish(self, usage: Any, reply: Mapping[str, Any] | None) -> None:
        """Record the call and keep its arguments."""
        self.seen.append("finish")
        self.usage, self.reply = usage, reply


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
    recorders: list[Recorder] = []

    def observers(_served: Any) -> list[Recorder]:
        recorders.append(Recorder(keeps=True))
        return recorders[-1:]

    app._service.observers = observers
    async with client_of(app) as client:
        whole = (await client.post(path, json=body)).json()
        stream = await client.post(path, json={**body, "stream": True})
    first, second = recorders
    assert first.seen == second.seen == ["start", "first token", "finish"]
    assert first.reply == whole
    assert second.reply is not None
    assert alike(second.reply) == alike(whole)
    assert second.usage == second.reply["usage"]
    chunk = json.loads(stream.text.partition("\n\n")[0].removeprefix("data: "))
    assert (second.reply["id"], second.reply["created"]) == (chunk["id"], chunk["created"])
    for choice in second.reply["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call["id"] in stream.text


async def test_nothing_is_kept_for_nobody(apps: Any, client_of: Any) -> None:
    """An observer that keeps no replies gets only the usage; a rejected request only starts."""
    app = apps("llama_cpp")
    recorder = Recorder(keeps=False)
    app._service.observers = lambda _served: [recorder]
    async with client_of(app) as client:
        body = {
            "model": "m",
            "prompt": "1, 2, ",
            "max_tokens": 3,
            "stream": True,
            "ignore_eos": True,
        }
        await client.post("/v1/completions", json=body)
        assert (recorder.seen, recorder.reply) == (["start", "first token", "finish"], None)
        assert recorder.usage["completion_tokens"] == 3
        recorder.seen.clear()
        refused = await client.post("/v1/completions", json={**body, "prompt": "a " * 9_000})
        assert refused.status_code == 400
        assert recorder.seen == ["start"]
