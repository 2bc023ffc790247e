"""Calls of GLM, MiniMax and DeepSeek, over each engine with a model that follows a script.

The templates are the published ones, and for MiniMax M2 a short one in the manner of its own.
koboldcpp returns text only, so that markers are spelled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
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

TEMPLATES = Path(__file__).parents[2] / "templates"
# In the manner of https://huggingface.co/MiniMaxAI/MiniMax-M2, `chat_template.jinja`.
MINIMAX = (
    "{% if tools %}]~b]system\n{% for t in tools %}<tool>{{ t.function | tojson }}</tool>\n"
    "{% endfor %}[e~[\n{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n"
    "{% elif m.role == 'tool' %}]~b]tool\n<response>{{ m.content }}</response>[e~[\n"
    "{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOTE = {"type": "custom", "custom": {"name": "note"}}
ZURICH = ("get_weather", {"city": "Zürich", "days": 2})
ROME = ("get_weather", {"city": 'L\'"Aquila"\n<b>', "days": 1})


class Family(NamedTuple):
    """The format of a model's answers.

    Args:
        thought: reasoning that is "Hmm.".
        begin, end: the markers around several calls.
        call: writes one call; its arguments are the city or the input, and the days.
        marks: the strings that are control tokens.
        fields: the fields of a request for reasoning.
    """

    thought: str
    begin: str
    call: Callable[[str, Mapping[str, Any]], str]
    end: str
    marks: Sequence[str]
    fields: Mapping[str, Any] = {}

    def text(self, *calls: tuple[str, Mapping[str, Any]], content: str = "") -> str:
        """Return reasoning, content and calls."""
        written = "".join(self.call(*one) for one in calls)
        return f"{self.thought}{content}{self.begin}{written}{self.end}"


def glm(line: str) -> Callable[[str, Mapping[str, Any]], str]:
    """Return a function that writes GLM's calls, with tags that end lines or do not."""

    def call(name: str, arguments: Mapping[str, Any]) -> str:
        lines = [f"{line}<tool_call>{name}"]
        for key, value in arguments.items():
            lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{value}</arg_value>"]
        return line.join([*lines, "</tool_call>"])

    return call


def minimax(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of MiniMax M2."""
    given = [f'<parameter name="{key}">{value}</parameter>' for key, value in arguments.items()]
    return "\n".join([f'<invoke name="{name}">', *given, "</invoke>\n"])


def dsml(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of DeepSeek V3.2."""
    given = [
        f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value}</{DSML}parameter>"
        for key, value in arguments.items()
    ]
    return "\n".join([f'<{DSML}invoke name="{name}">', *given, f"</{DSML}invoke>\n"])


