"""Tests of `reply_token_ids` and `logprobs_token_ids` in chat: replies that have begun."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Finish, Model, Piece, Text, TokenIds
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.model import CONTROL
from support.projector import png
from support.replies import chunks_in
from typing_extensions import override

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
PIXEL = base64.b64encode(png(255, 0, 0, size=1)).decode()
REASONS = "{{ messages[-1].content }}{# <think> </think> #}"


async def chat(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Return the first choice of a chat completion."""
    reply = await client.post(
        "/v1/chat/completions", json={"model": "demo", "messages": HI, **body}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


async def refused(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Return the error of a request."""
    reply = await client.post(
        "/v1/chat/completions", json={"model": "demo", "messages": HI, **body}
    )
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def reasoning(script: str) -> Echo:
    """Return a backend that says a script, with a template that knows reasoning."""
    backend = Echo(script)
    backend.facts = Model("demo", 4096, REASONS, "", CONTROL[2], False, "fp", 7)
    return backend


def ids_of(entries: Any) -> list[int]:
    """Return all ids in the entries of `logprobs`."""
    return [one for entry in entries for one in (*entry["hidden_token_ids"], entry["id"])]


@pytest.mark.parametrize("more", [{}, {"stop": "xyz"}, {"stop": "xyz", "tools": TOOLS}])
async def test_a_character_begins_in_the_ids(scorer: httpx2.AsyncClient, more: Any) -> None:
    """A reply that begins with a part of a character completes it, without `logprobs`, too."""
    body = {"reply_token_ids": [769, 165, 248], "logit_bias": {"101": 100}, "temperature": 0}
    choice = await chat(scorer, **body, **more, max_tokens=1)
    assert choice["message"]["content"] == "Hi日"


async def test_ids_continue_exactly(scorer: httpx2.AsyncClient) -> None:
    """A reply that begins with the ids of another one continues as that one did."""
    body = {"messages": CAPITAL, "temperature": 0, "logprobs": True, "logprobs_token_ids": True}
    whole = await chat(scorer, **body, top_logprobs=3)
    entries = whole["logprobs"]["content"]
    assert all(entry["id"] == entry["top_logprobs"][0]["id"] for entry in entries)
    ids = ids_of(entries)
    for kept in (1, 4, len(ids)):
        again = await chat(scorer, **body, top_logprobs=3, reply_token_ids=ids[:kept])
        assert again["message"]["content"] == whole["message"]["content"]
        assert ids_of(again["logprobs"]["content"]) == ids[kept:]
        for one, other in zip(again["logprobs"]["content"], entries[kept:], strict=True):
            assert abs(one["logprob"] - other["logprob"]) < 0.05


async def test_the_prompt_is_the_ids() -> None:
    """The engine gets the ids of the rendered messages, and then exactly the ids of the request."""
    backend = Echo("llo")
    async with client_of(OpenAIAdapter(backend)) as client:
        # Text would never be split like this: the model has a token for each byte.
        reply = [ord("H"), 256, ord("e")]
        choice = await chat(client, reply_token_ids=reply)
        assert choice["message"]["content"] == "Hello"
    ids = await backend.tokenize(PROMPT, add_special=True, parse_special=True)
    assert backend.jobs[-1].prompt.content == (*ids, *reply)


async def test_streams_begin_with_the_text() -> None:
    """A stream's deltas join to the whole reply, also if a character is cut by the request."""
    data = "é!".encode()
    backend = Echo([[Piece(0, data[1:])], [Finish(0, "end", None, 9, 2)]])
    async with client_of(OpenAIAdapter(backend)) as client:
        body = {"model": "demo", "messages": HI, "reply_token_ids": [ord("a"), data[0]]}
        assert (await chat(client, **body))["message"]["content"] == "aé!"
        chunks = chunks_in(await client.post("/v1/chat/completions", json={**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas) == "aé!"


async def test_a_stream_with_tools_begins_with_the_role() -> None:
    """With tools, too, the role comes first, and the text that the request has sent follows."""
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    async with client_of(OpenAIAdapter(Echo(f"lo{call}"))) as client:
        body = {"model": "demo", "messages": HI, "tools": TOOLS, "reply_token_ids": [*b"Hel"]}
        chunks = chunks_in(await client.post("/v1/chat/completions", json={**body, "stream": True}))
    role, *deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert role == {"role": "assistant", "content": "", "refusal": None}
    assert not any("role" in delta for delta in deltas)
    assert [delta.get("content") for delta in deltas[:5]] == ["H", "e", "l", "l", "o"]


async def test_reasoning_is_hidden_and_kept() -> None:
    """Tokens of reasoning are reported with the next token, and continue as reasoning."""
    body = {"logprobs": True, "logprobs_token_ids": True}
    async with client_of(OpenAIAdapter(reasoning("<think>Hm.</think>\n\nParis"))) as client:
        first = (await chat(client, **body))["logprobs"]["content"]
    assert [entry["token"] for entry in first] == [*"Paris"]
    assert bytes(first[0]["hidden_token_ids"]) == b"<think>Hm.</think>\n\n"
    assert not any(entry["hidden_token_ids"] for entry in first[1:])
    async with client_of(OpenAIAdapter(reasoning("ris"))) as client:
        choice = await chat(client, **body, reply_token_ids=ids_of(first[:2]))
        assert choice["message"]["reasoning_content"] == "Hm."
        assert choice["message"]["content"] == "Paris"
        assert bytes(ids_of(choice["logprobs"]["content"])) == b"ris"
        begun = list(b"<think>H")
        choice = await chat(client, **body, reply_token_ids=begun)
        assert choice["message"]["reasoning_content"] == "Hris"


async def test_a_call_goes_on() -> None:
    """A reply that begins inside the arguments of a call returns the whole call."""
    begun = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'
    async with client_of(OpenAIAdapter(Echo('ris"}}\n</tool_call>'))) as client:
        choice = await chat(client, tools=TOOLS, reply_token_ids=list(begun.encode()))
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"].replace(" ", "") == '{"city":"Paris"}'


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_stops_apply_to_what_is_generated(tools: Any) -> None:
    """A stop sequence in the ids does not end the reply; one in the generated text does."""
    async with client_of(OpenAIAdapter(Echo("cd#ef"))) as client:
        choice = await chat(client, tools=tools, stop="#", reply_token_ids=list(b"a#b"))
    assert choice["message"]["content"] == "a#bcd"
    assert choice["finish_reason"] == "stop"


async def test_a_stop_ends_what_goes_on_after_reasoning() -> None:
    """With a stop sequence, a reply that begins inside reasoning is split as without one."""
    begun = list(b"<think>H")
    async with client_of(OpenAIAdapter(reasoning("m</think>\n\nPa#gone"))) as client:
        choice = await chat(client, stop="#", reply_token_ids=begun)
    assert choice["message"]["reasoning_content"] == "Hm"
    assert choice["message"]["content"] == "Pa"


async def test_an_engine_that_takes_text() -> None:
    """An engine without ids gets the text if it has these tokens; else the request is refused."""
    backend = _Texts(" there")
    async with client_of(OpenAIAdapter(backend)) as client:
        choice = await chat(client, reply_token_ids=list(b"Hi"))
        assert choice["message"]["content"] == "Hi there"
        error = await refused(client, reply_token_ids=[0xC3])
        assert error["param"] == "reply_token_ids"
        assert "splits into other tokens" in error["message"]


async def test_an_image_before_the_reply() -> None:
    """An engine that takes no ids next to images gets the text, if it has these tokens."""
    backend = _Sees(" dot.")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    async with client_of(OpenAIAdapter(backend)) as client:
        choice = await chat(client, messages=messages, reply_token_ids=list(b"A red"))
        assert choice["message"]["content"] == "A red dot."
        content = backend.jobs[-1].prompt.content
        assert isinstance(content, Text)
        assert content.text.endswith("<|im_start|>assistant\nA red")
        error = await refused(client, messages=messages, reply_token_ids=[0xC3])
        assert error["param"] == "reply_token_ids"
        assert "With images" in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"reply_token_ids": [5_000]}, "5000"),
        ({"reply_token_ids": [-1]}, "reply_token_ids"),
        ({"reply_token_ids": [5], "response_format": {"type": "json_object"}}, "response_format"),
        ({"reply_token_ids": [5], "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_wrong_ids(echo: httpx2.AsyncClient, body: Any, message: str) -> None:
    """Unknown ids are a 400 that names the field, and so is a grammar, which would begin again."""
    error = await refused(echo, **body)
    assert error["param"].startswith("reply_token_ids")
    assert message in error["message"]


async def test_ids_need_log_probabilities(echo: httpx2.AsyncClient) -> None:
    """`logprobs_token_ids` without `logprobs` is a 400 that names it."""
    assert (await refused(echo, logprobs_token_ids=True))["param"] == "logprobs_token_ids"


class _Sees(Echo):
    """A backend that sees images, but not in prompts of ids."""

    capabilities = replace(Echo.capabilities, media_among_ids=False)

    def __init__(self, script: str) -> None:
        super().__init__(script)
        self.facts = replace(self.facts, media=frozenset({"image"}))


class _Texts(Echo):
    """A backend that does not report the bytes of its tokens, as koboldcpp."""

    @override
    async def token_bytes(self) -> None:
        return None

    @override
    async def detokenize(self, ids: TokenIds) -> bytes:
        return (await super().detokenize(ids)).decode(errors="ignore").encode()
