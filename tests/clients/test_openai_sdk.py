"""Tests of the official `openai` client with every engine."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

ANSWER = "The capital of France is Paris."
ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
STORY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]


def test_chat(sdk: OpenAI) -> None:
    """A plain chat completion has the expected answer and passes the SDK's strict types."""
    reply = sdk.chat.completions.create(model="m", messages=ASK, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == 22
    assert reply._request_id is not None
    assert reply._request_id.startswith("req_")


def test_a_chat_stream(sdk: OpenAI) -> None:
    """A streamed chat completion has the expected answer, and usage at the end."""
    with sdk.chat.completions.create(
        model="m",
        messages=ASK,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


def test_the_stream_helper(sdk: OpenAI) -> None:
    """The SDK's stream helper assembles three choices."""
    with sdk.chat.completions.stream(
        model="m", messages=ASK, temperature=0, n=3, seed=1
    ) as stream:  # fmt: skip
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [ANSWER] * 3
    assert [choice.message.role for choice in final.choices] == ["assistant"] * 3


def test_completions(served_url: str) -> None:
    """The completions endpoint works, streamed (without the SDK's strict types) and not."""
    with OpenAI(base_url=f"{served_url}/v1", api_key="x") as client:
        prompt = "Q: What is the capital of Japan?\nA:"
        reply = client.completions.create(model="m", prompt=prompt, stop="\n", temperature=0)
        assert reply.choices[0].text == " The capital of Japan is Tokyo."
        with client.completions.create(
            model="m", prompt=prompt, stop=["\n"], temperature=0, stream=True
        ) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == reply.choices[0].text


def test_models(sdk: OpenAI) -> None:
    """Models are listed and retrieved, also with slashes in their names."""
    (model,) = sdk.models.list().data
    assert sdk.models.retrieve(model.id).id == model.id


def test_errors_have_their_classes(sdk: OpenAI) -> None:
    """The SDK raises its error classes with code and param."""
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="m", messages=[], temperature=0)
    assert (caught.value.code, caught.value.param) == ("empty_array", "messages")
    with pytest.raises(openai.NotFoundError):
        sdk.post("/nothing", cast_to=object)


async def test_async_clients_of_game_mods(served_url: str) -> None:
    """A game mod's async client can read a stream by sentences, with stops, and close it early."""
    async with AsyncOpenAI(base_url=f"{served_url}/v1", api_key="x") as client:
        for stop in ("#", ["#", "\n\n"]):
            sentences: list[str] = []
            pending = ""
            stream = await client.chat.completions.create(
                model="m",
                messages=STORY,
                temperature=0,
                stream=True,
                stop=stop,
                max_tokens=120,
            )
            async for chunk in stream:
                pending += chunk.choices[0].delta.content or ""
                *done, pending = pending.split(". ")
                sentences += done
                if len(sentences) >= 2:
                    break
            await stream.close()
            assert sentences[:2] == ["One day, Ben went to the park", "Ben saw a little bird"]