def v3_1(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of DeepSeek V3.1."""
    return f"{V3_1[1]}{name}{V3_1[2]}{json.dumps(arguments, ensure_ascii=False)}{V3_1[3]}"


def deepseek(block: str) -> Family:
    """Return the family of a version, which has its own name for the block of calls."""
    return Family(
        "Hmm.</think>", f"\n\n<{DSML}{block}>\n", dsml, f"</{DSML}{block}>",
        ("</think>", DSML), {"enable_thinking": True},
    )  # fmt: skip


DSML = "｜DSML｜"
V3_1 = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
GLM_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>")
MINIMAX_MARKS = ("</think>", "<minimax:tool_call>", "</minimax:tool_call>")
FAMILIES = {
    "GLM-4.6": Family("\n<think>Hmm.</think>\n", "", glm("\n"), "", GLM_MARKS),
    "GLM-4.7-Flash": Family("Hmm.</think>", "", glm(""), "", GLM_MARKS[1:]),
    "minimax": Family("Hmm.\n</think>\n\n", "<minimax:tool_call>\n", minimax,
                      "</minimax:tool_call>", MINIMAX_MARKS),
    "deepseek-ai-DeepSeek-V3.2": deepseek("function_calls"),
    "deepseek-ai-DeepSeek-V4": deepseek("tool_calls"),
    "deepseek-ai-DeepSeek-V3.1": Family(
        "Hmm.</think>", V3_1[0], v3_1, V3_1[-1], ("</think>", *V3_1), {"enable_thinking": True}
    ),
}  # fmt: skip


def tokens(text: str, marks: Sequence[str]) -> list[str]:
    """Divide a text into tokens, all different: each mark once, and pieces of other text."""
    found: list[str] = []
    while text:
        left = [one for one in marks if one not in found]
        mark = next((one for one in left if text.startswith(one)), "")
        # The last character of a prompt is not a piece of its own.
        size = min([*(at for one in left if (at := text.find(one)) > 0), 7])
        while text[:size] in (*found, ">") or len(text) - size == 1:
            size += 1
        found.append(mark or text[:size])
        text = text[len(found[-1]) :]
    return found


@asynccontextmanager
async def client_of(
    engine: str, path: Path, title: str, text: str, marks: Sequence[str] = ()
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of an engine whose model writes a text."""
    template = MINIMAX if title == "minimax" else (TEMPLATES / f"{title}.jinja").read_text()
    async with AsyncExitStack() as stack:
        backend: Backend
        if engine == "koboldcpp":
            _, backend = await stack.enter_async_context(koboldcpp(template, text))
        else:
            # The script follows the last character of each prompt.
            script, after = tokens(text, marks), "\n" if title == "minimax" else ">"
            scripted.scripted(path, script, template, marks, after, context=4096)
            backend = LlamaCpp(path, context=4096)
            if engine == "llama_server":
                address = stack.enter_context(llama_server(path, slots=1, context=4096))
                backend = LlamaServer(address)
        app = OpenAIAdapter(backend, any_model=True)
        transport = httpx2.ASGITransport(app)
        yield await stack.enter_async_context(
            httpx2.AsyncClient(transport=transport, base_url="http://latimer", timeout=60)
        )
        await app.aclose()


async def ask(client: httpx2.AsyncClient, title: str, *messages: Any, **fields: Any) -> Any:
    """Return the choice of a response with a tool, or the deltas of a stream."""
    asked = [{"role": "user", "content": "Hi"}, *messages]
    body = {"model": "m", "messages": asked, "tools": [TOOL], "temperature": 0, "max_tokens": 1000}
    reply = await client.post(
        "/v1/chat/completions", json={**body, **FAMILIES[title].fields, **fields}
    )
    assert reply.status_code == 200, reply.text
    if fields.get("stream"):
        return [chunk["choices"][0]["delta"] for chunk in chunks_in(reply)]
    return reply.json()["choices"][0]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of a message's calls."""
    own = [call["function"] for call in message.get("tool_calls", ())]
    return [(one["name"], json.loads(one["arguments"])) for one in own]


def streamed_calls(deltas: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the names and arguments of a stream's calls."""
    found: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            own = found.setdefault(call["index"], [call["function"].get("name", ""), ""])
            own[1] += call["function"].get("arguments", "")
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


@pytest.mark.parametrize("title", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
async def test_reasoning_content_and_calls(tmp_path: Path, engine: str, title: str) -> None:
    """Reasoning, content and two calls are separated, plain and streamed, and can be sent back."""
    family = FAMILIES[title]
    text = family.text(ZURICH, ROME, content="I look.")
    async with client_of(engine, tmp_path / "model.gguf", title, text) as client:
        choice = await ask(client, title)
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hmm.", "I look.")
        assert calls_of(message) == [ZURICH, ROME]
        assert choice["finish_reason"] == "tool_calls"
        deltas = await ask(client, title, stream=True)
        assert "".join(one.get("content") or "" for one in deltas) == "I look."
        assert "".join(one.get("reasoning_content") or "" for one in deltas) == "Hmm."
        assert streamed_calls(deltas) == [ZURICH, ROME]
        single = await ask(client, title, parallel_tool_calls=False)
        assert calls_of(single["message"]) == [ZURICH]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
            for call in message["tool_calls"]
        ]
        again = await ask(client, title, message, *results)
        assert calls_of(again["message"])[0] == ZURICH
        silent = await ask(client, title, tool_choice="none")
        assert "tool_calls" not in silent["message"]


@pytest.mark.parametrize("title", FAMILIES)
@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_required_calls_with_tokens(tmp_path: Path, engine: str, title: str) -> None:
    """Grammars of `required`, named and cut calls allow what the model writes by itself."""
    family = FAMILIES[title]
    text = family.text(ZURICH)
    named = {"type": "function", "function": {"name": "get_weather"}}
    path = tmp_path / "model.gguf"
    async with client_of(engine, path, title, text, family.marks) as client:
        for chosen in ("auto", "required", named):
            fields = {"tool_choice": chosen, "parallel_tool_calls": False}
            choice = await ask(client, title, **fields)
            assert calls_of(choice["message"]) == [ZURICH]
            assert choice["message"]["reasoning_content"] == "Hmm."
            assert choice["message"]["content"] is None
        size = len(tokens(text, family.marks)) - 6
        cut = await ask(client, title, tool_choice="required", max_tokens=size)
        assert cut["finish_reason"] == "length"
        assert cut["message"]["content"] is None


@pytest.mark.parametrize("title", FAMILIES)
async def test_broken_calls_are_content(tmp_path: Path, title: str) -> None:
    """A call that nothing enforces is content if it is cut off or calls an unknown function."""
    family = FAMILIES[title]
    known = family.text(ZURICH).removeprefix(family.thought)
    for broken in (known[:60], known.replace("get_weather", "launch")):
        async with client_of("koboldcpp", tmp_path, title, family.thought + broken) as client:
            choice = await ask(client, title)
            assert "tool_calls" not in choice["message"]
            assert choice["message"]["content"] == broken.strip()


@pytest.mark.parametrize("title", FAMILIES)
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
