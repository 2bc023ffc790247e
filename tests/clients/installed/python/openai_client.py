"""The `openai` package: helpers that the tests in `tests/clients` do not use."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from common import ANSWER, ASK, JAPAN, PARIS, TOM, Person
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

TALK: list[ChatCompletionMessageParam] = [{"role": "user", "content": ASK}]
WEATHER: list[ChatCompletionMessageParam] = [{"role": "user", "content": PARIS}]


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


@pytest.fixture
def client(url: str) -> OpenAI:
    """Return the client with only a base URL and a key."""
    return OpenAI(base_url=url, api_key="unused")


def test_chat(client: OpenAI) -> None:
    """A chat completion has the answer and usage."""
    reply = client.chat.completions.create(model="demo", messages=TALK, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stored(client: OpenAI) -> None:
    """A stored completion is listed, retrieved, updated and deleted."""
    made = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], store=True, max_tokens=3,
        metadata={"run": "openai-python"},
    )  # fmt: skip
    found = [*client.chat.completions.list(metadata={"run": "openai-python"})]
    assert [one.id for one in found] == [made.id]
    assert client.chat.completions.update(made.id, metadata={}).metadata == {}
    assert client.chat.completions.retrieve(made.id).choices == found[0].choices
    assert [one.content for one in client.chat.completions.messages.list(made.id)] == ["Hi"]
    assert client.chat.completions.delete(made.id).deleted


def test_stream(client: OpenAI) -> None:
    """A stream's deltas join to the answer; usage comes at the end."""
    stream = client.chat.completions.create(
        model="demo", messages=TALK, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert told == ANSWER
    assert chunks[-1].usage is not None


async def test_asynchronous(url: str) -> None:
    """The asynchronous client gets the same answer."""
    async with AsyncOpenAI(base_url=url, api_key="unused") as client:
        reply = await client.chat.completions.create(model="demo", messages=TALK, temperature=0)
    assert reply.choices[0].message.content == ANSWER


def test_structured(client: OpenAI) -> None:
    """`parse` returns an object of a Pydantic class."""
    reply = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": TOM}],
        temperature=0,
        max_tokens=60,
        response_format=Person,
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_structured_in_a_stream(client: OpenAI) -> None:
    """The stream helper's events end with a parsed object."""
    with client.chat.completions.stream(
        model="demo",
        messages=[{"role": "user", "content": TOM}],
        temperature=0,
        max_tokens=60,
        response_format=Person,
    ) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_tools(client: OpenAI) -> None:
    """The arguments of a strict function are parsed."""
    reply = client.chat.completions.parse(
        model="demo", messages=WEATHER, temperature=0, max_tokens=100, tool_choice="required",
        tools=[pydantic_function_tool(GetWeather)],
    )  # fmt: skip
    calls = reply.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, GetWeather)


def test_logprobs(client: OpenAI) -> None:
    """Log-probabilities come with their alternatives."""
    reply = client.chat.completions.create(
        model="demo", messages=TALK, temperature=0, logprobs=True, top_logprobs=3
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content
    assert "".join(one.token for one in content) == ANSWER
    assert all(len(one.top_logprobs) == 3 for one in content)


def test_completions(client: OpenAI) -> None:
    """A legacy completion echoes its prompt with log-probabilities."""
    reply = client.completions.create(
        model="demo", prompt=JAPAN, max_tokens=1, echo=True,
        logprobs=2, temperature=0,
    )  # fmt: skip
    choice = reply.choices[0]
    assert choice.text.startswith("Q: What")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens or [])


def test_models(client: OpenAI) -> None:
    """The list of models has the one that is served."""
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_errors(client: OpenAI) -> None:
    """Errors are the client's own exceptions, with OpenAI's codes."""
    with pytest.raises(openai.BadRequestError) as overflow:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "word " * 5000}]
        )
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=TALK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=TALK, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="demo", messages=TALK, max_tokens=1, response_format=Person
        )


def test_abort(client: OpenAI) -> None:
    """A stream that is closed early does not disturb the next request."""
    story: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]
    with client.chat.completions.create(model="demo", messages=story, stream=True) as stream:
        next(iter(stream))
    test_chat(client)


@pytest.mark.parametrize("more", [{}, {"encoding_format": "float"}], ids=["default", "float"])
def test_embeddings(embedding_url: str, embedded: Any, more: Any) -> None:
    """Vectors are right: of a text, of texts, and of the model's own ids."""
    client = OpenAI(base_url=embedding_url, api_key="unused")
    for given in (embedded.texts, embedded.ids):
        reply = client.embeddings.create(model="demo", input=given, **more)
        embedded.check([item.embedding for item in reply.data])
        alone = client.embeddings.create(model="demo", input=given[0], **more).data[0]
        embedded.check_one(alone.embedding, embedded.vectors[0])
    (item,) = client.embeddings.create(model="demo", input="a", dimensions=16, **more).data
    assert len(item.embedding) == 16
