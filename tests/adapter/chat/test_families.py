"""Tool calls of whole families, over each engine with a model that follows a script.

The templates are the published ones. koboldcpp returns text only, so that markers are spelled. The
real engines, which enforce calls, get one template of each format; with `LATIMER_FULL=1` all.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.chat.conversation import turns_of
from latimer.adapter.chat.profile import FUNCTION, detect_style
from latimer.adapter.chat.reasoning import tags_of
from latimer.adapter.chat.templates import render
from latimer.backends.base import Backend, Model
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.schemas.openai.chat import ChatRequest
from support import scripted
from support.clients import adapting
from support.engines.koboldcpp import koboldcpp
from support.replies import chunks_in
from support.samples import ALIKE, FULL
from support.servers import llama_server

from .families import FAMILIES, ROME, ZURICH, Call, tokens

pytestmark = pytest.mark.slow

TEMPLATES = Path(__file__).parents[2] / "templates"
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")
ALL = list(product(ENGINES, FAMILIES))
RUNS = [
    (engine, title) for engine, title in ALL if FULL or engine == "koboldcpp" or title not in ALIKE
]
# LFM2.5's models write strings in single or in double quotes.
QUOTED = ("LFM2.5-8B-A1B", "LFM2.5-Instruct")
CUSTOM = [one for one in FAMILIES if one in QUOTED or one not in ALIKE]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NOTE = {"type": "custom", "custom": {"name": "note"}}
ASKED = {"role": "user", "content": "Hi"}


def ends_of(title: str, template: str) -> str:
    """Return the last characters of prompts: of a question, and of a result that follows it."""
    model = Model("m", 100, template, "<s>", "</s>", False, "fp", 0)
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "21 degrees"}
    found = ""
    for messages in ([ASKED], [ASKED, called, result]):
        parsed = ChatRequest.model_validate({"model": "m", "messages": messages}).messages
        turns, tools = turns_of(model, parsed, [FUNCTION], detect_style(model), tags_of(template))
        for variables in ({}, dict(FAMILIES[title].fields)):
            given = {"messages": turns, "variables": variables, "tools": tools}
            found += render(model, given)[-1]  # type: ignore[arg-type]
    return "".join(sorted(set(found)))


@asynccontextmanager
async def client_of(
    engine: str, path: Path, title: str, text: str, marks: Sequence[str] = ()
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of an engine whose model writes a text."""
    template = (TEMPLATES / f"{title}.jinja").read_text()
    async with AsyncExitStack() as stack:
        backend: Backend
        if engine == "koboldcpp":
            _, backend = await stack.enter_async_context(koboldcpp(template, text))
        else:
            after = ends_of(title, template)
            script = tokens(text, marks, after)
            scripted.scripted(path, script, template, marks, after, context=4096)
            backend = LlamaCpp(path, context=4096)
            if engine == "llama_server":
                address = stack.enter_context(llama_server(path, slots=1, context=4096))
                backend = LlamaServer(address)
        yield await stack.enter_async_context(adapting(backend))


async def ask(client: httpx2.AsyncClient, title: str, *messages: Any, **fields: Any) -> Any:
    """Return the choice of a response with a tool, or the deltas of a stream."""
    body = {"model": "m", "tools": [TOOL], "temperature": 0, "max_tokens": 1000}
    own = {"messages": [ASKED, *messages], **FAMILIES[title].fields, **fields}
    reply = await client.post("/v1/chat/completions", json={**body, **own})
    assert reply.status_code == 200, reply.text
    if fields.get("stream"):
        return [chunk["choices"][0]["delta"] for chunk in chunks_in(reply)]
    return reply.json()["choices"][0]


def calls_of(message: Any) -> list[Call]:
    """Return the names and arguments of a message's calls."""
    own = [call["function"] for call in message.get("tool_calls", ())]
    return [(one["name"], json.loads(one["arguments"])) for one in own]


def streamed(deltas: Sequence[Any]) -> tuple[str | None, str, list[Call]]:
    """Return the reasoning, the content and the calls of a stream."""
    found: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            own = found.setdefault(call["index"], [call["function"].get("name", ""), ""])
            own[1] += call["function"].get("arguments", "")
    texts = [
        "".join(one.get(key) or "" for one in deltas) for key in ("reasoning_content", "content")
    ]
    calls = [(name, json.loads(arguments)) for name, arguments in found.values()]
    return texts[0] or None, texts[1], calls


