"""Tests that a long conversation is the same to the engine by Messages as by Responses.

It has twenty turns with reasoning, calls and parallel calls; every second answer is a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.chat.tools import taking_text
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.prompts import prompt_of
from support.clients import adapting
from support.dialogue import SCRIPTS, TEMPLATES, TURNS, ByItems
from support.scripted import scripted

from .requests import PATH
from .test_output import accumulated

pytestmark = pytest.mark.slow
CONTEXT = 4096
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "input_schema": _CITY},
    {"name": "clock", "input_schema": _CITY},
    # A custom tool of the Responses API, as the model sees it there.
    {"name": "patch", "input_schema": taking_text("patch", None, None).parameters},
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


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call, as the client of Responses has it; one of them asks for more."""
    asks = call["name"] == "weather" and call["input"] == {"city": "Rome"}
    content = "Warm+" if asks else f"{call['name']}: done."
    return {"type": "tool_result", "tool_use_id": call["id"], "content": content}


@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_prompts_are_those_of_responses(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt has the token ids that it has by Responses, and what was read is cached."""
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
    sizes = [one["input_tokens"] + one["cache_read_input_tokens"] for one in way.usages]
    assert sizes == [len(ids) for ids in wanted]
    cached = [one["cache_read_input_tokens"] for one in way.usages]
    assert min(cached[1:]) >= sizes[0]
    if template == "keeping":
        # The end of an answer is read with the next prompt.
        assert all(one >= 0.9 * size for one, size in zip(cached[5:], sizes[5:], strict=True))
