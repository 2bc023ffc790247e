"""Tool calls of whole families, over each engine with a model that writes what it is scripted to.

The templates are those of `stand_ins`. koboldcpp returns text only, so that markers are spelled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support import scripted
from support.replies import chunks_in
from support.scripted_koboldcpp import koboldcpp
from support.servers import llama_server

from .stand_ins import STAND_INS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ARGUMENTS = {"city": "Zürich", "days": 2}
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")


class Family(NamedTuple):
    """A model's call.

    Args:
        call: the tokens of a call of `get_weather` with `ARGUMENTS`.
        marks: those of them that are control tokens.
        fields: fields of requests that let the model reason.
        before: the tokens of reasoning and content before the call.
        parts: the reasoning and the content.
    """

    call: Sequence[str]
    marks: Sequence[str]
    before: Sequence[str] = ("I look", ".\n")
    parts: tuple[str | None, str | None] = (None, "I look.")
    fields: Mapping[str, Any] = MappingProxyType({})


KIMI_MARKS = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
KIMI_CALL = (
    *KIMI_MARKS[:2], "functions.get_weather:", "0", KIMI_MARKS[2],
    '{"city": "Zür', 'ich", "days": 2}', *KIMI_MARKS[3:],
)  # fmt: skip
THINKS = ("<think>", "Hm", "m.", "</think>", "I look", ".\n")
FAMILIES = {
    "functionary-v3.1": Family(
        ("<func", "tion=get_weather>", '{"city": "Zürich"', ', "days": 2}', "</function>"), ()
    ),
    "lfm2": Family(
        (
            "<|tool_call_start|>",
            "[get_",
            "weather(city='Zür",
            "ich', days=2",
            ")]",
            "<|tool_call_end|>",
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        THINKS,
        ("Hmm.", "I look."),
    ),
    "functionary-v3.2": Family(
        ("get_weather\n", '{"city": "Zürich"', ', "days": 2}'),
        (),
        ("all\n", "I look", ".\n", ">>>"),
    ),
    "gemma4": Family(
        (
            "<|tool_call>",
            "call:get_",
            'weather{city:<|"|>Zür',
            'ich<|"|>,days:',
            "2}",
            "<tool_call|>",
        ),
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
        ("<|channel>", "thought\n", "Hm", "m.\n", "<channel|>", "I look", ".\n"),
        ("Hmm.", "I look."),
        {"enable_thinking": True},
    ),
    "kimi-k2": Family(KIMI_CALL, (*KIMI_MARKS, "<think>", "</think>"), THINKS, ("Hmm.", "I look.")),
    "kimi-k2-first": Family(KIMI_CALL, KIMI_MARKS),
}


@asynccontextmanager
async def client_of(
    engine: str, path: Path, script: Sequence[str], title: str
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of an engine whose model writes a script."""
    template = STAND_INS[title]
    async with AsyncExitStack() as stack:
        backend: Backend
        if engine == "koboldcpp":
            _, backend = await stack.enter_async_context(koboldcpp(template, "".join(script)))
        else:
            # The script follows the last character of each prompt.
            scripted.scripted(
                path, script, template, FAMILIES[title].marks, after="\n>", context=4096
            )
            backend = LlamaCpp(path)
            if engine == "llama_server":
                address = stack.enter_context(llama_server(path, context=4096))
                backend = LlamaServer(address)
        app = OpenAIAdapter(backend, any_model=True)
        transport = httpx2.ASGITransport(app)
        yield await stack.enter_async_context(
            httpx2.AsyncClient(transport=transport, base_url="http://latimer", timeout=60)
        )
        await app.aclose()


async def ask(client: httpx2.AsyncClient, *messages: Any, **fields: Any) -> Any:
    """Return the reply to a request with a tool, or the chunks of a stream."""
    asked = [{"role": "user", "content": "Hi"}, *messages]
    body = {"model": "m", "messages": asked, "tools": [TOOL], "temperature": 0, "max_tokens": 400}
    reply = await client.post("/v1/chat/completions", json={**body, **fields})
    assert reply.status_code == 200, reply.text
    return chunks_in(reply) if fields.get("stream") else reply.json()


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of a message's calls."""
    own = [call["function"] for call in message.get("tool_calls", ())]
    return [(one["name"], json.loads(one["arguments"])) for one in own]


@pytest.mark.parametrize("title", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
async def test_calls_of_each_family_over_each_engine(
    tmp_path: Path, engine: str, title: str
) -> None:
    """A call after reasoning and content is found, plain and streamed, and can be sent back."""
    family = FAMILIES[title]
    script = (*family.before, *family.call)
    wanted = [("get_weather", ARGUMENTS)]
    async with client_of(engine, tmp_path / "model.gguf", script, title) as client:
        choice = (await ask(client, **family.fields))["choices"][0]
        message = choice["message"]
        assert (message.get("reasoning_content"), message["content"]) == family.parts
        assert calls_of(message) == wanted
        assert choice["finish_reason"] == "tool_calls"
        chunks = await ask(client, stream=True, **family.fields)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(one.get("content") or "" for one in deltas) == family.parts[1]
        parts = [call["function"] for one in deltas for call in one.get("tool_calls", ())]
        assert [one["name"] for one in parts if "name" in one] == ["get_weather"]
        assert json.loads("".join(one["arguments"] for one in parts)) == ARGUMENTS
        own = [call["id"] for call in message["tool_calls"]]
        result = {"role": "tool", "tool_call_id": own[0], "content": "21 degrees"}
        again = (await ask(client, message, result, **family.fields))["choices"][0]["message"]
        assert calls_of(again) == wanted
        silent = (await ask(client, tool_choice="none"))["choices"][0]["message"]
        assert "tool_calls" not in silent


@pytest.mark.parametrize("title", FAMILIES)
@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_required_calls_of_each_family(tmp_path: Path, engine: str, title: str) -> None:
    """A grammar of a required, a named and a cut call allows what the model writes by itself."""
    family = FAMILIES[title]
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with client_of(engine, tmp_path / "model.gguf", family.call, title) as client:
        for choice in ("required", named):
            reply = (await ask(client, tool_choice=choice, parallel_tool_calls=False))["choices"][0]
            assert calls_of(reply["message"]) == [("get_weather", ARGUMENTS)]
        size = len(family.call) // 2 + 1
        cut = (await ask(client, tool_choice="required", max_tokens=size))["choices"][0]
        assert cut["finish_reason"] == "length"
        assert cut["message"]["content"] is None


async def test_the_recipient_of_an_answer_is_no_content(tmp_path: Path) -> None:
    """Functionary v3.2's answers are content without their recipient, also with a schema."""
    script = ("all\n", '{"city": "Zürich", ', '"days": 2}')
    answer = "".join(script[1:])
    schema = {"name": "n", "schema": PARAMETERS}
    wanted = {"type": "json_schema", "json_schema": schema}
    path = tmp_path / "model.gguf"
    async with client_of("llama_cpp", path, script, "functionary-v3.2") as client:
        for fields in ({}, {"response_format": wanted}, {"response_format": wanted, "tools": []}):
            choice = (await ask(client, **fields))["choices"][0]
            assert choice["message"]["content"] == answer
            assert choice["finish_reason"] == "stop"
        chunks = await ask(client, stream=True, tools=[])
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(one.get("content") or "" for one in deltas) == answer
