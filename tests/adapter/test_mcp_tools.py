"""Fifty tools of MCP servers: lookaheads, nested patterns, old dialects, huge enums."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.chat.formats import FORMATS, ToolCallFormat
from latimer.adapter.chat.formats.base import FunctionSchema, GrammarRequest, grammar
from latimer.backends.grammar import gbnf
from latimer.backends.grammar.dialects import check_schema
from support import scripted
from support.clients import adapting

TOOLS = json.loads((Path(__file__).parent / "mcp_tools.json").read_text())
NAME = "mcp__filesystem__read_text_file"
NAMED = {"type": "function", "function": {"name": NAME}}
SCRIPT = (
    "<tool_call>",
    f'{{"name": "{NAME}", ',
    '"arguments": {"path": "/a"}',
    "}",
    "</tool_call>",
)
# Names and descriptions only: the prompt of fifty whole schemas takes small models a minute.
TEMPLATE = scripted.HERMES.replace(
    "{{ tools | tojson }}",
    "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}",
)


def functions(tools: list[Any]) -> tuple[FunctionSchema, ...]:
    """Return tools in the form that grammars need."""
    own = [tool["function"] for tool in tools]
    return tuple(
        FunctionSchema(f["name"], json.dumps(f["parameters"]).encode(), False) for f in own
    )


def test_every_schema_is_accepted() -> None:
    """Each of the fifty schemas is a valid one, in its own dialect or in the latest."""
    assert len(TOOLS) == 50
    for tool in TOOLS:
        check_schema(tool["function"]["parameters"])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.title)
def test_one_grammar_of_fifty_tools(form: ToolCallFormat) -> None:
    """Each format has a valid grammar with all fifty tools within seconds, most with schemas."""
    begun = time.process_time()
    text = grammar(GrammarRequest(form, functions(TOOLS), True, True, frozenset()))
    gbnf.check(text)
    # A virtual machine can be half as fast as usual.
    assert time.process_time() - begun < 3
    assert "call-49 ::=" in text
    assert "nextThoughtNeeded" in text


@pytest.fixture(scope="module", params=["llama_cpp", "llama_server", "koboldcpp"])
async def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of each engine, with a model that calls one of the tools."""
    engine = scripted.scripted_engine(
        request.param, tmp_path_factory.mktemp("mcp"), SCRIPT, TEMPLATE, slots=1, context=4096
    )
    async with engine as backend, adapting(backend) as client:
        yield client


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
async def test_a_call_among_fifty_tools(client: httpx2.AsyncClient, choice: Any) -> None:
    """With any `tool_choice`, the call of one of fifty tools is returned as a call."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Read /a."}],
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 200,
    }
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == NAME
    assert json.loads(call["function"]["arguments"]) == {"path": "/a"}


async def test_a_strict_tool_must_be_enforced(client: httpx2.AsyncClient) -> None:
    """With `strict`, a pattern with a lookahead is a 400 that names the keyword."""
    tool = next(one for one in TOOLS if one["function"]["name"].endswith("slack_post_message"))
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Post."}],
        "tools": [strict],
        "tool_choice": "required",
    }
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "pattern" in reply.text
