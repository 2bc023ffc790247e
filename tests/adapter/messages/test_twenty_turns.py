"""Tests that a long conversation is the same to the engine by Messages, Responses and chat.

It has twenty turns with reasoning, calls and parallel calls; every second answer is a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.chat.tools import taking_text
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.prompts import prompt_of
from support.clients import adapting
from support.dialogue import SCRIPTS, TEMPLATES, TURNS, ByItems
from support.replies import chunks_in
from support.scripted import scripted

from .requests import PATH
from .test_output import accumulated

pytestmark = pytest.mark.slow
CONTEXT = 4096
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# The parameters of each tool. The last one is a custom tool of the Responses API, as the model sees
# it there.
_TOOLS = {
    "weather": _CITY,
    "clock": _CITY,
    "patch": taking_text("patch", None, None).parameters,
}
TOOLS = [{"name": name, "input_schema": schema} for name, schema in _TOOLS.items()]
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in _TOOLS.items()
]


class ByBlocks:
    """A client of Anthropic's API that continues a conversation; signatures have its reasoning.

    Attributes:
        usages: the usage of each message.
    """

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._messages: list[dict[str, Any]] = []
        self.usages: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Run the conversation."""
        for turn in TURNS:
            content: Any = turn
            while content:
                self._messages.append({"role": "user", "content": content})
                answer = await self._ask()
                self._messages.append({"role": "assistant", "content": answer})
                calls = [block for block in answer if block["type"] == "tool_use"]
                content = [result_of(call) for call in calls[::-1]]

    async def _ask(self) -> list[dict[str, Any]]:
        streamed = len(self.usages) % 2 == 1
        body = {
            "model": "m", "max_tokens": 1_000_000, "temperature": 0, "system": "Be brief.",
            "tools": TOOLS, "thinking": {"type": "adaptive", "display": "omitted"},
            "messages": self._messages, "stream": streamed,
        }  # fmt: skip
        reply = await self._client.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        assert "messages" not in reply.headers.get("x-latimer-ignored", "")
        message: dict[str, Any]
        if streamed:
            lines = [one for one in reply.text.split("\n") if one.startswith("data: ")]
            message = accumulated([json.loads(one.removeprefix("data: ")) for one in lines])
        else:
            message = reply.json()
        self.usages.append(message["usage"])
        content: list[dict[str, Any]] = message["content"]
        return content


class ByChat:
    """A client of chat that continues a conversation, with `reasoning_content`."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        self._streamed = False

    async def run(self) -> None:
        """Run the conversation."""
        for turn in TURNS:
            given = [{"role": "user", "content": turn}]
            while given:
                self._messages += given
                answer = await self._ask()
                self._messages.append(answer)
                given = [
                    {"role": "tool", "tool_call_id": call["id"], "content": text_of(
                        call["function"]["name"], json.loads(call["function"]["arguments"])
                    )}
                    for call in answer.get("tool_calls", ())
                ]  # fmt: skip

    async def _ask(self) -> dict[str, Any]:
        body = {
            "model": "m", "temperature": 0, "messages": self._messages, "tools": FUNCTIONS,
            "stream": self._streamed,
        }  # fmt: skip
        reply = await self._client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        self._streamed = not self._streamed
        if not body["stream"]:
            message: dict[str, Any] = reply.json()["choices"][0]["message"]
            return message
        return joined(chunks_in(reply))


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream of chat."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], {**part, "function": {"arguments": ""}})
                function = part["function"]
                call["function"]["name"] = call["function"].get("name") or function["name"]
                call["function"]["arguments"] += function.get("arguments", "")
    if calls:
        message["tool_calls"] = [*calls.values()]
    return message


def text_of(name: str, arguments: dict[str, Any]) -> str:
    """Return the result of a call, as the client of Responses has it; one of them asks for more."""
    asks = name == "weather" and arguments == {"city": "Rome"}
    return "Warm+" if asks else f"{name}: done."


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the block with the result of a call."""
    content = text_of(call["name"], call["input"])
    return {"type": "tool_result", "tool_use_id": call["id"], "content": content}


@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_prompts_are_those_of_responses_and_chat(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt has the same token ids in all three APIs, and what was read is cached."""
    (first, script), *others = SCRIPTS.items()
    model = scripted(
        tmp_path / "model.gguf", script, TEMPLATES[template], after=first, context=CONTEXT,
        others=dict(others), reads=True,
    )  # fmt: skip
    read: list[Any] = []

    def recorded(*given: Any) -> Any:
        found = prompt_of(*given)
        read.append(found[0])
        return found

    monkeypatch.setattr("latimer.backends.llama_cpp.backend.prompt_of", recorded)

    async def prompts(make: Callable[[httpx2.AsyncClient], Any]) -> tuple[list[Any], Any]:
        read.clear()
        async with adapting(LlamaCpp(model, context=CONTEXT, threads=1)) as client:
            way = make(client)
            await way.run()
        return [*read], way

    wanted, _ = await prompts(ByItems)
    found, way = await prompts(ByBlocks)
    assert found == wanted
    by_chat, _ = await prompts(ByChat)
    assert by_chat == wanted
    sizes = [one["input_tokens"] + one["cache_read_input_tokens"] for one in way.usages]
    assert sizes == [len(ids) for ids in wanted]
    cached = [one["cache_read_input_tokens"] for one in way.usages]
    assert min(cached[1:]) >= sizes[0]
    if template == "keeping":
        # The end of an answer is read with the next prompt.
        assert all(one >= 0.9 * size for one, size in zip(cached[5:], sizes[5:], strict=True))