@pytest.mark.parametrize(("engine", "title"), RUNS)
async def test_reasoning_content_and_calls(tmp_path: Path, engine: str, title: str) -> None:
    """Reasoning, content and two calls are separated, plain and streamed, and can be sent back."""
    family = FAMILIES[title]
    text = family.text(ZURICH, ROME, content="I look.")
    async with client_of(engine, tmp_path / "model.gguf", title, text) as client:
        choice = await ask(client, title)
        message = choice["message"]
        assert message.get("reasoning_content") == family.reasoning
        assert message["content"] == "I look."
        assert calls_of(message) == [ZURICH, ROME]
        assert choice["finish_reason"] == "tool_calls"
        deltas = await ask(client, title, stream=True)
        assert streamed(deltas) == (family.reasoning, "I look.", [ZURICH, ROME])
        single = await ask(client, title, parallel_tool_calls=False)
        assert calls_of(single["message"]) == [ZURICH]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
            for call in message["tool_calls"]
        ]
        again = await ask(client, title, message, *results)
        assert calls_of(again["message"]) == [ZURICH, ROME]
        silent = await ask(client, title, tool_choice="none")
        assert "tool_calls" not in silent["message"]


@pytest.mark.parametrize(("engine", "title"), RUNS)
async def test_one_call_free_required_and_cut(tmp_path: Path, engine: str, title: str) -> None:
    """Grammars of `required`, named and cut calls allow what the model writes by itself."""
    family = FAMILIES[title]
    text = family.text(ZURICH)
    path = tmp_path / "model.gguf"
    async with client_of(engine, path, title, text, family.marks) as client:
        for chosen in ("auto", "required", NAMED):
            fields = {"tool_choice": chosen, "parallel_tool_calls": False}
            choice = await ask(client, title, **fields)
            assert calls_of(choice["message"]) == [ZURICH]
            assert choice["message"].get("reasoning_content") == family.reasoning
            assert choice["message"]["content"] is None
            deltas = await ask(client, title, stream=True, **fields)
            assert streamed(deltas) == (family.reasoning, "", [ZURICH])
        # koboldcpp's double has a token for each byte.
        written = text.partition("days")[0].encode()
        is_bytes = engine == "koboldcpp"
        size = len(written) if is_bytes else len(tokens(text, family.marks, "")) - 3
        cut = await ask(client, title, tool_choice="required", max_tokens=size)
        assert cut["finish_reason"] == "length"
        assert cut["message"]["content"] is None


async def check_content(client: httpx2.AsyncClient, title: str, content: str) -> None:
    """Check that an answer is content and no call, plain and streamed."""
    choice = await ask(client, title)
    assert choice["message"].get("reasoning_content") == FAMILIES[title].reasoning
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].strip() == content
    reasoning, text, calls = streamed(await ask(client, title, stream=True))
    assert (reasoning, text.strip(), calls) == (FAMILIES[title].reasoning, content, [])


@pytest.mark.parametrize(("engine", "title"), ALL if FULL else ALL[-len(FAMILIES) :])
async def test_answers_without_a_call(tmp_path: Path, engine: str, title: str) -> None:
    """An answer of a model that gets tools and calls none is content."""
    text = FAMILIES[title].text(content="I know.")
    async with client_of(engine, tmp_path / "model.gguf", title, text) as client:
        await check_content(client, title, "I know.")


@pytest.mark.parametrize("thinks", ["token", "text"])
@pytest.mark.parametrize("title", ["deepseek-ai-DeepSeek-V3.1", "MiniMax-M2", "LFM2.5-8B-A1B"])
async def test_answers_after_reasoning(tmp_path: Path, title: str, thinks: str) -> None:
    """A grammar for calls that are tokens allows other answers after any reasoning."""
    family = FAMILIES[title]
    marks = [one for one in family.marks if thinks == "token" or "think" not in one]
    text = family.text(content="\n\nI know.")
    async with client_of("llama_cpp", tmp_path / "m.gguf", title, text, marks) as client:
        await check_content(client, title, "I know.")


