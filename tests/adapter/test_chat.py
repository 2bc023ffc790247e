"""Tests of `/v1/chat/completions` on every engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
from latimer.adapter.generation.sinks import detailed_usage_of, predicted_usage_of
from latimer.backends.base import Finish
from latimer.backends.llama_cpp import LlamaCpp
from latimer.schemas.openai.chat import ChatChunk, ChatCompletion
from pydantic import TypeAdapter
from support.clients import adapting
from support.replies import chunks_in

REPLY = TypeAdapter(ChatCompletion)
CHUNK = TypeAdapter(ChatChunk)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PREDICTED = ("accepted_prediction_tokens", "rejected_prediction_tokens")
ANSWER = "The capital of France is Paris."


async def chat(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Return a greedy chat completion."""
    reply = await client.post(
        "/v1/chat/completions",
        json={"model": "demo", "temperature": 0, "messages": FRANCE, **body},
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chunks_of(client: httpx2.AsyncClient, **body: Any) -> list[Any]:
    """Return the chunks of a greedy chat completion."""
    reply = await client.post(
        "/v1/chat/completions",
        json={"model": "demo", "temperature": 0, "messages": FRANCE, "stream": True, **body},
    )
    return chunks_in(reply)


async def test_a_reply_is_openais_to_the_last_key(client: httpx2.AsyncClient) -> None:
    """A plain response has exactly OpenAI's keys, types and message (contract 3.3)."""
    reply = await chat(client)
    REPLY.validate_python(reply, strict=True)
    assert list(reply) == [
        "id", "object", "created", "model", "system_fingerprint", "choices", "usage",
    ]  # fmt: skip
    assert reply["id"].startswith("chatcmpl-")
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant", "content": ANSWER, "refusal": None, "annotations": [],
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]  # fmt: skip
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        15,
        7,
        22,
    )
    assert set(usage["prompt_tokens_details"]) == {
        "cached_tokens", "cache_write_tokens", "audio_tokens",
    }  # fmt: skip
    assert set(usage["completion_tokens_details"]) == {
        "reasoning_tokens", "audio_tokens", "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }  # fmt: skip


async def test_a_stream_has_openais_order(client: httpx2.AsyncClient) -> None:
    """A stream sends role, content, an empty delta and usage, in this order (contract 3.5)."""
    chunks = await chunks_of(client, stream_options={"include_usage": True}, service_tier="flex")
    for chunk in chunks:
        CHUNK.validate_python(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["service_tier"] == "flex"
    first, *middle, end, usage = chunks
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == ANSWER
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 22
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_parts_and_names_and_developers(client: httpx2.AsyncClient) -> None:
    """Content parts are joined, `name` is ignored, and a developer message is a system one."""
    parts = [
        {"type": "text", "text": "What is the capital"},
        {"type": "text", "text": " of France?"},
    ]
    reply = await chat(client, messages=[{"role": "user", "content": parts, "name": "Ann"}])
    assert reply["choices"][0]["message"]["content"] == ANSWER
    counts = {
        role: (await chat(client, messages=[{"role": role, "content": "Be brief."}, *FRANCE]))[
            "usage"
        ]["prompt_tokens"]
        for role in ("system", "developer")
    }
    assert counts["system"] == counts["developer"] > 15


async def test_several_choices(client: httpx2.AsyncClient) -> None:
    """`n` choices come in order, and each streamed choice has one role, index 0 first."""
    reply = await chat(client, n=3, seed=1)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {ANSWER}
    assert reply["usage"]["completion_tokens"] == 21
    assert reply["usage"]["prompt_tokens"] == 15
    chunks = [chunk["choices"][0] for chunk in await chunks_of(client, n=3, seed=1)]
    assert list(dict.fromkeys(chunk["index"] for chunk in chunks)) == [0, 1, 2]
    for index in range(3):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in chunk["delta"] for chunk in mine[1:])
        assert "".join(chunk["delta"].get("content", "") for chunk in mine) == ANSWER
        assert mine[-1]["finish_reason"] == "stop"


async def test_characters_are_never_split(client: httpx2.AsyncClient) -> None:
    """A character of several tokens is sent whole, streamed or not."""
    messages = [{"role": "user", "content": "Show me an emoji of fire."}]
    assert (await chat(client, messages=messages))["choices"][0]["message"]["content"] == "🔥"
    chunks = await chunks_of(client, messages=messages)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == ["🔥"]


def talk_of(turns: int) -> list[dict[str, str]]:
    """Return a conversation in which the user repeats one message."""
    asked, said = {"role": "user", "content": "Say: apple"}, {"role": "assistant"}
    return [*([asked, {**said, "content": "apple"}] * turns), asked]


async def test_a_long_talk(client: httpx2.AsyncClient) -> None:
    """A conversation of a hundred messages is one prompt, and its last message is answered."""
    reply = await chat(client, messages=talk_of(50), max_tokens=5)
    assert reply["choices"][0]["message"]["content"] == "apple"
    assert reply["usage"]["prompt_tokens"] > 700


async def test_others_are_served_while_a_huge_talk_is_cut(demo: httpx2.AsyncClient) -> None:
    """A conversation far beyond the context length is a 400, and others are served meanwhile."""
    huge = asyncio.create_task(
        demo.post("/v1/chat/completions", json={"model": "m", "messages": talk_of(4000)})
    )
    await asyncio.sleep(0)
    reply = await chat(demo)
    assert reply["choices"][0]["message"]["content"] == ANSWER
    assert (await huge).json()["error"]["code"] == "context_length_exceeded"


async def test_empty_system_messages_and_names(client: httpx2.AsyncClient) -> None:
    """An empty system message with a name is accepted and leaves the answer unchanged."""
    system = {"role": "system", "content": "", "name": "boss"}
    reply = await chat(client, messages=[system, *FRANCE])
    assert reply["choices"][0]["message"]["content"] == ANSWER


async def test_only_a_request_with_a_prediction_reports_one() -> None:
    """Tokens that an engine drafts by itself are no predictions of the client."""
    text = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."
    asked = {"role": "user", "content": "Count to 12."}
    messages = [asked, {"role": "assistant", "content": text}, asked]
    async with adapting(LlamaCpp()) as client:
        for prediction in (None, {"type": "content", "content": text}):
            body = {"messages": messages, "prediction": prediction}
            reply = await chat(client, **body)
            last = (await chunks_of(client, **body, stream_options={"include_usage": True}))[-1]
            for usage in (reply["usage"], last["usage"]):
                details = usage["completion_tokens_details"]
                found = details["accepted_prediction_tokens"]
                assert found > 0 if prediction else found == 0
                assert prediction or details["rejected_prediction_tokens"] == 0


def test_drafts_are_counted_as_predictions_if_there_is_one() -> None:
    """The counts of all choices are added for a prediction, and are zero without one."""
    finishes = [Finish(0, "end", None, 3, 5, accepted_tokens=2, rejected_tokens=1)] * 2
    counts = []
    for usage_of in (detailed_usage_of, predicted_usage_of):
        details: Any = usage_of(finishes, 2)["completion_tokens_details"]
        counts.append([details[name] for name in PREDICTED])
    assert counts == [[0, 0], [4, 2]]


async def test_a_control_token_as_a_stop_ends_an_answer_with_tools(
    scorer: httpx2.AsyncClient,
) -> None:
    """A control token in `stop` ends an answer with tools, too, and does not count."""
    (token,) = (await scorer.post("/tokenize", json={"prompt": "<|im_start|>"})).json()["tokens"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"tools": tools, "stop": "<|im_start|>", "logit_bias": {str(token): 100}}
    reply = await chat(scorer, **body, max_tokens=6)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["usage"]["completion_tokens"] == 0
