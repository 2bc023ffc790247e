"""Tests of messages over every engine: reasoning, calls, ends, counts and the prompt cache."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.clients import adapting
from support.scripted import CHATML, HERMES, scripted_engine

from .requests import PATH, TOOL, body_of, result, said, text, user
from .test_output import accumulated

ENGINES = ("llama_cpp", "llama_server", "koboldcpp")
# A template with a switch, which shows earlier reasoning.
SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
THOUGHT = ("Two", " and", " two", " make four.", "</think>", "\n\n", "Four", ".")
CALL = ("<tool_call>", '{"name": "f", ', '"arguments": ', '{"a": 5}}', "</tool_call>")
ANSWER = ("Well", ", one", " STO", "P two", ".")


@asynccontextmanager
async def engine(
    name: str, folder: Path, script: Sequence[str], template: str = CHATML
) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an engine that answers with a script."""
    async with (
        scripted_engine(name, folder, script, template, slots=1, context=512) as backend,
        adapting(backend) as client,
    ):
        yield client


async def ask(client: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Return a message, which its stream adds up to as well."""
    body = body_of(**{"messages": [user("Hi")], "max_tokens": 60, **fields})
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()
    streamed = await client.post(PATH, json={**body, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "[DONE]" not in streamed.text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.split("\n")
        if line.startswith("data: ")
    ]
    begun = events[0]["message"]["usage"]["input_tokens"]
    assert total(message) == begun
    found = accumulated(events)
    assert comparable(found) == comparable(message)
    counted = await client.post(f"{PATH}/count_tokens?beta=true", json=body)
    assert counted.json() == {"input_tokens": begun}
    return message


def total(message: dict[str, Any]) -> int:
    """Return the tokens of a message's prompt."""
    usage = message["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in two answers to one request."""
    content = [{**block, "id": "", "signature": ""} for block in message["content"]]
    usage = {**message["usage"], "input_tokens": total(message), "cache_read_input_tokens": 0}
    return {**message, "id": "", "content": content, "usage": usage}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
async def test_reasoning(name: str, tmp_path: Path) -> None:
    """Reasoning is a block with a signature, which stands for it in the next request."""
    async with engine(name, tmp_path, THOUGHT, SWITCHED) as client:
        adaptive = {"type": "adaptive"}
        message = await ask(client, thinking=adaptive)
        thought, answer = message["content"]
        assert thought["thinking"] == "Two and two make four."
        assert answer == {"type": "text", "text": "Four."}
        assert message["stop_reason"] == "end_turn"
        details = message["usage"]["output_tokens_details"]
        assert 0 < details["thinking_tokens"] < message["usage"]["output_tokens"]
        hidden = await ask(client, thinking={**adaptive, "display": "omitted"})
        assert hidden["content"][0]["thinking"] == ""
        assert hidden["content"][0]["signature"]
        assert hidden["usage"]["output_tokens"] == message["usage"]["output_tokens"]
        sizes = set()
        for first in (message, hidden):
            turns = [user("Hi"), said(*first["content"]), user("And?")]
            sizes.add(total(await ask(client, messages=turns, thinking=adaptive)))
        assert len(sizes) == 1
        (size,) = sizes
        turns = [user("Hi"), said(text("Four.")), user("And?")]
        assert size > total(await ask(client, messages=turns, thinking=adaptive))
        for off in ({}, {"thinking": {"type": "disabled"}}):
            assert [one["type"] for one in (await ask(client, **off))["content"]] == ["text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
async def test_calls(name: str, tmp_path: Path) -> None:
    """A call is a block with an object, and its result is part of the next prompt."""
    async with engine(name, tmp_path, CALL, HERMES) as client:
        message = await ask(client, tools=[TOOL])
        (call,) = message["content"]
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 5})
        assert call["id"].startswith("toolu_")
        assert message["stop_reason"] == "tool_use"
        turns = [user("Hi"), said(call), user(result(call["id"], content="nine"))]
        again = await ask(client, messages=turns, tools=[TOOL])
        turns[2] = user(result(call["id"], content="nine", is_error=True))
        failed = await ask(client, messages=turns, tools=[TOOL])
        assert total(message) < total(again) < total(failed)
        none = await ask(client, tools=[TOOL], tool_choice={"type": "none"})
        assert total(none) == total(message)
        assert none["stop_reason"] == "end_turn"


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
async def test_ends(name: str, tmp_path: Path) -> None:
    """A message says which stop sequence, which limit, or which turn has ended it."""
    async with engine(name, tmp_path, ANSWER) as client:
        message = await ask(client)
        assert (message["content"][0]["text"], message["stop_reason"]) == (
            "Well, one STOP two.", "end_turn",
        )  # fmt: skip
        message = await ask(client, stop_sequences=["nothing", "STOP"])
        assert message["content"] == [{"type": "text", "text": "Well, one "}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
        message = await ask(client, max_tokens=2)
        # A token of the fake koboldcpp is a character.
        wanted = "We" if name == "koboldcpp" else "Well, one"
        assert (message["content"][0]["text"], message["stop_reason"]) == (wanted, "max_tokens")
        prompt = [user("Hi " * 100)]
        message = await ask(client, messages=prompt, max_tokens=0)
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert message["usage"]["output_tokens"] == 0
        message = await ask(client, messages=prompt)
        if name != "koboldcpp":
            assert message["usage"]["cache_read_input_tokens"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
async def test_the_context(name: str, tmp_path: Path) -> None:
    """The context ends an answer with its own reason, and a prompt beyond it is a 400."""
    async with engine(name, tmp_path, ANSWER) as client:
        # Each character of a prompt is a token.
        size = total(await ask(client, messages=[user("x")]))
        listed = await client.get("/v1/models")
        context = listed.json()["data"][0]["context_length"]
        # There is room for three of the answer's five tokens.
        long = [user("x" * (context - size - 2))]
        message = await ask(client, messages=long, max_tokens=30_000)
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert message["usage"]["output_tokens"] <= 3
        for stream in (False, True):
            for length in (context + 88, 10_000_000):
                body = body_of(messages=[user("x" * length)], stream=stream)
                reply = await client.post(PATH, json=body)
                assert reply.status_code == 400
                told = reply.json()["error"]["message"].split()
                assert " ".join([*told[:4], told[5], *told[6:7], told[8]]) == (
                    "prompt is too long: tokens > maximum"
                )
                assert int(told[4]) > int(told[7]) == context
                # Only the model of koboldcpp's double has a BOS.
                count = size + context + 87 + (name == "koboldcpp")
                assert length > context + 88 or int(told[4]) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_cpp", "llama_server"])
async def test_the_billing_block_does_not_spoil_the_prompt_cache(name: str, tmp_path: Path) -> None:
    """Requests that differ only in the billing block have one prompt, the second one cached."""
    async with engine(name, tmp_path, ANSWER) as client:
        found = []
        for number in range(2):
            billing = text(f"x-anthropic-billing-header: cch={number}")
            body = body_of(system=[billing, text("Be brief. " * 20)])
            found.append((await client.post(PATH, json=body)).json())
        assert total(found[0]) == total(found[1])
        assert found[1]["usage"]["cache_read_input_tokens"] >= total(found[0]) - 1