@pytest.mark.parametrize("title", FAMILIES)
async def test_broken_calls_are_content(tmp_path: Path, title: str) -> None:
    """A call that nothing enforces is content if it is cut off or calls an unknown function."""
    family = FAMILIES[title]
    known = family.text(ZURICH).removeprefix(family.thought)
    for broken in (known[: len(known) * 2 // 3], known.replace("get_weather", "launch")):
        async with client_of("koboldcpp", tmp_path, title, family.thought + broken) as client:
            await check_content(client, title, broken.strip())


@pytest.mark.parametrize("title", CUSTOM)
async def test_custom_tools_take_their_text_unchanged(tmp_path: Path, title: str) -> None:
    """A custom tool gets its input without escapes, also with a grammar for it."""
    family = FAMILIES[title]
    text = family.text(("note", {"input": '+ "é"\n- b'}))
    syntax = {"syntax": "regex", "definition": r'\+ "[^"]+"\n- [a-z]'}
    limited = {"name": "note", "format": {"type": "grammar", "grammar": syntax}}
    async with client_of("llama_cpp", tmp_path / "model.gguf", title, text) as client:
        for tool in (NOTE, {"type": "custom", "custom": limited}):
            fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
            (call,) = (await ask(client, title, **fields))["message"]["tool_calls"]
            assert call["custom"] == {"name": "note", "input": '+ "é"\n- b'}


@pytest.mark.parametrize("title", ["Kimi-K2-Thinking", "GLM-4.6"])
async def test_a_call_that_ends_the_reasoning(tmp_path: Path, title: str) -> None:
    """The token of a call ends reasoning without an end tag, and the call is enforced."""
    family = FAMILIES[title]
    text = family.thought.partition("</think>")[0] + family.calls([ZURICH])
    async with client_of("llama_cpp", tmp_path / "m.gguf", title, text, family.marks) as client:
        choice = await ask(client, title)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == family.reasoning
        assert choice["message"]["content"] is None
        assert calls_of(choice["message"]) == [ZURICH]
        assert streamed(await ask(client, title, stream=True)) == (family.reasoning, "", [ZURICH])
        properties = {"city": {"type": "string"}, "days": {"const": 3}}
        function = {"name": "get_weather", "parameters": {**PARAMETERS, "properties": properties}}
        fields = {"tools": [{"type": "function", "function": function}]}
        choice = await ask(client, title, parallel_tool_calls=False, **fields)
        assert calls_of(choice["message"]) == [("get_weather", {**ZURICH[1], "days": 3})]


@pytest.mark.parametrize(
    ("engine", "marked", "thinks"),
    [("koboldcpp", False, True), ("koboldcpp", False, False), ("llama_cpp", True, True)],
)
async def test_later_channels_are_reasoning(
    tmp_path: Path, engine: str, marked: bool, thinks: bool
) -> None:
    """Gemma's thought channel is reasoning after content, too, with and without thinking."""
    title = "google-gemma-4-31B-it"
    family = FAMILIES[title]
    marks = family.marks if marked else ()
    text = "I look." + family.text(ZURICH)
    async with client_of(engine, tmp_path / "model.gguf", title, text, marks) as client:
        message = (await ask(client, title, enable_thinking=thinks))["message"]
        assert message["reasoning_content"] == family.reasoning
        assert message["content"] == "I look."
        assert calls_of(message) == [ZURICH]
        deltas = await ask(client, title, stream=True, enable_thinking=thinks)
        assert streamed(deltas) == (family.reasoning, "I look.", [ZURICH])
        tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
        body = {"model": "m", "input": "Hi", "tools": [tool]}
        reply = await client.post("/v1/responses", json={**body, "enable_thinking": thinks})
        kinds = [item["type"] for item in reply.json()["output"]]
        assert kinds == ["message", "reasoning", "function_call"]


async def test_the_recipient_of_an_answer_is_no_content(tmp_path: Path) -> None:
    """Functionary v3.2's answers are content without their recipient, also with a schema."""
    answer = '{"city": "Zürich", "days": 2}'
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    title = "meetkai-functionary-medium-v3.2"
    text = FAMILIES[title].text(content=answer)
    async with client_of("llama_cpp", tmp_path / "model.gguf", title, text) as client:
        for fields in ({}, {"response_format": wanted}, {"response_format": wanted, "tools": []}):
            choice = await ask(client, title, **fields)
            assert choice["message"]["content"] == answer
            assert choice["finish_reason"] == "stop"
        deltas = await ask(client, title, stream=True, tools=[])
        assert streamed(deltas) == (None, answer, [])
